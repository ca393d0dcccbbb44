"""Partitions are added and removed. The mirror of the table is changed without a copy, unless some rows were not
streamed."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.store.local import path_of
from tests.flow.rig import Rig

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
def rig(rig: Rig) -> Rig:
    # Made by hand: setup would publish each partition of a table without a key separately.
    rig.commit(*_MAKE, f"CREATE PUBLICATION {rig.settings.publication} FOR TABLE p, k, t")
    rig.started(batch_seconds=0.1, range_seconds=1)
    rig.commit("UPDATE p SET v = v || '!' WHERE id % 4 = 0", "DELETE FROM k WHERE v = 'v3'")
    rig.sync()
    return rig


def _assert_followed(rig: Rig, *copied: TableName) -> None:
    rig.assert_equal("public.p", "public.k", "public.t")
    assert [copy.table for copy in rig.observer.copies[3:]] == list(copied)


@pytest.mark.long
def test_empty_new_partition_becomes_part_of_the_mirror_without_a_copy(rig: Rig) -> None:
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


@pytest.mark.long
def test_rows_of_a_removed_partition_leave_the_mirror(rig: Rig) -> None:
    """Rows that moved into or out of this partition before its removal are still in the log above the mirror's
    position."""
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


@pytest.mark.long
def test_feed_rows_of_a_removed_partition_above_the_mirror_are_deleted(rig: Rig) -> None:
    """The feed is ahead of the mirror. Feed rows below the mirror's position are kept."""
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
