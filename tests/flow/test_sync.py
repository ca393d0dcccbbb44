"""Whole runs in this process, with a real server, a real receiver and the session's Spark, compared by the oracle."""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise

import pytest
from deltalake import DeltaTable

from pgcdc_assets import Lake
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import (
    LockHeld,
    NotRepairable,
    RangeGap,
    SetupNeeded,
    SourceUnavailable,
    UsageError,
)
from pgcdc_assets.feed import table
from pgcdc_assets.flow import outcomes
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import SyncReport
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.flow.rig import Rig, T, U, newest, version
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.mark.long
def test_sync_copies_then_applies_changes_then_does_nothing(rig: Rig) -> None:
    with pytest.raises(SetupNeeded):
        rig.sync()
    rig.setup()
    report = rig.sync()
    assert [copy.table for copy in report.copied] == [T, U]
    rig.assert_equal()
    point = ConsistentPoints(rig.settings.layout).newest()
    assert point is not None
    assert set(point.tables) == {T, U}
    assert point.replay_lsn >= report.copied[0].consistent_point

    rig.conn.execute("UPDATE t SET v = 'changed' WHERE id <= 10")
    rig.conn.execute("UPDATE t SET id = -id WHERE id > 45")
    rig.conn.execute("DELETE FROM u WHERE a < 5")
    rig.conn.execute("INSERT INTO u VALUES (1000, 1, NULL)")
    report = rig.sync()
    assert (report.copied, report.transactions) == ([], 4)
    rig.assert_equal()
    (closed,) = rig.observer.ranges
    assert set(closed.tables) == {T, U}
    assert closed.rows == {"I": 1, "U": 15, "D": 4, "T": 0}
    assert closed.tables[T].updated == 10 or closed.tables[T].updated == 15

    before = (DeltaTable(rig.lake / "public/t").version(), len(ConsistentPoints(rig.settings.layout).all()))
    quiet = rig.sync()
    assert (quiet.transactions, quiet.turns, len(rig.observer.ranges)) == (0, 0, 1)
    assert (DeltaTable(rig.lake / "public/t").version(), len(ConsistentPoints(rig.settings.layout).all())) == before


def test_stream_aborts_are_skipped(rig: Rig) -> None:
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


def test_ranges_are_contiguous_and_cover_every_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a range closes, the small files of the changed feeds are merged into one."""
    monkeypatch.setattr(table, "FEWEST_MERGED", 2)
    rig.setup()
    rig.sync()
    for n in range(3):
        rig.conn.execute("INSERT INTO t VALUES (%s, 'x', NULL)", (1000 + n,))
        rig.sync()
    spans = [report.span for report in rig.observer.ranges]
    assert len(spans) == 3
    assert all(left.end == right.start for left, right in pairwise(spans))
    assert len(DeltaTable(path_of(rig.settings.layout.changes(T))).file_uris()) == 1
    rig.assert_equal()


@pytest.mark.long
def test_until_takes_only_transactions_that_end_at_or_below_it(rig: Rig) -> None:
    rig.setup()
    rig.sync()
    assert rig.sync(until=Lsn(1)).transactions == 0
    rig.conn.execute("INSERT INTO t VALUES (100, 'first', NULL)")
    middle = rig.flush()
    rig.conn.execute("INSERT INTO t VALUES (101, 'second', NULL)")
    assert rig.sync(until=middle).transactions == 1
    ids = {row["id"] for row in Lake(rig.lake).at().arrow("public.t").select(["id"]).to_pylist()}
    assert 100 in ids
    assert 101 not in ids
    rig.sync()
    rig.assert_equal()


def test_follow_stops_at_a_boundary_and_a_second_writer_is_refused(rig: Rig) -> None:
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


@pytest.mark.long
def test_ranges_can_be_repaired_and_applied_by_hand(rig: Rig) -> None:
    rig.setup()
    rig.sync()
    rig.conn.execute("UPDATE t SET v = 'new' WHERE id IN (1, 2)")
    rig.conn.execute("UPDATE u SET v = 7 WHERE a = 3")
    rig.conn.execute("DELETE FROM u WHERE a = 4")
    rig.sync()
    (report,) = rig.observer.ranges
    mirror = DeltaTable(rig.lake / "public/t")
    assert mirror.version() >= 1
    session = rig.session()
    session.sql(f"UPDATE delta.`{rig.lake}/public/t` SET v = 'damaged' WHERE id = 1")
    session.sql(f"DELETE FROM delta.`{rig.lake}/public/t` WHERE id = 2")
    session.sql(f"DELETE FROM delta.`{rig.lake}/public/u` WHERE a = 3")
    session.sql(f"INSERT INTO delta.`{rig.lake}/public/u` (a, b, v) VALUES (4, 1, 1)")
    with pytest.raises(AssertionError):
        rig.assert_equal("public.t")
    checked = rig.engine().check_range(report.span)
    assert checked.transactions == 3
    before = newest(rig)
    rig.engine().repair(U, report.span)
    rig.assert_equal("public.u")
    # A point lists the repaired version at once. The other mirror stays at its former version: its damage is not
    # published.
    assert newest(rig).replay_lsn == before.replay_lsn
    assert newest(rig).tables == {T: before.tables[T], U: version(rig, U)}
    with pytest.raises(NotRepairable):
        # The TOASTed column was never sent, so the log lacks it, and no value is guessed.
        rig.engine().repair(T, report.span)
    rig.engine().sync(Bounds(), copy_anew=[T])
    assert rig.engine().transform_range([T], report.span).tables[T].changes
    rig.engine().apply_range([T, U], report.span)
    rig.assert_equal()
    end = LsnRange(report.span.end, Lsn(report.span.end + (1 << 30)))
    with pytest.raises(RangeGap):
        rig.engine().check_range(end)
    with pytest.raises((UsageError, RangeGap)):
        rig.engine().repair(T, end)


@pytest.mark.long
def test_range_applied_by_hand_is_in_a_point_after_the_next_sync(rig: Rig) -> None:
    """The state is the same as after a kill between apply and point. No table waits for any other change."""
    rig.setup()
    rig.sync()
    before = newest(rig).replay_lsn
    goal = rig.commit("UPDATE t SET v = 'changed' WHERE id = 1")
    rig.sync(receive_only=True)
    rig.engine().apply_range([T], LsnRange(before, goal))
    assert newest(rig).replay_lsn == before
    rig.sync()
    assert newest(rig).replay_lsn >= goal
    assert newest(rig).tables == {T: version(rig, T), U: version(rig, U)}
