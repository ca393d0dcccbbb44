"""Tables that are altered or locked during their copy. This does not delay other tables, and delays the altered tables
only briefly."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from pgcdc_assets.checks.lake_facts import read_tables
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.flow import copies
from pgcdc_assets.mirror.delta import deltatarget
from pgcdc_assets.mirror.delta.copy import copy_tables
from pgcdc_assets.project import load_catalog
from tests.flow.rig import Rig, U
from tests.projectfiles import CATALOG_FILE

pytestmark = pytest.mark.spark


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
