"""Syncs with faults: copies that fail or are stopped, tables that are set aside, and feeds that were derived twice."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pgcdc_assets.flow import copies
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.source.snapshot import export
from tests.flow.rig import Rig, T, U
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.mark.long
def test_stop_ends_a_copy_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if the copy has not started a Spark job yet that could be cancelled."""
    rig.setup()
    stop = threading.Event()
    real = export.exported_snapshot

    def stopped(*args: Any, **more: Any) -> Any:
        stop.set()
        time.sleep(0.5)
        return real(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(copies, "exported_snapshot", stopped)
        assert rig.sync(follow=True, stop=stop).copied == []
    assert {copy.table for copy in rig.sync().copied} == {T, U}
    rig.assert_equal()


@pytest.mark.long
def test_run_ends_when_every_table_is_set_aside(rig: Rig) -> None:
    rig.conn.execute("DROP TABLE u")
    rig.setup()

    class Renamed(Silent):
        """Changes the table right after its copy, and waits until the log holds the change."""

        def copied(self, report: CopyReport) -> None:
            rig.conn.execute("ALTER TABLE t RENAME v TO w")
            goal = rig.commit("INSERT INTO t VALUES (999, 'x', NULL)")
            wait_for(lambda: ChangeLog(rig.settings.layout).open().position() >= goal, what="the change in the log")

    assert rig.settings.source is not None
    settings = rig.settings.model_copy(update={"schema_changes": "set_aside"})
    engine = Engine(settings, rig.settings.source, Renamed(), rig.session, "test")
    reports = []
    thread = threading.Thread(target=lambda: reports.append(engine.sync(Bounds(max_seconds=120))))
    thread.start()
    thread.join(100)
    assert [table for table, _ in reports[0].set_aside] == [T]
