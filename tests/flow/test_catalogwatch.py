"""What checks of the source's catalog do to the states of tables and to points. No test needs Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgcdc_assets.core.catalog import Catalog, Column, PgType, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, EmptyPublication
from pgcdc_assets.flow import maintenance
from pgcdc_assets.flow.catalogwatch import CatalogWatch
from pgcdc_assets.flow.copies import Copied
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Thinning
from pgcdc_assets.flow.progress import TablesProgress
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.structurechanges import MirrorChange, StructureChanges
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
from pgcdc_assets.structure.record import TableState
from pgcdc_assets.structure.successor import successor
from tests.fix_postgres import Database
from tests.flow.mirrors import OWNER, copied_at_10_applied_to_20, copied_mirror, delta_target, no_spark
from tests.structure.marked import marks, remarked

INT = PgType(23, "int4")


def _table(oid: int, name: str, *columns: str) -> Table:
    made = tuple(Column(number, column, INT) for number, column in enumerate(("id", *columns), 1))
    return Table(oid, TableName("public", name), made, key=(1,), marks=marks(publications="1:1"))


class Lines(Silent):
    """Collects the progress lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        self.lines.append(f"{stage}: {message}")


A, B = _table(1, "a"), _table(2, "b", "v")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """The work of a sync with tables a and b. Both mirrors were copied at LSN 10, and then applied changes up to LSN
    20."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(lake=tmp_path / "lake")
    identity = OWNER
    log = ChangeLog(settings.layout)
    log.create(identity, Lsn(5), 1)
    catalog = Catalog(identity, "p", 180000, (A, B))
    target = delta_target(settings.layout, identity)
    progress = TablesProgress(settings.layout, catalog, target, log.began, log.start)
    work = Work(settings, catalog, log, target, progress, Silent(), SparkOnDemand(no_spark))
    for table in (A, B):
        copied_at_10_applied_to_20(settings.layout, table)
        work.progress.copying([table], Lsn(10))
        work.progress.copied(table, Lsn(10), 1)
    return work


@dataclass
class _Source:
    work: Work
    empty: bool

    def mark_now(self) -> Lsn:
        return self.work.log.position()

    def without_rows(self, _: int) -> bool:
        return self.empty


def _watched(work: Work, live: Sequence[Table], *, empty: bool = False, paused: bool = False) -> None:
    structure = StructureChanges(work)
    watch = CatalogWatch(work, _Source(work, empty), structure)  # type: ignore[arg-type]
    watch.paused = paused
    watch.compare_all(live)
    structure.cancel()


def test_table_that_is_set_aside_waits_for_a_copy_after_its_catalog_entry_changed(work: Work) -> None:
    """A turn has set the table aside, because its mirror lacks a row. A later catalog check finds a change of the table
    that explains the missing row. So the table is copied again, which repairs the mirror."""
    work.progress.put_aside(B.name, Lsn(15), "the mirror lacks a row")
    _watched(work, [A, B])
    assert work.progress[B.name].state is TableState.SET_ASIDE
    _watched(work, [A, replace(B, marks=marks(publications="1:2"))])
    assert work.progress[B.name].state is TableState.WAITING
    assert work.progress[A.name].state is TableState.CATCHING_UP


def test_large_table_with_a_new_relfilenode_is_copied_only_at_the_operators_request(work: Work) -> None:
    """Tables a and b have new relfilenodes, maybe because of a TRUNCATE that is not in the stream. Only b is larger
    than ``recopy_bytes``. So a waits for a copy, and b is set aside."""
    work.settings = work.settings.model_copy(update={"recopy_bytes": 1 << 20})
    new = marks(relfilenode=7, traceless=True)
    for _ in range(2):
        _watched(work, [replace(A, marks=new), replace(B, marks=new, pages=129)])
    assert work.progress[A.name].state is TableState.WAITING
    entry = work.progress[B.name]
    assert entry.state is TableState.SET_ASIDE
    assert "has new files" in (entry.reason or "")
    assert (entry.reason or "").endswith("it has 1 MiB, more than `recopy_bytes`, so pgcdc does not copy it by itself")


def test_relfilenode_is_compared_with_the_value_at_the_last_catalog_check(work: Work) -> None:
    """A table counts as rewritten if both its relfilenode and its columns have changed since the last check. The first
    check finds only a new relfilenode, as after a TRUNCATE. The second check finds only changed columns, as after a SET
    NOT NULL. Only the third check finds both changes."""
    marked = remarked(B, "1:7 2:7", relfilenode=5)
    work.progress.moved(B.name, Lsn(20), table=marked)
    _watched(work, [A, remarked(marked, relfilenode=6)])
    _watched(work, [A, remarked(marked, "1:7 2:8", relfilenode=6)])
    assert work.progress[B.name].state is TableState.CATCHING_UP
    _watched(work, [A, remarked(marked, "1:7 2:9", relfilenode=7)])
    assert work.progress[B.name].state is TableState.WAITING


def test_table_published_during_a_run_waits_for_its_copy(work: Work) -> None:
    new = _table(9, "new")
    _watched(work, [A, B, new])
    assert work.progress.waiting() == [new]


def test_run_ends_with_an_error_if_the_publication_has_no_tables_left(work: Work) -> None:
    with pytest.raises(EmptyPublication, match="publication p"):
        _watched(work, [])
    _watched(work, [A])


def test_table_that_no_mirror_can_hold_is_not_copied(work: Work) -> None:
    refused = replace(_table(2, "b", "V", "v"), marks=marks(publications="1:2"))
    _watched(work, [A, refused])
    entry = work.progress[B.name]
    assert (entry.state, entry.refused, work.progress.waiting()) == (TableState.SET_ASIDE, True, [])
    assert "differ only in case" in (entry.reason or "")
    _watched(work, [A, replace(B, marks=marks(publications="1:2"))])
    assert [table.name for table in work.progress.waiting()] == [B.name], "a mirror can hold the new columns"


def test_all_changes_of_a_table_are_logged_once_in_one_line(work: Work) -> None:
    """Each catalog check finds the same changes again, because applying is paused and the mirrors do not change."""
    observer = Lines()
    work.observer = observer
    more = tuple(Column(number, f"c{number}", INT, missing="1") for number in range(3, 38))
    changed = replace(B, columns=(*B.columns, *more))
    for _ in range(3):
        _watched(work, [A, changed], paused=True)
    (line,) = observer.lines
    assert line.startswith(
        'watch: table public.b: column "c3" was added, and older rows have a value in it, column "c4" '
    )
    assert line.endswith('column "c7" was added, and older rows have a value in it, and 30 more')
    _watched(work, [A, B], paused=True)
    assert len(observer.lines) == 1
    _watched(work, [A, changed], paused=True)
    assert observer.lines == [line, line], "the same change was made a second time"


def test_renamed_table_is_logged_as_renamed(work: Work) -> None:
    """Of the tables that were not renamed, ``b`` is no longer in the publication, and ``new`` is new in it. Their
    progress lines say so."""
    observer = Lines()
    work.observer = observer
    _watched(work, [replace(A, name=TableName("public", "c")), _table(9, "new")])
    assert observer.lines == [
        "watch: table public.b: is no longer published, or was dropped",
        "watch: table public.new: is published now",
        "watch: table public.c: was renamed from public.a, so its mirror is renamed too",
    ]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (B, "the change was undone, so the mirror is unchanged"),
        (_table(2, "b", "w"), "the mirror has the new structure"),
    ],
    ids=["renamed back", "still renamed"],
)
def test_log_line_of_a_renamed_column_says_whether_the_mirror_was_changed(work: Work, now: Table, said: str) -> None:
    """The stream showed the column's new name. Before the sync reads the catalog, the column may have been renamed
    back. Then the mirror is not changed."""
    told = Lines()
    work.observer = told
    after = successor(B, now, Lsn(20))
    work.progress.reshaping(B.name)
    change = MirrorChange(after, "column 'v' was renamed to 'w'", version=2)
    assert StructureChanges(work).take_in(change, Lsn(20))
    assert told.lines == [f"watch: table public.b: column 'v' was renamed to 'w'; {said}, as of LSN 0/14"]


# The catalog check before each point, with a real source and without Spark --------------------------

START = """
CREATE TABLE quiet (id int PRIMARY KEY); CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TYPE pair AS (a int, b text);
CREATE TABLE t (id int, d int, m mood, p pair, v text, PRIMARY KEY (id, d)) PARTITION BY LIST (d);
CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1);
"""
QUIET, T = TableName("public", "quiet"), TableName("public", "t")


@dataclass
class Run:
    """A sync whose receiver has ended. The mirrors of the tables quiet and t are copied, and have applied the whole
    log."""

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
        """Completes a copy. ``table`` is the table as the copy's snapshot showed it."""
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
def test_no_point_lists_a_table_after_ddl_that_requires_a_new_copy(run: Run, done: str, state: TableState) -> None:
    assert run.listed() == {QUIET, T}
    for statement in done.split("; "):
        run.user.execute(statement.encode())
    assert run.listed() == {QUIET}
    assert run.work.progress[T].state is state


def test_no_point_lists_a_table_after_an_enum_value_that_was_added_since_the_copy_was_renamed(run: Run) -> None:
    run.user.execute("ALTER TYPE mood ADD VALUE 'great'")
    assert run.listed() == {QUIET, T}
    run.user.execute("ALTER TYPE mood RENAME VALUE 'great' TO 'super'")
    assert run.listed() == {QUIET}


def test_enum_value_that_a_catalog_check_finds_is_stored_in_one_commit_for_all_tables(run: Run) -> None:
    progress, at = run.work.progress, run.work.log.position()
    run.user.execute("ALTER TABLE quiet ADD m mood")
    run.sync._catalog.check()
    progress.moved(QUIET, at, 1, run.work.catalog.table(QUIET))
    before = progress.states._ledger.version()
    run.user.execute("ALTER TYPE mood ADD VALUE 'great'")
    run.sync._catalog.check()
    assert progress.states._ledger.version() == before + 1
    stored = {table.name: {label.label for label in table.marks.labels} for table in progress.states.tables()}
    assert stored == {name: {"sad", "ok", "great"} for name in (QUIET, T)}


def test_no_point_lists_a_table_after_the_type_of_a_column_that_its_rows_brought_was_changed(run: Run) -> None:
    """The copy did not see this type, so its attributes are recorded by the check that first sees the type."""
    assert run.listed() == {QUIET, T}
    run.user.execute("CREATE TYPE late AS (a int)")
    run.user.execute("ALTER TABLE t ADD n late")
    run.listed()
    progress, at = run.work.progress, run.work.log.position()
    assert run.sync._catalog._seen is not None
    (now,) = (table for table in run.sync._catalog._seen.tables if table.name == T)
    progress.moved(T, at, 1, replace(progress[T].table, columns=now.columns))
    assert run.listed() == {QUIET, T}
    run.user.execute("ALTER TYPE late ADD ATTRIBUTE b int CASCADE")
    assert run.listed() == {QUIET}


@pytest.mark.parametrize("done", ["ALTER TABLE t ADD n int DEFAULT 5", "ALTER TABLE t RENAME v TO w"])
def test_table_whose_columns_change_is_left_out_only_of_points_at_higher_lsns(run: Run, done: str) -> None:
    """The mirror gets these changes of columns without a new copy. The point that was made before the change lists the
    table. A second point at the same LSN must list the table too. Only points at higher LSNs leave the table out."""
    assert run.listed() == {QUIET, T}
    version = run.work.progress[T].version
    run.user.execute(done.encode())
    assert run.listed() == {QUIET, T}
    newest = run.work.progress.points.newest()
    assert newest is not None
    assert newest.tables[T] == version
    entry = run.work.progress[T]
    assert (entry.state.readable, entry.reshaping) == (True, True)
    assert not entry.shown(Lsn(6))


def test_copy_is_listed_only_after_a_catalog_check_that_finds_its_table_unchanged(run: Run) -> None:
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
    assert run.listed() == {QUIET, T}, "a second point at the same LSN lists the same tables"
    run.user.execute("ALTER TABLE other RENAME TO quiet")
    assert run.listed() == {QUIET, T}, "a third point at the same LSN lists the same tables"
    assert not run.work.progress[QUIET].shown(run.work.log.position()), "at the log's end, the table was named `other`"
    assert run.work.progress[QUIET].state.readable, "changes of the table are still applied"


def test_table_that_was_a_partition_between_two_checks_is_listed_only_from_the_second_check(run: Run) -> None:
    """The second check shows only that catalog rows of quiet have changed since the first check. So quiet may have been
    a partition of any table, and no new point lists a table below the LSN of the second check."""
    points, catalog = run.work.progress.points, run.sync._catalog
    run.user.execute("CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    assert run.listed() == {QUIET, T}
    run.user.execute("ALTER TABLE r ATTACH PARTITION quiet FOR VALUES FROM (0) TO (10)")
    run.user.execute("ALTER TABLE r DETACH PARTITION quiet")
    seen = len(points.all())
    run.listed()
    assert len(points.all()) == seen, "quiet may have been a partition of any table, so no table can be listed"
    for name in (QUIET, T):
        assert run.work.progress[name].state.readable, "changes of both tables are still applied"
        assert run.work.progress[name].shown(catalog.seen_at)
        assert not run.work.progress[name].shown(Lsn(catalog.seen_at - 1))
    assert catalog.seen_at > run.work.log.position()


def test_table_that_was_a_partition_before_the_first_check_is_listed_only_from_this_check(run: Run) -> None:
    """No sync was running while the table was a partition. The check finds only that catalog rows of the table have
    changed since the last sync."""
    run.user.execute("CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    run.user.execute("ALTER TABLE r ATTACH PARTITION quiet FOR VALUES FROM (0) TO (10)")
    run.user.execute("ALTER TABLE r DETACH PARTITION quiet")
    run.sync._turns.publish(run.work.log.position())
    for name in (QUIET, T):
        assert not run.work.progress[name].shown(run.work.log.position())
        assert run.work.progress[name].shown(run.sync._catalog.seen_at)


def test_table_that_was_a_partition_during_its_copy_is_listed_only_from_a_later_check(run: Run) -> None:
    """The copy's snapshot was taken before the ATTACH. After the DETACH, there was first a catalog check, and then the
    copy completed."""
    at_the_snapshot, at = run.work.progress[QUIET].table, run.work.log.position()
    run.user.execute("CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    run.user.execute("ALTER TABLE r ATTACH PARTITION quiet FOR VALUES FROM (0) TO (10)")
    run.user.execute("ALTER TABLE r DETACH PARTITION quiet")
    run.sync._turns.publish(at)
    run.land(at_the_snapshot)
    run.sync._turns.publish(at)
    assert not run.work.progress[QUIET].shown(at)
    assert run.work.progress[QUIET].shown(run.sync._catalog.seen_at)


def test_old_versions_of_a_table_are_not_deleted_during_its_copy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a copy is in progress, no Delta version refers to the files that the copy has written. So these files would
    be deleted together with the old versions. After the copy, old versions are kept until a point lists the table."""
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
def test_follow_mode_publishes_no_point_while_a_lock_prevents_reading_a_row_filter(
    run: Run, database: Database
) -> None:
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
    assert turns.point.due, "the point that could not list every table is due again"
