"""The operator's requests to running syncs: end at an LSN, pause or resume applying."""

from __future__ import annotations

import threading

import pytest

from pgcdc_assets.checks.positions import positions
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.errors import LakeError
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import SyncReport
from pgcdc_assets.flow.requests import OperatorRequests, follow_until, operator_requests, pause_apply
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.store import storage
from tests.flow.rig import Rig, T, U, following, newest
from tests.oracle import mirror_rows
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


def _write(rig: Rig, number: int) -> Lsn:
    """Inserts a row. Returns an LSN above its commit. Records of the server itself may lie between, so tests wait for
    the row, not for this LSN."""
    rig.conn.execute("INSERT INTO t VALUES (%s, 'new')", (number,))
    return rig.flush()


def _logged(rig: Rig) -> Lsn:
    return ChangeLog(rig.settings.layout).position()


def _ids(rig: Rig) -> set[int]:
    return {int(row[0]) for row in mirror_rows(rig.lake, "public/t", ["id"])}


def test_request_is_valid_until_it_is_withdrawn(rig: Rig) -> None:
    layout = rig.settings.layout
    assert operator_requests(layout) == OperatorRequests()
    follow_until(layout, Lsn(0x10))
    assert pause_apply(layout, paused=True)
    assert not pause_apply(layout, paused=True)
    assert operator_requests(layout) == OperatorRequests(Lsn(0x10), paused=True)
    assert operator_requests(layout).reached(Lsn(0x10))
    follow_until(layout, None)
    assert pause_apply(layout, paused=False)
    assert operator_requests(layout) == OperatorRequests()
    storage.replace(layout.endpos, b"nowhere")
    with pytest.raises(LakeError, match="does not hold an LSN"):
        operator_requests(layout)


def test_slot_advances_while_applying_is_paused(rig: Rig) -> None:
    layout = rig.settings.layout
    rig.setup()
    rig.sync()
    point = newest(rig)
    with following(rig):
        pause_apply(layout, paused=True)
        # The sync reads the request after it has received new changes, and before it applies them. ``before`` is above
        # everything that the sync may record before the change.
        before = rig.flush()
        _write(rig, 1001)
        wait_for(lambda: _logged(rig) > before, what="the change in the log")
        at = _logged(rig)
        assert newest(rig) == point
        found = positions(rig.settings)
        assert (found.paused, found.replay, found.at_work) == (True, point.replay_lsn, "follow")
        assert found.flush is not None
        assert found.flush >= at
        for refused in (
            lambda: rig.engine("repair").repair(T, LsnRange(Lsn(1), at)),
            lambda: rig.engine("apply").apply_range([T], LsnRange(Lsn(1), at)),
            lambda: rig.engine("snapshot").sync(Bounds(), copy_anew=[U]),
        ):
            with pytest.raises(LakeError, match=r"paused.*pgcdc resume apply"):
                refused()
        pause_apply(layout, paused=False)
        wait_for(lambda: newest(rig).replay_lsn >= at, what="the change in the mirror")
    rig.assert_equal()


@pytest.mark.long
@pytest.mark.parametrize("early", [True, False], ids=["before the run", "meanwhile"])
def test_follow_mode_ends_at_the_requested_lsn(rig: Rig, early: bool) -> None:
    layout = rig.settings.layout
    rig.setup()
    rig.sync()
    reports: list[SyncReport] = []
    run = threading.Thread(target=lambda: reports.append(rig.engine("follow").sync(Bounds(follow=True))))
    if early:
        end = _write(rig, 1001)
        _write(rig, 1002)
        follow_until(layout, end)
        run.start()
    else:
        run.start()
        wait_for(rig.streaming, what="the stream")
        first = _write(rig, 1000)
        # A request that is withdrawn before it is reached ends nothing.
        follow_until(layout, Lsn(first + (1 << 40)))
        wait_for(lambda: 1000 in _ids(rig), what="the first change")
        follow_until(layout, None)
        # The end is far ahead, because records of the server itself advance the log.
        end = Lsn(rig.flush() + (1 << 20))
        follow_until(layout, end)
        _write(rig, 1001)
        # The sync reads the request before it applies this change.
        wait_for(lambda: 1001 in _ids(rig), what="the second change")
        message = "SELECT pg_logical_emit_message(true, 'other', repeat('x', 2 << 20))"
        rig.commit(message, "INSERT INTO t VALUES (1002, 'new')")
    run.join(120)
    assert not run.is_alive()
    (report,) = reports
    assert report.end <= end
    assert 1001 in _ids(rig)
    assert 1002 not in _ids(rig)
    assert positions(rig.settings).endpos == end

    follow_until(layout, None)
    rig.sync()
    rig.assert_equal()
