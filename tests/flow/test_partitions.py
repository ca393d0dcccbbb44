"""Partitions that come and go: the mirror of their table follows without a copy, unless rows came in no stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.core.states import TableState
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.local import path_of
from tests.end_to_end.command import wait_for
from tests.fix_postgres import Database
from tests.flow.rig import Rig, named_settings, rig_of

pytestmark = pytest.mark.spark

P, K = TableName("public", "p"), TableName("public", "k")
_MAKE = (
    "CREATE TABLE p (id int, day int, v text, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
    "CREATE TABLE k (day int, v text) PARTITION BY LIST (day)",
    *(f"CREATE TABLE {root}_{day} PARTITION OF {root} FOR VALUES IN ({day})" for root in "pk" for day in (1, 2, 3)),
    *(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("k", "k_1", "k_2", "k_3")),
    "INSERT INTO p SELECT g, g % 3 + 1, 'v' || g FROM generate_series(1, 60) g",
    "INSERT INTO k SELECT g % 3 + 1, 'v' || g % 7 FROM generate_series(1, 60) g",
)


@pytest.fixture
def rig(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.chdir(tmp_path)
    name = f"s_{database.name}"[:60]
    with rig_of(database, spark, named_settings(database, range_seconds=1)) as rig:
        # That of setup would list the leaves of a table without a key one by one.
        rig.commit(*_MAKE, f"CREATE PUBLICATION {name} FOR TABLE p, k, t")
        rig.setup()
        rig.sync()
        rig.commit("UPDATE p SET v = v || '!' WHERE id % 4 = 0", "DELETE FROM k WHERE v = 'v3'")
        rig.sync()
        yield rig


def _assert_followed(rig: Rig, *copied: TableName) -> None:
    rig.assert_equal("public.p", "public.k", "public.t")
    assert [copy.table for copy in rig.observer.copies[3:]] == list(copied)


def test_a_partition_that_comes_without_rows(rig: Rig) -> None:
    rig.commit("CREATE TABLE p_4 PARTITION OF p FOR VALUES IN (4)", "UPDATE p SET v = 'x' WHERE id = 1")
    rig.commit("CREATE TABLE k_4 (v text, day int)", "ALTER TABLE k_4 REPLICA IDENTITY FULL",
               "ALTER TABLE k ATTACH PARTITION k_4 FOR VALUES IN (4)")  # fmt: skip
    rig.sync()
    rig.commit("INSERT INTO p VALUES (100, 4, 'new')", "UPDATE p SET day = 4 WHERE id IN (5, 6)")
    rig.commit("INSERT INTO k VALUES (4, 'new'), (4, 'new')", "UPDATE k SET day = 4 WHERE v = 'v1'")
    rig.sync()
    _assert_followed(rig)
    rig.commit("TRUNCATE p_4", "TRUNCATE k_1", "DELETE FROM k WHERE v = 'v2'")
    rig.sync()
    _assert_followed(rig)
    assert [one.table for one in rig.observer.structures] == [K, P]


def test_a_partition_that_goes_takes_its_rows_along(rig: Rig) -> None:
    """Rows that moved between it and others before it went are in the log behind the mirror's position."""
    rig.commit(
        "INSERT INTO p VALUES (101, 1, 'a'), (102, 2, 'b')", "UPDATE p SET day = 2 WHERE id = 3",
        "UPDATE p SET day = 1 WHERE id = 4", "DELETE FROM p WHERE id = 6", "ALTER TABLE p DETACH PARTITION p_1",
        "UPDATE p SET v = 'later' WHERE day = 2",
    )  # fmt: skip
    rig.commit("UPDATE k SET v = 'w' WHERE day = 2", "DROP TABLE k_2", "INSERT INTO k VALUES (3, 'v1')")
    rig.sync()
    _assert_followed(rig)
    rig.commit("CREATE TABLE k_2 PARTITION OF k FOR VALUES IN (2)", "ALTER TABLE k_2 REPLICA IDENTITY FULL")
    rig.sync()
    rig.commit("INSERT INTO k VALUES (2, 'again')", "UPDATE p SET v = '.' WHERE id = 5")
    rig.sync()
    _assert_followed(rig)


def test_what_was_derived_of_a_partition_that_went_is_forgotten(rig: Rig) -> None:
    """The feed was ahead of the mirror; what came before stays in it."""
    before = _fed(rig)
    assert before
    rig.commit("INSERT INTO p VALUES (101, 1, 'a'), (102, 2, 'b')", "DELETE FROM p WHERE id = 7")
    rig.sync(receive_only=True)
    log = ChangeLog(rig.settings.layout).open()
    rig.engine().transform_range([P], LsnRange(log.start, log.position()))
    assert _fed(rig) == before + 3
    rig.commit("DROP TABLE p_1")
    rig.sync()
    _assert_followed(rig)
    assert _fed(rig) == before + 2, "less the row that went with its partition"


def _fed(rig: Rig) -> int:
    return int(pa.table(DeltaTable(path_of(rig.settings.layout.changes(P))).to_pyarrow_table()).num_rows)


def test_a_partition_that_comes_with_rows_has_its_table_copied(rig: Rig) -> None:
    rig.commit("CREATE TABLE p_4 (LIKE p INCLUDING ALL)", "INSERT INTO p_4 VALUES (100, 4, 'before')",
               "ALTER TABLE p ATTACH PARTITION p_4 FOR VALUES IN (4)")  # fmt: skip
    rig.sync()
    _assert_followed(rig, P)


def test_a_partition_that_went_and_came_back_has_its_table_copied(rig: Rig) -> None:
    rig.commit("ALTER TABLE p DETACH PARTITION p_1")
    rig.sync()
    _assert_followed(rig)
    rig.commit("DELETE FROM p_1", "ALTER TABLE p ATTACH PARTITION p_1 FOR VALUES IN (1)", "TRUNCATE p_1")
    rig.sync()
    _assert_followed(rig, P)


def test_a_partition_with_the_name_that_another_had_has_its_table_copied(rig: Rig) -> None:
    """The mirror knows a leaf by the name that it had when it came."""
    rig.commit("ALTER TABLE p_1 RENAME TO p_old", "CREATE TABLE p_1 PARTITION OF p FOR VALUES IN (4)")
    rig.sync()
    _assert_followed(rig, P)
    rig.commit("INSERT INTO p VALUES (100, 4, 'new')", "TRUNCATE p_old")
    rig.sync()
    _assert_followed(rig, P)


def test_partitions_come_and_go_while_a_run_follows(rig: Rig) -> None:
    """As with a table of the last days: the next one is made ahead, and the oldest dropped."""
    bounds = Bounds(follow=True)
    run = threading.Thread(target=lambda: rig.engine().sync(bounds), daemon=True)
    run.start()
    try:
        for day in range(4, 9):
            rig.commit(f"CREATE TABLE p_{day} PARTITION OF p FOR VALUES IN ({day})")
            wait_for(partial(_listed_with, rig, f"p_{day}"), what=f"a point with p_{day}")
            rig.commit(f"INSERT INTO p SELECT g, {day}, 'v' FROM generate_series(1, 50) g")
            rig.commit(f"UPDATE p SET v = 'w' WHERE day = {day - 1}", f"DROP TABLE p_{day - 3}")
    finally:
        bounds.stop.set()
        run.join(120)
    assert not run.is_alive()
    rig.sync()
    _assert_followed(rig)


def _listed_with(rig: Rig, leaf: str) -> bool:
    row = TableStates(rig.settings.layout).get(P)
    newest = ConsistentPoints(rig.settings.layout).newest()
    if row is None or row.table is None or newest is None or row.state is not TableState.CATCHING_UP:
        return False
    known = leaf in {one.name.name for one in row.table.leaves}
    return known and row.table.lineage is not None and newest.replay_lsn >= row.table.lineage.since


@pytest.mark.parametrize("change", ["come", "go"])
def test_via_the_root(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The stream does not tell whose rows they are: those of one that goes cannot be taken out."""
    monkeypatch.chdir(tmp_path)
    name = f"s_{database.name}"[:60]
    settings = Settings(source=database.conninfo, slot=name, publication=name)
    with rig_of(database, spark, settings) as rig:
        rig.commit(*_MAKE, f"CREATE PUBLICATION {name} FOR TABLE p, k, t WITH (publish_via_partition_root)")
        rig.setup()
        rig.sync()
        if change == "come":
            rig.commit("CREATE TABLE p_4 PARTITION OF p FOR VALUES IN (4)")
            rig.sync()
            rig.commit("INSERT INTO p VALUES (100, 4, 'new')", "UPDATE p SET day = 4 WHERE id = 5")
            rig.commit("DELETE FROM k WHERE v = 'v1' AND day = 2", "UPDATE k SET day = 1, v = 'v2' WHERE v = 'v4'")
        else:
            rig.commit("UPDATE p SET v = 'x' WHERE id = 5", "DROP TABLE p_1")
        rig.sync()
        rig.assert_equal("public.p", "public.k", "public.t")
        assert [copy.table for copy in rig.observer.copies[3:]] == ([] if change == "come" else [P])
