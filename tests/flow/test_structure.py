"""Tables whose columns change during a sync, before a sync, or after the table was set aside."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from pgcdc_assets import Lake
from pgcdc_assets.checks.status import status
from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import commit_info, now_ms, put_commit
from pgcdc_assets.delta.definition import commit_columns
from pgcdc_assets.delta.logfiles import Action
from pgcdc_assets.delta.mapping import stated
from pgcdc_assets.errors import UnknownTable
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.mirror.delta import tableplan
from tests.deltatables import opened
from tests.flow.rig import Rig, T, following
from tests.oracle import source_rows
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


def _columns(rig: Rig, name: TableName) -> list[str]:
    """The columns that the newest point shows, without the columns that pgcdc adds."""
    return [column for column in Lake(rig.lake).at().arrow(name).column_names if not column.startswith("_pgcdc_")]


@pytest.mark.parametrize(("point", "change", "theirs"), [
    (FaultPoint.LINK_COMMITTED, "INSERT INTO {} (a, c) VALUES (3, 5)", False),
    pytest.param(FaultPoint.LINK_COMMITTED, "INSERT INTO {} (a, c) VALUES (3, 5)", True, marks=pytest.mark.long),
    pytest.param(FaultPoint.MERGE_COMMITTED, "UPDATE {} SET c = 5", False, marks=pytest.mark.long),
    pytest.param(FaultPoint.MIRROR_WIDENED, "UPDATE {} SET c = 5", False, marks=pytest.mark.long),
])  # fmt: skip
def test_a_new_column_that_changes_after_a_sync_died_keeps_its_own_values(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, point: FaultPoint, change: str, theirs: bool
) -> None:
    """The sync dies after it added the new column to the mirrors, and before it stored the tables' states. Before the
    next sync, the new column is renamed, dropped, or dropped and created again. The log also has a row without the new
    column. ``theirs``: another writer has added a column of the same name to the mirrors before."""
    changes = {
        "renamed": "ALTER TABLE renamed RENAME c TO d", "dropped": "ALTER TABLE dropped DROP c",
        "recreated": "ALTER TABLE recreated DROP c; ALTER TABLE recreated ADD c int",
        "replaced": "ALTER TABLE replaced DROP c; ALTER TABLE replaced DROP b; ALTER TABLE replaced ADD b int",
    }  # fmt: skip
    for name in changes:
        rig.commit(f"CREATE TABLE {name} (a int PRIMARY KEY, b int)", f"INSERT INTO {name} VALUES (1, 1)")
    rig.setup()
    assert rig.sync().set_aside == []
    for name in changes:
        mirror = opened(rig.settings.layout.mirror(TableName("public", name)))
        if theirs:
            commit_columns(mirror, stated(mirror.metadata).with_more(pa.schema([("c", pa.int32())])))
        rig.commit(f"INSERT INTO {name} VALUES (2, 2)")
        rig.commit(f"ALTER TABLE {name} ADD c int", change.format(name))

    class Died(BaseException):
        pass

    def dies(reached: FaultPoint) -> None:
        if reached is point:
            raise Died

    with monkeypatch.context() as patch:
        patch.setattr(tableplan, "passed", dies)
        with pytest.raises(Died):
            rig.sync()
    copies = len(rig.observer.copies)
    for statements in changes.values():
        rig.conn.execute(statements.encode())
    assert rig.sync().set_aside == []
    rig.assert_equal(*(f"public.{name}" for name in changes))
    for name in changes:
        assert _columns(rig, TableName("public", name)) == source_rows(rig.conn, "public", name)[0]
    assert len(rig.observer.copies) == copies, "no table was copied again"
    assert sorted(one.table.name for one in rig.observer.structures) == sorted(changes)


def _require(rig: Rig, protocol: Action) -> None:
    mirror = opened(rig.settings.layout.mirror(T))
    commit = [{"commitInfo": commit_info(now_ms(), "CHANGE PROTOCOL", {})}, {"protocol": protocol}]
    put_commit(mirror.folder / DELTA_LOG, mirror.number + 1, commit)


def test_a_table_that_was_set_aside_before_it_got_a_new_column_can_be_healed(rig: Rig) -> None:
    """The turn that has rows with the new column cannot write to the mirror, because the mirror has a table feature
    that pgcdc does not support. Then this feature is dropped."""
    protocol = opened(rig.settings.layout.mirror(T)).protocol
    _require(rig, {**protocol, "writerFeatures": [*protocol["writerFeatures"], "rowTracking"]})
    rig.conn.execute("INSERT INTO t (id) VALUES (999)")
    rig.commit("ALTER TABLE t ADD c int", "INSERT INTO t (id, c) VALUES (1000, 5)")
    assert [name for name, _ in rig.sync().set_aside] == [T]
    _require(rig, protocol)
    assert rig.engine("heal t").sync(Bounds(), heal=[T]).set_aside == []
    rig.assert_equal()
    assert not rig.observer.copies[2:], "no table was copied again"
