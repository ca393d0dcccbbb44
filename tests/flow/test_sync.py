"""Whole syncs in this process, with a real server, a real receiver and Spark. Afterwards, mirrors are compared with the
source."""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise

import pytest
from deltalake import DeltaTable

from pgcdc_assets.errors import (
    LockHeld,
    SourceUnavailable,
)
from pgcdc_assets.feed import table
from pgcdc_assets.flow import outcomes
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import SyncReport
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.flow.rig import Rig, T
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


def test_stream_abort_messages_are_skipped(rig: Rig) -> None:
    """PostgreSQL 18 sends Stream Abort after the rollback of a large transaction with savepoints."""
    rig.conn.execute(f"ALTER DATABASE {rig.conn.info.dbname} SET logical_decoding_work_mem = '64kB'".encode())
    rig.setup()
    rig.sync()
    for number, end in enumerate(("ROLLBACK", "COMMIT", "ROLLBACK"), 1):
        for statement in (
            "BEGIN", "SAVEPOINT s", f"UPDATE u SET b = {number}", "RELEASE s",
            f"UPDATE t SET big = repeat('{number}', 10000)", "SAVEPOINT z", "DELETE FROM t", "ROLLBACK TO z", end,
        ):  # fmt: skip
            rig.conn.execute(statement.encode())
    report = rig.sync()
    assert (report.transactions, report.rows) == (1, 100)
    assert (report.stream_aborts > 0) == (rig.conn.info.server_version >= 180000)
    rig.assert_equal()


def test_ranges_of_several_syncs_are_contiguous_and_complete(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a range closes, the small files of the changed feeds are merged into one."""
    monkeypatch.setattr(table, "FEWEST_MERGED", 2)
    rig.setup()
    rig.sync()
    counted: list[int] = []
    for n in range(3):
        rig.conn.execute("INSERT INTO t VALUES (%s, 'x', NULL)", (1000 + n,))
        rig.sync()
        counted += rig.conn.execute("SELECT count(*) FROM t").fetchone() or ()
    assert [report.tables[T].rows for report in rig.observer.ranges] == counted
    spans = [report.span for report in rig.observer.ranges]
    assert len(spans) == 3
    assert all(left.end == right.start for left, right in pairwise(spans))
    assert len(DeltaTable(path_of(rig.settings.layout.changes(T))).file_uris()) == 1
    rig.assert_equal()


def test_follow_mode_stops_at_a_commit_boundary_and_a_second_writer_is_refused(rig: Rig) -> None:
    rig.setup()
    with pytest.raises(SourceUnavailable):
        Engine(rig.settings, "host=/nowhere", rig.observer, rig.session, "sync").sync(Bounds())
    last = partial(outcomes.read, rig.settings.layout)
    assert last()["sync"].failed is not None
    stop = threading.Event()
    reports: list[SyncReport] = []
    thread = threading.Thread(target=lambda: reports.append(rig.engine("follow").sync(Bounds(follow=True, stop=stop))))
    thread.start()
    try:
        points = ConsistentPoints(rig.settings.layout)
        wait_for(lambda: points.newest() is not None, what="the first consistent point")
        with pytest.raises(LockHeld, match="follow"):
            rig.sync()
        goal = rig.commit("UPDATE u SET v = v + 1")
        wait_for(lambda: (newest := points.newest()) is not None and newest.replay_lsn >= goal, what="the update")
        wait_for(lambda: last()["sync"].failed is None, what="the word that it succeeds")
        assert last()["sync"].under_way is not None
    finally:
        stop.set()
        thread.join(120)
    rig.assert_equal()
    assert reports[0].transactions == 1
