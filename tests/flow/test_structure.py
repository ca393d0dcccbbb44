"""Tables whose columns change during a sync, before a sync, or after the table was set aside."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

import pytest

from pgcdc_assets import Lake
from pgcdc_assets.checks.status import status
from pgcdc_assets.errors import UnknownTable
from pgcdc_assets.flow.decide import Bounds
from tests.flow.rig import Rig, T, following
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.fixture
def rig(rig: Rig) -> Rig:
    return rig.started(batch_seconds=0.1, range_seconds=1)


def _listed(rig: Rig, column: str) -> bool:
    # A point may leave the table out until the next catalog check.
    with suppress(UnknownTable):
        return column in Lake(rig.lake).at().arrow(T).column_names
    return False


def test_table_without_row_changes_gets_its_new_columns_in_follow_mode(rig: Rig) -> None:
    """No row of the table is changed after the DDL. The catalog check finds the new columns, and points soon list the
    table with them."""
    with following(rig):
        rig.conn.execute("ALTER TABLE t ADD w int NOT NULL DEFAULT 5")
        wait_for(lambda: _listed(rig, "w"))
        rig.conn.execute("ALTER TABLE t RENAME v TO x")
        wait_for(lambda: _listed(rig, "x"))
        rig.conn.execute("UPDATE t SET w = 6 WHERE id < 5")
    rig.sync()
    rig.assert_equal()
    assert [(one.table, one.copied) for one in rig.observer.structures] == [(T, False)] * 2
    assert not rig.observer.copies[2:], "no table was copied again"


@pytest.mark.long
def test_table_catches_up_from_the_log_after_pgcdc_heal(rig: Rig) -> None:
    aside = Rig(rig.settings.model_copy(update={"schema_changes": "set_aside"}), rig.conn, rig.session, rig.observer)
    rig.commit(
        "UPDATE t SET v = 'before' WHERE id = 1", "ALTER TABLE t ADD w int DEFAULT 5", "DELETE FROM t WHERE id = 2"
    )
    assert [name for name, _ in aside.sync().set_aside] == [T]
    assert rig.settings.source is not None
    (told,) = [one for one in status(rig.settings).problems if one.thing == f"table {T}"]
    until = (datetime.now(UTC) + rig.settings.retention).strftime("%Y-%m-%d")
    assert f"run `pgcdc heal {T.shell}`: the change log keeps the missing changes at least until {until}" in told.do
    rig.commit("ALTER TABLE t RENAME v TO x", "INSERT INTO t (id) VALUES (1000)")
    assert [name for name, _ in rig.sync().set_aside] == [T], "a changed setting alone does not end the state"
    copies = len(rig.observer.copies)
    assert rig.engine("heal t").sync(Bounds(), heal=[T]).set_aside == []
    rig.assert_equal()
    assert len(rig.observer.copies) == copies
