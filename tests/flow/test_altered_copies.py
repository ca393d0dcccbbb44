"""Tables that are altered or locked during their copy. Other tables are not delayed, and these tables only briefly."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from pgcdc_assets.checks.lake_facts import read_tables
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import CopyBlocked, CopyOutdated
from pgcdc_assets.flow import copies
from pgcdc_assets.mirror.delta import deltatarget
from pgcdc_assets.mirror.delta.copy import copy_tables
from pgcdc_assets.project import load_catalog
from tests.flow.rig import Rig, T, U
from tests.projectfiles import CATALOG_FILE

pytestmark = pytest.mark.spark


def after_the_snapshot(patch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> list[int]:
    """Runs one step in each round, between its snapshot and the first read. Returns the number of tables per round."""
    left, rounds = list(steps), []

    def meanwhile(session: Any, conninfo: str, tables: Any, *more: Any) -> Any:
        rounds.append(len(tables))
        if left:
            left.pop(0)()
        return copy_tables(session, conninfo, tables, *more)

    patch.setattr(deltatarget, "copy_tables", meanwhile)
    return rounds


def test_table_altered_during_its_copy_is_copied_again_by_the_same_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.setup()
    rounds = after_the_snapshot(
        monkeypatch,
        lambda: rig.conn.execute("TRUNCATE u; ALTER TABLE u ADD COLUMN more int DEFAULT 5"),
        lambda: rig.conn.execute("ALTER TABLE u ALTER more TYPE bigint"),
    )
    report = rig.sync()
    assert rounds == [2, 1, 1]
    assert sorted(copy.table for copy in report.copied) == [T, U]
    rig.assert_equal()


@pytest.mark.long
def test_locked_table_waits_for_the_next_run_and_names_the_lock_holder(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.setup()
    monkeypatch.setattr(copies, "COPY_ROUNDS", 1)
    pid = rig.conn.info.backend_pid
    after_the_snapshot(monkeypatch, lambda: rig.conn.execute("BEGIN; LOCK TABLE u"))
    with pytest.raises(CopyBlocked, match=f"public.u: cannot be read, for it is locked by pid {pid}"):
        rig.sync()
    catalog = load_catalog(CATALOG_FILE)
    assert catalog is not None
    t, u = read_tables(rig.settings.layout, catalog)
    assert (t.state, u.state) == (TableState.STREAMING, TableState.WAITING)
    assert u.reason is not None
    assert f"pid {pid}" in u.reason
    rig.conn.execute("COMMIT")
    rig.assert_equal("public.t")
    rig.sync()
    rig.assert_equal()


@pytest.mark.long
def test_run_ends_although_a_table_keeps_changing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run checks the catalog many times."""
    rig.setup()
    rig.settings = rig.settings.model_copy(update={"range_seconds": 0.01})
    rounds = after_the_snapshot(monkeypatch, *[lambda: rig.conn.execute("TRUNCATE u")] * 6)
    with pytest.raises(CopyOutdated, match=r"table public\.u"):
        rig.sync()
    assert rounds == [2, 1, 1]
    rig.assert_equal("public.t")


@pytest.mark.long
def test_copy_that_is_outdated_when_it_lands_is_repeated_by_the_next_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes between the two publications are not streamed. The table's state records this, so the next run knows it.

    This run may not begin a second round. Otherwise it would repeat the copy itself, since it is below its goal.
    """
    rig.setup()
    begin = copies.Copies.begin

    def and_then(session: Any, conninfo: str, tables: Any, *more: Any) -> Any:
        failures = copy_tables(session, conninfo, tables, *more)
        rig.conn.execute("ALTER PUBLICATION pgcdc DROP TABLE u; ALTER PUBLICATION pgcdc ADD TABLE u")
        return failures

    def once(run: copies.Copies, but: Collection[TableName] = ()) -> None:
        if not run.made:
            begin(run, but)

    with monkeypatch.context() as patch:
        patch.setattr(deltatarget, "copy_tables", and_then)
        patch.setattr(copies.Copies, "begin", once)
        rig.sync()
    catalog = load_catalog(CATALOG_FILE)
    assert catalog is not None
    t, u = read_tables(rig.settings.layout, catalog)
    assert (t.state, u.state) == (TableState.STREAMING, TableState.WAITING)
    assert u.reason is not None
    assert "lost and regained it" in u.reason
    rig.assert_equal("public.t")
    assert [copy.table for copy in rig.sync().copied] == [U]
    rig.assert_equal()
