"""Commands during a sync in follow mode: the sync pauses, the command does its work, and the sync continues."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import pairwise

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from pgcdc_assets.core import retention
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LockHeld, NotRepairable, RangeGap, UnknownTable
from pgcdc_assets.flow import lock, outcomes
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.reports import SyncReport
from pgcdc_assets.flow.requests import place_verify_request
from pgcdc_assets.mirror.delta import compaction
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.flow.rig import Rig, T, U, following, newest, version
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


def caught_up(rig: Rig) -> None:
    goal = rig.commit("UPDATE t SET v = v || '.' WHERE id = 50")
    wait_for(lambda: newest(rig).replay_lsn >= goal, what="the change")


def lose(rig: Rig, name: TableName, condition: str) -> None:
    """Delete rows of a mirror with delta-rs."""
    mirror = DeltaTable(path_of(rig.settings.layout.mirror(name)))
    left = QueryBuilder().register("t", mirror).execute(f"SELECT * FROM t WHERE NOT {condition}").read_all()
    write_deltalake(mirror, pa.table(left), mode="overwrite")


@pytest.mark.long
def test_repairs_and_copies_work_during_a_sync_in_follow_mode(rig: Rig) -> None:
    rig.setup()
    rig.sync()
    rig.commit("UPDATE t SET v = 'new' WHERE id IN (1, 2)", "UPDATE u SET v = 7 WHERE a = 3")
    rig.sync()
    (closed,) = rig.observer.ranges

    def last() -> outcomes.Outcome:
        return outcomes.read(rig.settings.layout)["repair"]

    with following(rig) as run:
        assert rig.engine("check").check_range(closed.span).transactions == 1
        lose(rig, U, "a = 3")
        lose(rig, T, "id = 2")
        report = rig.engine("repair public.u").repair(U, closed.span)
        assert (report.tables[U].inserted, report.tables[U].version) == (1, version(rig, U))
        wait_for(lambda: newest(rig).tables[U] == version(rig, U), what="a point of the repaired mirror")
        with pytest.raises(NotRepairable, match=r"copy it again: `pgcdc snapshot"):
            rig.engine("repair public.t").repair(T, closed.span)
        assert (failed := last().failed) is not None
        assert (failed.command, failed.thing) == ("repair public.t", "public.t")
        with pytest.raises(UnknownTable):
            rig.engine("snapshot").sync(Bounds(), copy_anew=[U, TableName("public", "nope")])
        with pytest.raises(UnknownTable):
            rig.engine("forget").forget([TableName("public", "nope")])

        copied = rig.engine("snapshot public.t").sync(Bounds(), copy_anew=[T])
        (copy,) = copied.copied
        assert (copy.table, copied.set_aside) == (T, [])
        point = newest(rig)
        assert point.replay_lsn >= copy.consistent_point
        assert set(point.tables) == {T, U}
        assert last().failed is None, "a table copied anew needs no repair"
        rig.assert_equal()
        caught_up(rig)
        rig.assert_equal()
        assert run.is_alive()
        with pytest.raises(LockHeld, match="follow"):
            rig.sync()
    assert rig.sync().copied == []
    rig.assert_equal()


@pytest.mark.long
def test_maintenance_works_during_a_sync_in_follow_mode(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "GRACE", timedelta(0))
    monkeypatch.setattr(compaction, "MOST_SMALL", 1)
    rig.settings = rig.settings.model_copy(update={"retention": timedelta(0), "range_seconds": 1.0})
    rig.setup()
    rig.sync()
    rig.commit("UPDATE u SET v = 7 WHERE a = 3")
    rig.sync()
    with following(rig):
        rig.commit("UPDATE u SET v = 8 WHERE a = 4")
        wait_for(lambda: len(rig.observer.ranges) == 2, what="a range")
        kept = rig.engine("maintain").maintain(Allowance())
        assert kept.log_files > 0
        assert (kept.optimized, kept.failed) == ([U], [])
        with pytest.raises(RangeGap, match="begins before the log"):
            rig.engine("repair").repair(U, rig.observer.ranges[0].span)
        caught_up(rig)
        assert newest(rig).tables[U] == version(rig, U), "a quiet mirror, as the maintenance left it"
        wait_for(lambda: len(rig.observer.ranges) == 3, what="the next range")
        rig.assert_equal()
    spans = [report.span for report in rig.observer.ranges]
    assert spans[2].start >= kept.log_start
    assert all(left.end <= right.start for left, right in pairwise(spans))
    assert outcomes.read(rig.settings.layout)["maintenance"].succeeded is not None


@pytest.mark.long
def test_verify_precedes_a_waiting_command_and_only_one_command_may_wait(rig: Rig) -> None:
    rig.setup()
    rig.sync()
    layout, reports, stop = rig.settings.layout, list[SyncReport](), threading.Event()
    waits = threading.Thread(target=lambda: reports.append(rig.engine("snapshot").sync(Bounds(), copy_anew=[U])))
    with following(rig), place_verify_request(layout) as held:
        wait_for(rig.streaming, what="the stream")
        threading.Timer(1, stop.set).start()
        with pytest.raises(LockHeld, match="`pgcdc follow`"):
            rig.engine("snapshot").sync(Bounds(stop=stop), copy_anew=[T])
        assert lock.waiting(layout) is None
        waits.start()
        wait_for(lambda: lock.waiting(layout) is not None, what="the command")
        with pytest.raises(LockHeld, match=r"`pgcdc snapshot` \(pid \d+\) already waits for this lake"):
            rig.engine("repair").repair(U, LsnRange(Lsn(0), Lsn(1)))
        at = rig.flush()
        rig.conn.execute("UPDATE u SET v = v + 1")
        held.at(at)
        wait_for(lambda: ConsistentPoints(layout).has(at), what="the point")
        point = ConsistentPoints(layout).at(at)
        assert point is not None
        assert set(point.tables) == {T, U}, "the copy began before verify had its point"
        waits.join(120)
    assert [copy.table for copy in reports[0].copied] == [U]
    rig.assert_equal()
