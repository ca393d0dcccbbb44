"""Mirrors contain what the publication publishes, also if the publication belongs to another owner, and if tables are
added to it and removed from it during a sync in follow mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.checks.status import status
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import EmptyPublication
from pgcdc_assets.flow.decide import LATE_SHARE, Bounds
from pgcdc_assets.flow.turns import take_turn
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta import deltatarget
from pgcdc_assets.mirror.delta.copy import copy_tables
from pgcdc_assets.mirror.target import Failures
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.project import load_catalog
from tests.flow.rig import Rig
from tests.projectfiles import CATALOG_FILE
from tests.traps.scenario import assert_same, empty_rig, following_run
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.fixture
def rig(server: EmbeddedServer, spark: SparkSession, tmp_path: Path) -> Iterator[Rig]:
    with empty_rig(server, spark, tmp_path / "project") as made:
        yield made


def _named(rig: Rig, name: str) -> None:
    """Makes the project use the publication ``name``, which setup did not create."""
    rig.settings = rig.settings.model_copy(update={"publication": name})


@pytest.mark.long
def test_running_sync_follows_tables_that_are_added_to_and_removed_from_the_publication(rig: Rig) -> None:
    rig.settings = rig.settings.model_copy(update={"range_seconds": 0.5})
    run, pub = rig.conn.execute, rig.settings.publication
    run("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'x' FROM generate_series(1, 9) g")
    run("CREATE TABLE p (id int, part int, PRIMARY KEY (id, part)) PARTITION BY LIST (part); "
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES IN (1); INSERT INTO p VALUES (1, 1), (2, 1)")  # fmt: skip
    rig.setup()
    with following_run(rig) as following:
        following.listed("p", "t")

        # A table is added to the publication. One of its rows was inserted before the ALTER PUBLICATION, and one row
        # after it. The table has no later changes.
        run("CREATE TABLE late (id int PRIMARY KEY, v text); INSERT INTO late VALUES (1, 'before')")
        run(f"ALTER PUBLICATION {pub} ADD TABLE late")
        run("INSERT INTO late VALUES (2, 'after')")
        following.listed("late", "p", "t")
        rig.assert_equal("public.late", "public.t", "public.p")
        assert _saved() == ["late", "p", "t"]

        # The table is removed from the publication, its rows change, and it is added again. The stream contains none of
        # these changes.
        run(f"ALTER PUBLICATION {pub} DROP TABLE late")
        run("DELETE FROM late WHERE id = 1")
        run(f"ALTER PUBLICATION {pub} ADD TABLE late")
        run("INSERT INTO late VALUES (3, 'regained')")
        wait_for(lambda: _same(rig, "public.late"), what="a mirror of late that equals the source")

        # A table with rows is attached as a partition. The stream deletes one of its rows before the catalog check sees
        # the ATTACH.
        run("CREATE TABLE p_2 (id int, part int, PRIMARY KEY (id, part)); INSERT INTO p_2 VALUES (7, 2), (8, 2)")
        run("BEGIN; ALTER TABLE p ATTACH PARTITION p_2 FOR VALUES IN (2); DELETE FROM p WHERE id = 7; COMMIT")
        wait_for(lambda: _same(rig, "public.p"), what="a mirror of p that equals the source")

        run("DROP TABLE late")
        wait_for(lambda: _saved() == ["p", "t"], what="a saved catalog without late")
        following.listed("p", "t", since=rig.commit("INSERT INTO t VALUES (100, 'makes a point')"))
        run(f"ALTER PUBLICATION {pub} DROP TABLE p, t")
        wait_for(lambda: bool(following.errors), what="the error about the empty publication")
    assert isinstance(following.errors[0], EmptyPublication)
    assert "lists no table" in str(status(rig.settings).problems)
    with pytest.raises(EmptyPublication, match="no longer lists any table"):
        rig.sync()
    rig.setup()
    rig.sync()
    rig.assert_equal("public.t", "public.p")


def _saved() -> list[str]:
    catalog = load_catalog(CATALOG_FILE)
    return [table.name.name for table in catalog.tables] if catalog else []


def _same(rig: Rig, table: str) -> bool:
    try:
        rig.assert_equal(table)
    except AssertionError:
        return False
    return True


def test_mirrors_have_only_the_rows_and_columns_that_another_owners_publication_selects(rig: Rig) -> None:
    """A publication of another owner, with every option that a table can have."""
    run = rig.conn.execute
    _named(rig, "theirs")
    run("""
        CREATE TABLE filtered (id int PRIMARY KEY, open bool, v text);
        CREATE TABLE toasted (id int PRIMARY KEY, open bool, big text);
        ALTER TABLE filtered REPLICA IDENTITY FULL; ALTER TABLE toasted ALTER big SET STORAGE EXTERNAL;
        CREATE UNIQUE INDEX toasted_key ON toasted (id, open); ALTER TABLE toasted ALTER open SET NOT NULL;
        ALTER TABLE toasted REPLICA IDENTITY USING INDEX toasted_key;
        CREATE TABLE listed (id int PRIMARY KEY, secret text, v text, later int);
        CREATE TABLE root (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
        CREATE TABLE root_1 PARTITION OF root FOR VALUES IN (1);
        CREATE TABLE root_2 PARTITION OF root FOR VALUES IN (2);
        INSERT INTO filtered SELECT g, g % 2 = 0, 'v' || g FROM generate_series(1, 20) g;
        INSERT INTO toasted SELECT g, g % 2 = 0, repeat(md5(g::text), 200) FROM generate_series(1, 6) g;
        INSERT INTO listed SELECT g, 'secret', 'v' || g FROM generate_series(1, 9) g;
        INSERT INTO root SELECT g, g % 2 + 1, 'v' || g FROM generate_series(1, 20) g;
        CREATE VIEW filtered_open AS SELECT * FROM filtered WHERE open;
        CREATE VIEW toasted_open AS SELECT * FROM toasted WHERE open;
        CREATE VIEW listed_columns AS SELECT id, v FROM listed;
        CREATE PUBLICATION theirs FOR TABLE filtered WHERE (open), toasted WHERE (open), listed (id, v), root
            WITH (publish_via_partition_root = true);
    """)

    def equal(*but: str) -> None:
        for view in {"filtered_open", "toasted_open", "listed_columns", "root"} - set(but):
            assert_same(rig, f"public.{view}", f"public.{view.split('_')[0]}")

    rig.setup()
    rig.sync()
    equal()
    run("UPDATE filtered SET open = NOT open WHERE id <= 10")
    run("UPDATE filtered SET v = v || '!'; DELETE FROM filtered WHERE id IN (1, 20)")
    run("UPDATE toasted SET open = false WHERE id = 2")
    run("UPDATE listed SET secret = 'other', v = 'w' WHERE id < 4; UPDATE listed SET secret = 'x' WHERE id = 9")
    run("UPDATE root SET part = 3 - part WHERE id <= 4; UPDATE root SET v = 'x' WHERE id > 15")
    run("DELETE FROM root WHERE id = 9")
    assert rig.sync().set_aside == []
    equal()

    # Changes that are not in the stream: the large value of a row that begins to match the filter, and changed
    # partitions.
    run("UPDATE toasted SET open = true WHERE id = 1")
    run("CREATE TABLE root_3 (LIKE root INCLUDING ALL); INSERT INTO root_3 VALUES (100, 3, 'older')")
    run("ALTER TABLE root ATTACH PARTITION root_3 FOR VALUES IN (3); ALTER TABLE root DETACH PARTITION root_1")
    ((name, reason),) = rig.sync().set_aside
    assert name == TableName("public", "toasted")
    assert "without a large value" in reason
    assert any("without a large value" in problem.what for problem in status(rig.settings).problems)
    equal("toasted_open")

    run("DROP PUBLICATION theirs")
    run("DELETE FROM listed WHERE id = 5; INSERT INTO filtered VALUES (1000, true, 'nobody published this')")
    run("CREATE PUBLICATION theirs FOR TABLE filtered WHERE (id > 10), toasted, listed, root")
    run("CREATE OR REPLACE VIEW filtered_open AS SELECT * FROM filtered WHERE id > 10")
    run("DROP VIEW toasted_open; CREATE VIEW toasted_open AS SELECT * FROM toasted")
    run("DROP VIEW listed_columns; CREATE VIEW listed_columns AS SELECT * FROM listed")
    run("INSERT INTO listed VALUES (50, 'told now', 'v', 1); UPDATE filtered SET v = 'y' WHERE id > 15")
    rig.sync()
    equal()


# A new copy of one table during a sync in follow mode -----------------------------------------------

T, U = TableName("public", "t"), TableName("public", "u")
ROUNDS = 4


@pytest.mark.long
def test_late_copy_catches_up_and_delays_no_other_table(
    server: EmbeddedServer, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table u is copied again during a sync in follow mode. The test delays the copy while both tables change, so
    after the copy, u is behind t. The changes are inserts, which need no MERGE. Ranges are so small that each turn
    applies only one batch."""
    turns: list[tuple[set[str], Lsn]] = []
    gate = threading.Event()

    def late(*args: Any) -> Failures:
        assert gate.wait(200)
        return copy_tables(*args)

    def recorded(work: Any, log: Any, upto: Lsn, tables: Any) -> Any:
        turns.append(({entry.table.name.name for entry in tables}, upto))
        return take_turn(work, log, upto, tables)

    with empty_rig(server, spark, tmp_path / "project", range_bytes=1) as rig:
        rig.conn.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
        rig.setup()
        rig.sync()
        monkeypatch.setattr(deltatarget, "copy_tables", late)
        monkeypatch.setattr("pgcdc_assets.flow.turns.take_turn", recorded)
        points, log = ConsistentPoints(rig.settings.layout), ChangeLog(rig.settings.layout).open()
        stop = threading.Event()
        run = threading.Thread(target=lambda: rig.engine().sync(Bounds(follow=True, stop=stop), copy_anew=[U]))
        run.start()
        try:
            wait_for(lambda: rig.conn.execute(_SNAPSHOTS).fetchone() is not None, what="the snapshot")
            for number in range(ROUNDS):
                at = rig.flush()
                rig.conn.execute(f"INSERT INTO t VALUES ({number}); INSERT INTO u VALUES ({number})")
                wait_for(lambda: log.position() > at, what="the batch")  # noqa: B023
            wait_for(lambda: _newest(points, {T}) > at, what="a point that lists only t")
            before = len(turns)
            gate.set()
            goal = rig.commit("INSERT INTO t VALUES (1000)")
            wait_for(lambda: _newest(points, {T, U}) >= goal, what="a point that lists t and u")
        finally:
            gate.set()
            stop.set()
            run.join(120)
        rig.assert_equal()
    assert len([upto for tables, upto in turns[before:] if tables == {"u"}]) >= ROUNDS // LATE_SHARE
    lows = [upto for tables, upto in turns if "t" in tables]
    assert lows == sorted(lows), "t was part of a turn that it had already applied"


_SNAPSHOTS = (
    "SELECT 1 FROM pg_stat_activity WHERE application_name = 'pgcdc_assets/snapshot' AND backend_xmin IS NOT NULL"
)


def _newest(points: ConsistentPoints, tables: set[TableName]) -> Lsn:
    newest = points.newest()
    return newest.replay_lsn if newest is not None and set(newest.tables) == tables else Lsn(0)
