"""A table for which no mirror is possible: setup, sync, status and verify report the same reason."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pgcdc_assets.checks.status import status
from pgcdc_assets.checks.verify import verify
from pgcdc_assets.cli.source import make_ready
from pgcdc_assets.cli.sync import _print_sync
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.points.points import Point
from pgcdc_assets.project import load_catalog
from tests.flow.rig import Rig
from tests.projectfiles import CATALOG_FILE

pytestmark = pytest.mark.spark

ODD = TableName("public", "odd")
REASON = "columns id and Id differ only in case, which Delta Lake does not allow"
DO = "change that on the source, or exclude the table: '-public.odd' in the setting `tables`"


@pytest.mark.long
def test_all_commands_report_a_refused_table_in_the_same_words(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.conn.execute('CREATE TABLE odd (id int PRIMARY KEY, "Id" int)')
    assert rig.settings.source is not None
    told = [f for f in make_ready(rig.settings, rig.settings.source).findings if f.thing == "table public.odd"]
    assert [(f.severity, f.what, f.do) for f in told] == [("warning", f"will be set aside: {REASON}", DO)]

    rig.conn.execute("INSERT INTO odd VALUES (1, 1)")
    report = rig.sync()
    assert report.set_aside == [(ODD, REASON)]
    _print_sync(report, as_json=False)
    assert f"public.odd is set aside: {REASON}; {DO}" in capsys.readouterr().err

    found = status(rig.settings)
    assert [(t.state, t.reason) for t in found.tables if t.name == ODD] == [(TableState.SET_ASIDE, REASON)]
    problems = [(p.severity, p.what, p.do) for p in found.problems if p.thing == "table public.odd"]
    assert problems == [("error", f"was set aside: {REASON}", DO)]

    catalog = load_catalog(CATALOG_FILE)
    assert catalog is not None
    compared = verify(rig.settings, catalog, [ODD], lambda lsn: Point(lsn, datetime.now(UTC), {}, {}))
    assert [table.reason for table in compared.tables] == [f"is set aside: {REASON}"]
    rig.assert_equal()

    rig.conn.execute('ALTER TABLE odd RENAME "Id" TO other')
    assert rig.sync().set_aside == []
    rig.assert_equal("public.odd")
    rig.conn.execute('ALTER TABLE odd RENAME other TO "ID"')
    assert rig.sync().set_aside == [(ODD, REASON.replace("Id", "ID"))]
    rig.assert_equal()
