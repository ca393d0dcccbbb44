"""Mirrors whose rows another writer has changed, in whole runs."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

from pgcdc_assets import Lake
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.record import TableState
from tests.flow.rig import Rig, T, U, newest

pytestmark = [pytest.mark.spark, pytest.mark.long]


def _delete(rig: Rig, name: TableName, where: str) -> None:
    DeltaTable(path_of(rig.settings.layout.mirror(name))).delete(where)


def test_healed_table_is_changed_in_all_points_until_a_new_copy(rig: Rig) -> None:
    rig.started()
    _delete(rig, T, "id = 3")
    rig.conn.execute("UPDATE t SET v = 'new' WHERE id = 7")
    rig.sync()
    told = newest(rig).changed
    assert told.keys() == {T}

    states = TableStates(rig.settings.layout)
    row = states.all()[T]
    assert row.table is not None
    states.set(row.table, TableState.SET_ASIDE, row.lsn, "a reason that has ended")
    assert rig.sync().changed == []
    assert rig.engine("heal t").sync(Bounds(), heal=[T]).changed == list(told.items())
    rig.conn.execute("UPDATE t SET v = 'newer' WHERE id = 7")
    assert rig.sync().changed == list(told.items())
    assert newest(rig).changed == told
    assert newest(rig).tables.keys() == {T, U}

    rig.engine("snapshot t").sync(Bounds(), copy_anew=[T])
    assert newest(rig).changed == {}
    rig.assert_equal()


def test_maintenance_keeps_the_right_version_of_a_changed_mirror_in_the_newest_point(rig: Rig) -> None:
    rig.started(tables=("public.t",))
    right = newest(rig)
    _delete(rig, T, "id = 1")
    rig.conn.execute("UPDATE t SET v = 'new' WHERE id = 1")
    assert [name for name, _ in rig.sync().set_aside] == [T]
    assert newest(rig) == right
    assert rig.engine("maintain").maintain(Allowance()).failed == []
    assert newest(rig).tables == right.tables
    assert len(Lake(rig.lake).at().arrow(T)) == 50
