"""The catalog check before each point, with a real source and without Spark: the tests copy and apply nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import CopyBlocked
from pgcdc_assets.flow import maintenance
from pgcdc_assets.flow.copies import Copied
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Thinning
from pgcdc_assets.flow.progress import TablesProgress
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.sync import Sync
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import ReceiverSettings
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.setup.setup import setup
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.structure.listing import shown
from tests.fix_postgres import Database
from tests.flow.mirrors import copied_mirror, delta_target, no_spark

START = """
CREATE TABLE quiet (id int PRIMARY KEY); CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TYPE pair AS (a int, b text);
CREATE TABLE t (id int, d int, m mood, p pair, v text, PRIMARY KEY (id, d)) PARTITION BY LIST (d);
CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1);
"""
QUIET, T = TableName("public", "quiet"), TableName("public", "t")


@dataclass
class Run:
    """A sync whose receiver has ended. Both tables are copied, and are at the log's position."""

    sync: Sync
    work: Work
    user: psycopg.Connection[Any]

    def listed(self) -> set[TableName]:
        """Publishes a point at the log's position, and returns the tables that the newest point lists."""
        self.sync._turns.publish(self.work.log.position())
        newest = self.work.progress.points.newest()
        assert newest is not None
        return set(newest.tables)

    def copied(self) -> None:
        for table in self.work.catalog.tables:
            at = self.work.log.position()
            copied_mirror(self.work.layout, self.work.identity, table.name, at)
            self.work.progress.copying([table], at)
            self.work.progress.copied(table, at, 1)

    def land(self, table: Table) -> None:
        """Complete a copy, in whose snapshot the catalog showed ``table``."""
        at = self.work.log.position()
        self.sync._copies.channel.committed.put(Copied(table, CopyReport(table.name, at, 0, 0, 0, 0.0, 1)))
        self.sync._take_committed()


@pytest.fixture
def run(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    slot = f"s_{database.name}"
    settings = Settings(source=database.conninfo, lake=tmp_path / "lake", slot=slot, publication=slot)
    with database.connect() as user, connect(database.conninfo) as conn:
        user.execute(START)
        catalog = setup(settings, database.conninfo).catalog
        log = ChangeLog(settings.layout)
        log.create(catalog.identity, Lsn(5), 1)
        target = delta_target(settings.layout, catalog.identity)
        progress = TablesProgress(settings.layout, catalog, target, log.began, log.start)
        work = Work(settings, catalog, log, target, progress, Silent(), SparkOnDemand(no_spark))
        receiver = ReceiverProcess(
            ReceiverSettings(database.conninfo, str(settings.layout.root), catalog.publications, 1, 1)
        )
        stream = LogStream(receiver, log, conn)
        stream.arrived = True
        made = Run(Sync(work, database.conninfo, stream, Bounds()), work, user)
        made.copied()
        yield made


@pytest.mark.parametrize(
    ("done", "state"),
    [
        ("ALTER TYPE mood RENAME VALUE 'sad' TO 'down'", TableState.WAITING),
        ("ALTER TYPE pair ADD ATTRIBUTE c int CASCADE", TableState.WAITING),
        ("ALTER TABLE t DETACH PARTITION t_1; ALTER TABLE t ATTACH PARTITION t_1 FOR VALUES IN (1)",
         TableState.WAITING),
        ("ALTER TABLE t_1 SET UNLOGGED; ALTER TABLE t_1 SET LOGGED", TableState.WAITING),
        ("CREATE TABLE t_2 PARTITION OF t FOR VALUES IN (2); INSERT INTO t (id, d) VALUES (9, 2)", TableState.WAITING),
        ("ALTER TABLE t ADD n int DEFAULT (random() * 9)::int", TableState.WAITING),
        ("ALTER TABLE t ALTER v TYPE int USING 1", TableState.WAITING),
    ],
)  # fmt: skip
def test_no_point_lists_a_table_that_ddl_has_made_wrong(run: Run, done: str, state: TableState) -> None:
    assert run.listed() == {QUIET, T}
    for statement in done.split("; "):
        run.user.execute(statement.encode())
    assert run.listed() == {QUIET}
    assert run.work.progress[T].state is state


@pytest.mark.parametrize("done", ["ALTER TABLE t ADD n int DEFAULT 5", "ALTER TABLE t RENAME v TO w"])
def test_column_change_that_the_mirror_follows_removes_the_table_only_from_later_points(run: Run, done: str) -> None:
    """The point before the change lists the table, so another point at the same LSN must list it, too."""
    assert run.listed() == {QUIET, T}
    version = run.work.progress[T].version
    run.user.execute(done.encode())
    assert run.listed() == {QUIET, T}
    newest = run.work.progress.points.newest()
    assert newest is not None
    assert newest.tables[T] == version
    entry = run.work.progress[T]
    assert (entry.state.readable, entry.reshaping) == (True, True)
    assert not shown(entry, Lsn(6))


def test_copy_is_listed_only_after_a_catalog_check_that_confirms_its_table(run: Run) -> None:
    """The table may have changed between the snapshot of its copy and the next catalog check."""
    at_the_snapshot = run.work.progress[T].table
    assert run.listed() == {QUIET, T}
    run.user.execute("ALTER TYPE mood RENAME VALUE 'sad' TO 'down'")
    assert run.listed() == {QUIET}
    run.land(at_the_snapshot)
    assert run.listed() == {QUIET}
    assert run.work.progress[T].state is TableState.WAITING
    (as_it_is,) = (table for table in run.work.catalog.tables if table.name == T)
    run.land(as_it_is)
    assert run.listed() == {QUIET, T}


def test_table_renamed_back_is_not_listed_at_lsns_where_it_had_another_name(run: Run) -> None:
    assert run.listed() == {QUIET, T}
    run.user.execute("ALTER TABLE quiet RENAME TO other")
    assert run.listed() == {QUIET, T}, "as the point of the same LSN had it before"
    run.user.execute("ALTER TABLE other RENAME TO quiet")
    assert run.listed() == {QUIET, T}, "a point stays what it is"
    assert not shown(run.work.progress[QUIET], run.work.log.position()), "the log ends where it was `other`"
    assert run.work.progress[QUIET].state.readable, "its rows are followed all the same"


def test_table_that_was_a_partition_between_two_checks_is_not_listed_at_that_time(run: Run) -> None:
    """The current catalog does not show whether the table was a partition at the end of the log, or became a partition
    above it."""
    points, catalog = run.work.progress.points, run.sync._catalog
    run.user.execute("CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    assert run.listed() == {QUIET, T}
    run.user.execute("ALTER TABLE r ATTACH PARTITION quiet FOR VALUES FROM (0) TO (10)")
    run.user.execute("ALTER TABLE r DETACH PARTITION quiet")
    seen = len(points.all())
    run.listed()
    assert len(points.all()) == seen, "quiet may have been a partition, and of any partitioned table"
    for name in (QUIET, T):
        assert run.work.progress[name].state.readable, "their rows are followed all the same"
        assert shown(run.work.progress[name], catalog.seen_at)
        assert not shown(run.work.progress[name], Lsn(catalog.seen_at - 1))
    assert catalog.seen_at > run.work.log.position()


def test_table_that_was_a_partition_before_the_first_check_is_not_listed_before_it(run: Run) -> None:
    """No sync was running while the table was a partition. The column marks of the last sync differ from the current
    column marks."""
    run.user.execute("CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    run.user.execute("ALTER TABLE r ATTACH PARTITION quiet FOR VALUES FROM (0) TO (10)")
    run.user.execute("ALTER TABLE r DETACH PARTITION quiet")
    run.sync._turns.publish(run.work.log.position())
    for name in (QUIET, T):
        assert not shown(run.work.progress[name], run.work.log.position())
        assert shown(run.work.progress[name], run.sync._catalog.seen_at)


def test_copy_of_a_table_that_was_a_partition_later_is_not_listed_at_that_time(run: Run) -> None:
    """The copy's snapshot was taken before the ATTACH. The copy completes after a catalog check that took place after
    the DETACH."""
    at_the_snapshot, at = run.work.progress[QUIET].table, run.work.log.position()
    run.user.execute("CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    run.user.execute("ALTER TABLE r ATTACH PARTITION quiet FOR VALUES FROM (0) TO (10)")
    run.user.execute("ALTER TABLE r DETACH PARTITION quiet")
    run.sync._turns.publish(at)
    run.land(at_the_snapshot)
    run.sync._turns.publish(at)
    assert not shown(run.work.progress[QUIET], at)
    assert shown(run.work.progress[QUIET], run.sync._catalog.seen_at)


def test_table_is_not_thinned_during_its_copy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a copy in progress belong to no version yet, so thinning would delete them. Older versions of a table
    that no point lists are kept, too."""
    monkeypatch.setattr(maintenance, "THIN_AFTER_VERSIONS", 2)
    assert run.listed() == {QUIET, T}
    progress, due = run.work.progress, Thinning(run.work)
    table, at = progress[QUIET].table, run.work.log.position()
    progress.moved(QUIET, at, 5)
    progress.copying([table], at)
    assert not due._is_due(QUIET)
    progress.copied(table, at, 1)
    progress.moved(QUIET, at, 7)
    assert not due._is_due(QUIET)
    assert progress[T].version == 1
    progress.moved(T, at, 3)
    assert due._is_due(T)
    assert not due._is_due(T)


@pytest.mark.long
@pytest.mark.since(15, "row filters")
def test_follow_mode_makes_no_points_while_a_lock_hides_a_row_filter(run: Run, database: Database) -> None:
    assert run.listed() == {QUIET, T}
    turns, points = run.sync._turns, run.work.progress.points
    before = len(list(points.all()))
    publication = run.work.settings.publication
    run.user.execute(f"ALTER PUBLICATION {publication} SET TABLE quiet WHERE (id < 5), t".encode())
    with database.connect() as other:
        other.execute("BEGIN; LOCK TABLE quiet IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(CopyBlocked, match=r"public\.quiet"):
            turns.check_catalog()
        turns._follow = True
        assert not turns.publish(run.work.log.position())
        assert len(list(points.all())) == before
        other.execute("COMMIT")
    turns.point.published(run.work.log.position(), whole=True)
    assert run.listed() == {T}
    assert turns.point.due, "what was held back is owed"
