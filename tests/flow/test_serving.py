"""A sync that follows does what other commands ask of it, between its turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from deltalake import DeltaTable

from pgcdc_assets.core import retention
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import CopyBlocked, LockHeld, NotRepairable, RangeGap, UnknownTable, UsageError
from pgcdc_assets.flow import copies, hold, lock, outcomes, requests, sentinel
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.observer import Silent
from pgcdc_assets.flow.reports import SyncReport
from pgcdc_assets.flow.requests import Job, Request
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta import upkeep
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.store.local import path_of
from tests.end_to_end.command import wait_for
from tests.flow.test_altered_copies import after_the_snapshot
from tests.flow.test_sync import Rig, T, U, rig  # noqa: F401

pytestmark = pytest.mark.spark


@contextmanager
def following(rig: Rig, **bounds: Any) -> Iterator[threading.Thread]:  # noqa: F811
    """A sync that follows, with its own observer, and whose end is well."""
    stop = threading.Event()
    reports: list[SyncReport] = []
    run = Bounds(follow=True, stop=stop, **bounds)
    thread = threading.Thread(target=lambda: reports.append(rig.engine("follow").sync(run)))
    thread.start()
    try:
        wait_for(lambda: lock.holder(rig.settings.layout) is not None, what="the run")
        yield thread
    finally:
        stop.set()
        thread.join(120)
    assert len(reports) == 1


def newest(rig: Rig) -> Point:  # noqa: F811
    point = ConsistentPoints(rig.settings.layout).newest()
    assert point is not None
    return point


def version(rig: Rig, name: TableName) -> int:  # noqa: F811
    return DeltaTable(path_of(rig.settings.layout.mirror(name))).version()


def caught_up(rig: Rig) -> None:  # noqa: F811
    goal = rig.commit("UPDATE t SET v = v || '.' WHERE id = 50")
    wait_for(lambda: newest(rig).replay_lsn >= goal, what="the change")


def test_a_repair_and_a_copy_are_done_by_the_run_that_follows(rig: Rig) -> None:  # noqa: F811
    rig.setup()
    rig.sync()
    rig.conn.execute("UPDATE t SET v = 'new' WHERE id IN (1, 2)")
    rig.conn.execute("UPDATE u SET v = 7 WHERE a = 3")
    rig.sync()
    (closed,) = rig.observer.ranges

    def last() -> outcomes.Outcome:
        return outcomes.read(rig.settings.layout)["repair"]

    with following(rig):
        assert rig.engine("check").check_range(closed.span).transactions == 2
        rig.session().sql(f"DELETE FROM delta.`{rig.lake}/public/u` WHERE a = 3")
        rig.session().sql(f"DELETE FROM delta.`{rig.lake}/public/t` WHERE id = 2")
        report = rig.engine("repair public.u").repair(U, closed.span)
        assert (report.tables[U].inserted, report.tables[U].version) == (1, version(rig, U))
        rig.assert_equal("public.u")
        # The run goes on from the repaired mirror, and publishes it though nothing changes.
        wait_for(lambda: newest(rig).tables[U] == version(rig, U), 20, "a point of the repaired mirror")
        assert last().succeeded is not None

        with pytest.raises(NotRepairable, match=r"copy it anew: `pgcdc snapshot"):
            rig.engine("repair public.t").repair(T, closed.span)
        assert (failed := last().failed) is not None
        assert (failed.command, failed.thing) == ("repair public.t", "public.t")
        with pytest.raises((UsageError, RangeGap)):
            rig.engine("repair").repair(U, LsnRange(closed.span.end, Lsn(closed.span.end + (1 << 30))))
        with pytest.raises(UnknownTable):
            rig.engine("snapshot").sync(Bounds(), copy_anew=[U, TableName("public", "nope")])

        copied = rig.engine("snapshot public.t").sync(Bounds(), copy_anew=[T])
        (copy,) = copied.copied
        assert (copy.table, copied.set_aside) == (T, [])
        point = newest(rig)
        assert point.replay_lsn >= copy.consistent_point
        assert set(point.tables) == {T, U}
        assert last().failed is None, "a table copied anew needs no repair"
        assert [table for table, _ in copied.changed] == [U]
        rig.assert_equal()
        again = rig.engine("apply").apply_range([U], closed.span)
        assert again.tables[U].replay_lsn == point.replay_lsn
        caught_up(rig)
        rig.assert_equal()
        assert outcomes.read(rig.settings.layout)["sync"].under_way is not None
        with pytest.raises(LockHeld, match="follow"):
            rig.sync()
    assert rig.sync().copied == []
    rig.assert_equal()


def test_a_request_waits_for_a_verify_and_one_at_a_time_is_made(rig: Rig) -> None:  # noqa: F811
    rig.setup()
    rig.sync()
    layout, reports = rig.settings.layout, list[SyncReport]()
    ask = threading.Thread(target=lambda: reports.append(rig.engine("snapshot").sync(Bounds(), copy_anew=[U])))
    with following(rig), hold.placed(layout) as held:
        wait_for(rig.streaming, what="the stream")
        ask.start()
        wait_for(lambda: requests.current(layout) is not None, what="the request")
        with pytest.raises(LockHeld, match=r"`pgcdc snapshot` .*asks the running sync already"):
            rig.engine("repair").repair(U, LsnRange(Lsn(0), Lsn(1)))
        at = rig.flush()
        rig.conn.execute("UPDATE u SET v = v + 1")
        held.at(at)
        wait_for(lambda: ConsistentPoints(layout).has(at), what="the point")
        point = ConsistentPoints(layout).at(at)
        assert point is not None
        assert set(point.tables) == {T, U}, "the copy began before verify had its point"
        ask.join(120)
    assert [copy.table for copy in reports[0].copied] == [U]
    rig.assert_equal()


def test_the_command_is_told_why_its_copy_waits(rig: Rig) -> None:  # noqa: F811
    rig.setup()
    rig.sync()
    layout, asked = rig.settings.layout, Request(Job.SNAPSHOT, "snapshot", (U,))

    def told() -> str:
        answer = requests.answer_to(layout, asked)
        return str(answer and answer.waits)

    def done() -> bool:
        answer = requests.answer_to(layout, asked)
        return answer is not None and answer.waits is None

    with following(rig):
        wait_for(rig.streaming, what="the stream")
        sentinel.pause_apply(layout, paused=True)
        with requests.placed(layout, asked):
            wait_for(lambda: "`pgcdc resume apply`" in told(), what="the pause")
            # The snapshot's slot waits for the transaction.
            rig.conn.execute("BEGIN; UPDATE u SET v = v + 1")
            sentinel.pause_apply(layout, paused=False)
            wait_for(lambda: f"the copy waits for pid {rig.conn.info.backend_pid} " in told(), what="the transaction")
            rig.conn.execute("COMMIT")
            wait_for(done, what="the copy")
            answer = requests.answer_to(layout, asked)
    assert answer is not None
    assert [copy.table for copy in answer.result(SyncReport).copied] == [U]
    rig.assert_equal()


def test_a_copy_that_was_asked_for_is_published_before_the_run_ends(rig: Rig) -> None:  # noqa: F811
    """And one that its command waits for no more goes on."""
    rig.setup()
    rig.sync()
    layout = rig.settings.layout
    with following(rig, idle_seconds=1.0) as run:
        assert len(rig.engine("snapshot").sync(Bounds(), copy_anew=[U]).copied) == 1
        assert newest(rig).tables[U] == version(rig, U)
        before = version(rig, U)
        wait_for(lambda: lock.holder(layout) is None or requests.current(layout) is None, what="the answer's reader")
        with requests.placed(layout, Request(Job.SNAPSHOT, "snapshot", (U,))):
            wait_for(lambda: U not in newest(rig).tables or version(rig, U) > before or not run.is_alive(),
                     what="the copy")  # fmt: skip
        run.join(120)
    assert newest(rig).tables[U] == version(rig, U)
    rig.assert_equal()


def test_a_table_that_cannot_be_copied_is_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The others go on, and the run that follows tries it again by itself."""
    monkeypatch.setattr(copies, "COPY_ROUNDS", 1)
    rig.setup()
    rig.sync()
    pid = rig.conn.info.backend_pid
    rig.settings = rig.settings.model_copy(update={"range_seconds": 2.0})
    with following(rig):
        before = version(rig, U)
        after_the_snapshot(monkeypatch, lambda: rig.conn.execute("BEGIN; LOCK TABLE u"))
        bounds = Bounds()
        limit = threading.Timer(90, bounds.stop.set)
        limit.start()
        with pytest.raises(CopyBlocked, match=f"public.u: cannot be read, for it is locked by pid {pid}"):
            rig.engine("snapshot").sync(bounds, copy_anew=[U])
        limit.cancel()
        rig.conn.execute("COMMIT")
        wait_for(lambda: version(rig, U) > before and U in newest(rig).tables, what="a later copy")
    rig.assert_equal()


def test_maintenance_is_done_by_the_run_that_follows(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(retention, "GRACE", timedelta(0))
    monkeypatch.setattr(upkeep, "MOST_SMALL", 1)
    rig.setup()
    rig.settings = rig.settings.model_copy(update={"retention": timedelta(0), "range_seconds": 1.0})
    rig.sync()
    rig.conn.execute("UPDATE u SET v = 7 WHERE a = 3")
    rig.sync()
    run = Silent()
    asks, rig.observer = rig.observer, run
    with following(rig):
        rig.conn.execute("UPDATE u SET v = 8 WHERE a = 4")
        wait_for(lambda: len(run.ranges) == 1, what="a range")
        rig.observer = asks
        kept = rig.engine("maintain").maintain(Allowance())
        assert kept.log_files > 0
        assert (kept.optimized, kept.failed) == ([U], [])
        log = ChangeLog(rig.settings.layout)
        assert (log.start, kept.oldest_point) == (kept.log_start, newest(rig).replay_lsn)
        assert newest(rig).tables[U] == version(rig, U)
        with pytest.raises(RangeGap, match="begins before the log"):
            rig.engine("repair").repair(U, asks.ranges[0].span)
        caught_up(rig)
        assert newest(rig).tables[U] == version(rig, U), "a quiet mirror, as the maintenance left it"
        wait_for(lambda: len(run.ranges) == 2, what="the next range")
        rig.assert_equal()
    assert run.ranges[1].span.start >= kept.log_start
    assert all(left.span.end <= right.span.start for left, right in pairwise(run.ranges))
    assert outcomes.read(rig.settings.layout)["maintenance"].succeeded is not None
    rig.sync()
    rig.assert_equal()
