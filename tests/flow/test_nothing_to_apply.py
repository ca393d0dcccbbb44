"""Batches whose rows are applied to no mirror, in whole runs. No point is made for them, so a run records that it has
applied the whole log. The sensor then requests no further run."""

from __future__ import annotations

import pytest

from pgcdc_assets.defs import sensors
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.structure.record import TableState
from tests.flow.rig import Rig, T, U, newest

pytestmark = [pytest.mark.spark, pytest.mark.long]


def unapplied(rig: Rig) -> int:
    return sensors.unapplied(ChangeLog(rig.settings.layout), rig.settings)


@pytest.mark.parametrize("others", [("public.u",), ()])
def test_a_run_that_has_applied_the_whole_log_leaves_no_batch_for_later_runs(rig: Rig, others: tuple[str, ...]) -> None:
    """A table is set aside; with or without another table that is followed."""
    rig.started(tables=("public.t", *others))
    states = TableStates(rig.settings.layout)
    row = states.all()[T]
    assert row.table is not None
    states.set(row.table, TableState.SET_ASIDE, row.lsn, "why not")
    before = newest(rig)
    rig.conn.execute("INSERT INTO t VALUES (1000, 'new', '')")
    rig.sync(receive_only=True)
    assert unapplied(rig) == 1
    for _ in range(2):
        rig.sync()
        assert (unapplied(rig), newest(rig)) == (0, before)

    if others:
        rig.conn.execute("INSERT INTO u VALUES (1000, 0, 0)")
        rig.sync(receive_only=True)
        assert unapplied(rig) == 2
        rig.sync()
        assert newest(rig).tables.keys() == {U}
    rig.engine().sync(Bounds(), heal=[T])
    assert T in newest(rig).tables
    assert unapplied(rig) == 0


def test_a_table_that_the_setting_tables_excludes_leaves_no_batch_for_later_runs(rig: Rig) -> None:
    rig.conn.execute(f"CREATE PUBLICATION {rig.settings.publication} FOR TABLE t, u".encode())
    rig.started(tables=("public.t",))
    before = newest(rig)
    rig.conn.execute("INSERT INTO u VALUES (1000, 0, 0)")
    rig.sync(receive_only=True)
    assert unapplied(rig) == 1
    rig.sync()
    assert (unapplied(rig), newest(rig)) == (0, before)
