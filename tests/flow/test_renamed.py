"""Tables that are renamed or moved to another schema: their mirrors continue under the new names, without a copy."""

from __future__ import annotations

from functools import partial

import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import UnknownTable, UsageError
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.flow.rig import Rig, T, following
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

W, ELSEWHERE = TableName("public", "w"), TableName("else", "w")


@pytest.fixture
def rig(rig: Rig) -> Rig:
    rig.started(batch_seconds=0.1, range_seconds=1)
    rig.commit("UPDATE t SET v = 'x' WHERE id < 20", "DELETE FROM t WHERE id = 7")
    rig.sync()
    return rig


def test_mirror_of_a_renamed_table_continues_under_the_new_name(rig: Rig) -> None:
    """Rows change before, in and after the transaction of the rename. The mirror has deletion vectors."""
    before = Lake(rig.lake).at().lsn
    rig.commit("UPDATE t SET v = 'y' WHERE id = 1", "ALTER TABLE t RENAME TO w", "DELETE FROM w WHERE id IN (2, 30)")
    rig.commit("INSERT INTO w VALUES (1000, 'new', NULL)")
    rig.sync()
    rig.assert_equal("public.w", "public.u")
    assert len(rig.observer.copies) == 2, "only the first copies of t and u"
    assert Lake(rig.lake).at(before).tables == [T, TableName("public", "u")]
    assert T not in Lake(rig.lake).at().tables
    (told,) = rig.observer.structures
    assert (told.table, told.what, told.before.name) == (W, "was renamed from public.t", T)
    rig.commit("UPDATE w SET v = v || '!'", "TRUNCATE u")
    rig.sync()
    rig.assert_equal("public.w", "public.u")


def _listed(rig: Rig, name: TableName) -> bool:
    newest = ConsistentPoints(rig.settings.layout).newest()
    return newest is not None and name in newest.tables


@pytest.mark.long
def test_forget_deletes_the_files_of_a_renamed_table_under_its_former_name(rig: Rig) -> None:
    with pytest.raises(UsageError, match="is still mirrored"):
        rig.engine("forget").forget([T])
    rig.commit("ALTER TABLE t RENAME TO w")
    rig.sync()
    with pytest.raises(UnknownTable, match="nope"):
        rig.engine("forget").forget([T, TableName("public", "nope")])
    assert path_of(rig.settings.layout.mirror(T)).exists()
    (gone,) = rig.engine("forget").forget([T])
    assert gone.files > 5
    assert not path_of(rig.settings.layout.mirror(T)).exists()
    assert not path_of(rig.settings.layout.changes(T)).exists()
    rig.commit("UPDATE w SET v = 'still followed'", "ALTER TABLE w RENAME TO t")
    rig.sync()
    rig.assert_equal()
    assert len(rig.observer.copies) == 2


@pytest.mark.long
def test_names_of_a_renamed_and_a_dropped_table_may_be_used_again_after_forget(rig: Rig) -> None:
    """A sync in follow mode runs all the time. After `forget`, one table is renamed back to a forgotten name, and a new
    table gets the other forgotten name."""
    rig.commit("CREATE TABLE gone (id int PRIMARY KEY)", "INSERT INTO gone VALUES (1)")
    gone = TableName("public", "gone")
    with following(rig):
        wait_for(partial(_listed, rig, gone), what="a point that lists gone")
        rig.commit("ALTER TABLE t RENAME TO w", "DROP TABLE gone")
        wait_for(partial(_listed, rig, W), what="a point that lists w")
        rig.engine("forget").forget([T, gone])
        rig.commit("ALTER TABLE w RENAME TO t", "CREATE TABLE gone (id int PRIMARY KEY)", "INSERT INTO gone VALUES (2)")
        wait_for(lambda: _listed(rig, T) and _listed(rig, gone), what="a point that lists both")
        for number in range(3):
            goal = rig.commit(f"UPDATE t SET v = '{number}' WHERE id < 9", f"INSERT INTO gone VALUES ({3 + number})")
            wait_for(partial(_is_above, rig, goal), what="a point above these changes")
            assert Lake(rig.lake).at().arrow("public.gone").num_rows == 2 + number
            assert Lake(rig.lake).at().arrow("public.t").num_rows == 49
    rig.sync()
    rig.assert_equal("public.t", "public.gone", "public.u")


def _is_above(rig: Rig, goal: Lsn) -> bool:
    newest = ConsistentPoints(rig.settings.layout).newest()
    return newest is not None and newest.replay_lsn >= goal - 1
