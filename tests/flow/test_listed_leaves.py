"""The publication lists the partitions of a table one by one. A point that lists the table has all rows of a new
partition."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pgcdc_assets import Lake
from pgcdc_assets.checks.status import status
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.reports import RunState, Silent
from pgcdc_assets.points.points import ConsistentPoints
from tests.fix_postgres import Database
from tests.flow.rig import Rig, T, following, newest
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

K, P = TableName("public", "k"), TableName("public", "p")
_MAKE = (
    "CREATE TABLE k (day int, v text) PARTITION BY LIST (day)",
    "CREATE TABLE k_1 PARTITION OF k FOR VALUES IN (1)",
    "ALTER TABLE k REPLICA IDENTITY FULL",
    "ALTER TABLE k_1 REPLICA IDENTITY FULL",
    "INSERT INTO k VALUES (1, 'a'), (1, 'a')",
)
_NEW = "CREATE TABLE k_2 PARTITION OF k FOR VALUES IN (2)"
_FULL = "ALTER TABLE k_2 REPLICA IDENTITY FULL"
_ROW = "INSERT INTO k VALUES (2, 'b')"
_REASON = (
    "partition public.k_2 is in no publication, so its rows are not replicated: give the partition a REPLICA IDENTITY "
    "if it has none, or run `pgcdc setup`"
)


class _Writer(Silent):
    """Commits a transaction on the source in each pass of the sync's loop, as a busy source does."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self._rig = rig

    def moving(self, now: Callable[[], RunState]) -> None:
        self._rig.commit("UPDATE t SET v = v || 'a' WHERE id = 1")


@pytest.fixture
def rig(rig: Rig) -> Rig:
    """A project with a long interval between the regular catalog checks of a sync. Before a point, the sync checks the
    catalog only if the catalog has changed since the last check."""
    rig.commit(*_MAKE)
    return rig.started(batch_seconds=0.1, range_seconds=600)


def _days(rig: Rig) -> list[tuple[int, int]]:
    """Returns two counts for each point that lists table k: the rows of day 2 in the mirror of k, and the rows of day 2
    that the source had at this LSN. The second count comes from the mirror of t: a transaction that adds or deletes
    rows of day 2 adds or deletes as many rows of t."""
    lake, found = Lake(rig.lake), []
    for point in ConsistentPoints(rig.settings.layout).all():
        at = lake.at(point.replay_lsn)
        if K in at.tables:
            found.append((at.arrow("k")["day"].to_pylist().count(2), at.arrow("t").num_rows - 50))
    return found


def test_no_point_lacks_the_rows_of_a_new_partition(rig: Rig) -> None:
    """Each transaction that writes a row of the new partition also writes a row of ``t``. A point contains the
    transaction if the mirror of ``t`` has this row at the point."""
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        rig.commit(_NEW, _FULL, _ROW, "INSERT INTO t VALUES (1001)")
        wait_for(lambda: 1001 in Lake(rig.lake).at().arrow("t")["id"].to_pylist(), what="a point")
        rig.commit(_ROW, "INSERT INTO t VALUES (1002)")
        wait_for(lambda: K in newest(rig).tables and _days(rig)[-1][0] == 2, what="a point of both")
    rig.commit("DELETE FROM k WHERE day = 2", "DELETE FROM t WHERE id > 1000")
    rig.sync()
    assert all(mirrored == held for mirrored, held in _days(rig))
    rig.assert_equal("public.k", "public.t")


def test_points_from_before_the_drop_of_a_partition_that_the_receiver_never_saw_have_its_rows(rig: Rig) -> None:
    """The partition was created, written and dropped while no sync ran. A point from before the drop may leave its
    table out, but may not list it without the rows of the partition."""
    rig.commit("CREATE TABLE p (day int PRIMARY KEY) PARTITION BY LIST (day)")
    rig.commit("CREATE TABLE p_1 PARTITION OF p FOR VALUES IN (1)", "INSERT INTO p VALUES (1)")
    rig.sync()
    rig.commit("CREATE TABLE p_2 PARTITION OF p FOR VALUES IN (2)")
    rig.commit("INSERT INTO p VALUES (2)")
    written = rig.commit("UPDATE u SET v = v + 1")
    before = rig.flush()
    rig.commit("DROP TABLE p_2")
    rig.sync(until=before)
    at = Lake(rig.lake).at()
    assert written < at.lsn, "the point contains the update, and so the row of the partition"
    assert P not in at.tables or at.arrow("p").num_rows == 2
    rig.sync()
    assert P in newest(rig).tables
    rig.assert_equal("public.p", "public.t")


@pytest.mark.parametrize(
    ("tables", "changes"),
    [
        ("public.p", False),
        pytest.param("public.p", True, marks=pytest.mark.long),
        pytest.param("public.*", False, marks=pytest.mark.long),
        pytest.param("public.*", True, marks=pytest.mark.long),
    ],
)
def test_sync_goes_on_until_a_point_lists_a_table_whose_partition_was_dropped(
    rig: Rig, tables: str, changes: bool
) -> None:
    """The source commits more transactions after the sync has chosen the LSN at which it ends. So the catalog check
    that the dropped partition requires is above this LSN, and a point at this LSN may not list the table. ``changes``:
    whether the table's other partition changes too."""
    rig.settings = rig.settings.model_copy(update={"tables": [tables]})
    rig.commit("CREATE TABLE p (day int PRIMARY KEY) PARTITION BY LIST (day)")
    rig.commit("CREATE TABLE p_1 PARTITION OF p FOR VALUES IN (1, 3, 4)", "INSERT INTO p VALUES (1)")
    rig.sync()
    rig.observer = _Writer(rig)
    for day in (3, 4):
        rig.commit("CREATE TABLE p_2 PARTITION OF p FOR VALUES IN (2)")
        rig.commit("INSERT INTO p VALUES (2)")
        rig.commit("DROP TABLE p_2")
        if changes:
            rig.commit(f"INSERT INTO p VALUES ({day})")
        written = rig.commit("UPDATE u SET v = v + 1")
        assert rig.sync().left == []
        at = Lake(rig.lake).at()
        assert written < at.lsn
        assert P in at.tables
        rig.assert_equal("public.p")


@pytest.mark.long
def test_new_partition_without_a_replica_identity_sets_its_table_aside(rig: Rig) -> None:
    """The sync does not publish the partition, because UPDATEs of a published table without a replica identity fail."""
    rig.commit(_NEW, _ROW, "UPDATE t SET v = 'a' WHERE id = 1")
    report = rig.sync()
    assert report.set_aside == [(K, _REASON)]
    assert set(newest(rig).tables) == {T, TableName("public", "u")}
    rig.commit("UPDATE k SET v = 'c' WHERE day = 2")
    told = [problem for problem in status(rig.settings).problems if "public.k" in problem.thing]
    assert [problem.what for problem in told if _REASON in problem.what]
    rig.commit(_FULL)
    assert rig.sync().set_aside == []
    rig.assert_equal("public.k")


@pytest.mark.long
def test_locked_new_partition_sets_its_table_aside_until_the_lock_is_released(rig: Rig, database: Database) -> None:
    """Another session holds the lock on the partition that CREATE INDEX CONCURRENTLY takes. The sync does not wait for
    the release of this lock."""
    rig.commit(_NEW, _FULL, _ROW)
    with database.connect() as other:
        with other.transaction():
            other.execute("LOCK TABLE k_2 IN SHARE UPDATE EXCLUSIVE MODE")
            assert rig.sync().set_aside == [(K, _REASON)]
        assert rig.sync().set_aside == []
    rig.assert_equal("public.k")


@pytest.mark.long
def test_partition_that_the_role_may_not_publish_sets_its_table_aside(rig: Rig, database: Database) -> None:
    """The role owns neither the table nor the partition, so it cannot publish the partition."""
    role, source = f"r_{database.name}"[:60], rig.settings.source
    rig.commit(f"CREATE ROLE {role} LOGIN SUPERUSER", _NEW, _FULL, _ROW)
    rig.commit(f"ALTER ROLE {role} NOSUPERUSER REPLICATION", f"GRANT pg_read_all_data TO {role}")
    rig.settings = rig.settings.model_copy(update={"source": f"{source} user={role}"})
    assert rig.sync().set_aside == [(K, _REASON)]
    rig.settings = rig.settings.model_copy(update={"source": source})
    assert rig.sync().set_aside == []
    rig.assert_equal("public.k")
