"""The JSON documents of real runs are as their schemas say."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc_assets.checks.positions import positions
from pgcdc_assets.checks.status import status
from pgcdc_assets.cli.console import ConsoleProgress
from pgcdc_assets.cli.maintenance import maintenance_json
from pgcdc_assets.cli.status_verify import verified
from pgcdc_assets.cli.sync import sync_json
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.requests import pause_apply
from tests.flow.rig import Rig
from tests.jsondocuments import checked

pytestmark = pytest.mark.spark


def _by_table(document: Any, field: str) -> dict[str, Any]:
    return {table["name"]: table[field] for table in document["tables"]}


def _status(rig: Rig) -> Any:
    return checked("status", status(rig.settings).to_json())


@pytest.mark.long
def test_the_documents_of_a_project_from_copy_to_maintenance(rig: Rig) -> None:
    rig.setup()
    first = checked("sync", sync_json(rig.sync()))
    assert {copied["name"]: copied["rows"] for copied in first["copied"]} == {"public.t": 50, "public.u": 50}

    pause_apply(rig.settings.layout, paused=True)
    rig.conn.execute("INSERT INTO t VALUES (51, 'new')")
    rig.sync()
    behind = _status(rig)
    # Only t lacks a transaction. Both are behind the same bytes of WAL.
    lag = _by_table(behind, "lag_seconds")
    assert lag["public.t"] > 0
    assert behind["lag_seconds"] == lag["public.t"]
    assert _by_table(behind, "lag_bytes").keys() == {"public.t", "public.u"}
    assert checked("positions", positions(rig.settings).to_json())["apply"] == "paused"

    pause_apply(rig.settings.layout, paused=False)
    rig.conn.execute("UPDATE u SET v = 0 WHERE a = 1")
    second = checked("sync", sync_json(rig.sync()))
    assert second["ok"]
    level = _status(rig)
    assert level["last"]["sync"]["failed"] is None
    assert set(_by_table(level, "state").values()) == {"streaming"}

    def sync_to(lsn: Lsn, max_seconds: float | None = None, /) -> None:
        rig.sync(until=lsn)

    report = verified(rig.settings, rig.settings.source or "", None, ConsoleProgress(), sync_to)
    compared = checked("verify", report.to_json())
    assert _by_table(compared, "verdict") == {"public.t": "equal", "public.u": "equal"}
    assert checked("maintain", maintenance_json(rig.engine("maintain").maintain(Allowance())))["ok"]
