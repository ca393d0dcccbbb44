"""Tables that are altered or locked during their copy. This does not delay other tables, and delays the altered tables
only briefly."""

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
    """In each round of copies, runs one of the steps, after the round's snapshot and before the first read. Returns a
    list that gets the number of tables of each round."""
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
    with pytest.raises(CopyBlocked, match=f"public.u: cannot be read, because it is locked by pid {pid}"):
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
def test_sync_ends_although_a_table_is_truncated_in_every_round(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog is checked often during the sync, and the table is truncated after each snapshot."""
    rig.setup()
    rig.settings = rig.settings.model_copy(update={"range_seconds": 0.01})
    rounds = after_the_snapshot(monkeypatch, *[lambda: rig.conn.execute("TRUNCATE u")] * 6)
    with pytest.raises(CopyOutdated, match=r"table public\.u"):
        rig.sync()
    assert rounds == [2, 1, 1]
    rig.assert_equal("public.t")


@pytest.mark.long
def test_copy_that_is_outdated_when_it_is_complete_is_repeated_by_the_next_sync(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table was not published for a moment, so its changes were not streamed. Its stored state has this reason.

    The test prevents a second round of copies in the first sync. Otherwise this sync would repeat the copy itself,
    because it has not reached its goal yet.
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
