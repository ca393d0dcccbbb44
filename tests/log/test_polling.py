"""Receiving without a replication connection: the log is the one that the stream makes."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import SlotActive, SlotAhead, SourceFailed, SourceNotReady, SourceUnavailable
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.connect.libpq import LibpqConnection
from pgcdc_assets.source.connect.plainsession import SqlConnection
from pgcdc_assets.source.connect.pluginoptions import PluginOptions
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.stream import polling, subscribe
from pgcdc_assets.source.stream.drain import RANGE_LIMITS
from tests.log.conftest import PUBLICATION, Source, content, eventually, rows, until_event
from tests.log.inside import receive_inside
from tests.log.test_drain import everything, origin, ranges_of

COPIES = "SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'pgcdc_drain%'"


@pytest.fixture(params=["socket", "libpq"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Over a plain connection, and as over one that only libpq can read."""
    if request.param == "libpq":
        monkeypatch.setattr(LibpqConnection, "socket", lambda connection: None)
    return str(request.param)


def polled(source: Source, log: ChangeLog, until: Lsn) -> Lsn:
    return receive_inside(source, log, until, lambda lsn: None, replication=False)


def test_the_log_is_the_stream_s(source: Source, transport: str) -> None:
    """While the source writes, in many small ranges."""
    limits = ranges_of(20_000, poll_seconds=0.01)
    streamed, log = source.log("streamed"), source.log("polled")
    ends: list[Lsn] = []

    def write() -> None:
        with origin(source):
            everything(source)
        ends.append(source.run("INSERT INTO b VALUES (2, 2)"))

    writing = threading.Thread(target=write)
    writing.start()

    def orders(receiver: Receiver) -> None:
        if ends:
            receiver.until(ends[0])

    receive_inside(source, log, Lsn(1 << 60), lambda lsn: None, replication=False, limits=limits, orders=orders)
    writing.join()
    source.receive(streamed, ends[0])
    # The catalog is read when a relation first comes: here before its later columns were there, and there behind.
    facts = ["schema_id"]
    assert content(log, but=facts) == content(streamed, but=facts)
    places = [(row["commit_lsn"], row["tx_ordinal"], row["relation_id"], row["lsn"]) for row in rows(log)]
    assert len(set(places)) == len(places)
    assert source.confirmed(log) == log.position()


@pytest.mark.usefixtures("transport")
def test_an_endpos_at_any_place(source: Source) -> None:
    """Within the backlog, at its end, and where no record follows any more."""
    streamed, log = source.log("streamed"), source.log("polled")
    everything(source)
    middle = source.lsn()
    source.run("INSERT INTO b VALUES (20000, 0)")
    for goal in (Lsn(middle - 3000), middle, source.lsn()):
        source.receive(streamed, goal)
        polled(source, log, goal)
        assert content(log) == content(streamed)
        assert log.position() <= goal
    source.run("SELECT pg_switch_wal()")
    polled(source, log, source.lsn())


def test_a_run_follows_what_is_written(source: Source) -> None:
    """The process itself: batches as the source commits, a mark, and a stop that leaves nothing behind."""
    streamed, log = source.log("streamed"), source.log("polled")
    source.replication = False
    receiver = source.receiver(log, batch_seconds=0.05)
    until_event(receiver, "started")
    for number in range(3):
        source.run(f"INSERT INTO a VALUES ({number}, 'x')")
        until_event(receiver, "batch")
    mark = source.lsn()
    receiver.mark(mark)
    until_event(receiver, "complete")
    assert log.open().position() > log.start
    receiver.stop()
    eventually(lambda: source.conn.execute(COPIES).fetchall() == [(0,)])
    assert source.confirmed(log) == log.open().position()
    source.replication = True
    source.receive(streamed, mark)
    assert content(log) == content(streamed)


def test_a_killed_run_is_gone_on_from(source: Source) -> None:
    """The slot stands behind the log then: what comes again is known."""
    streamed, log = source.log("streamed"), source.log("polled")
    source.replication = False
    for number in range(4):
        receiver = source.receiver(log, batch_seconds=0.01)
        source.run(*[f"INSERT INTO a VALUES ({number * 100 + n}, 'x')" for n in range(50)])
        until_event(receiver, "batch")
        receiver.kill()
        assert source.confirmed(log) < log.open().position()
    end = source.lsn()
    receiver = source.receiver(log)
    receiver.until(end)
    until_event(receiver, "arrived")
    source.replication = True
    source.receive(streamed, end)
    assert content(log.open()) == content(streamed)


def test_the_slot_follows_what_is_durable(source: Source) -> None:
    limits = replace(RANGE_LIMITS, advance_seconds=0.05, poll_seconds=0.01)
    log = source.log("polled")
    confirmed: list[Lsn] = []

    def confirming(lsn: Lsn) -> None:
        confirmed.append(lsn)
        assert lsn <= ChangeLog(Layout.of(source.folder / "polled")).open().position()

    def write(receiver: Receiver) -> None:
        if len(set(confirmed)) < 5:
            source.run(f"INSERT INTO b VALUES ({time.monotonic_ns() >> 10 & 0x7FFFFFFF}, 1) ON CONFLICT DO NOTHING")
        else:
            receiver.stop()

    receive_inside(source, log, Lsn(1 << 60), confirming, replication=False, limits=limits, orders=write)
    assert source.confirmed(log) == log.position()


def test_a_transaction_open_for_long_lets_the_source_rest(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call reads from its begin on: not more than half of the time is spent in calls."""
    streamed, log = source.log("streamed"), source.log("polled")
    calls: list[tuple[float, float]] = []
    begin, ended = polling.Polling._begin, polling.Polling._ended
    began = 0.0

    def beginning(ranges: polling.Polling, restart: Lsn, flushed: Lsn) -> None:
        nonlocal began
        began = time.monotonic()
        begin(ranges, restart, flushed)

    def ending(ranges: polling.Polling) -> object:
        calls.append((began, time.monotonic()))
        return ended(ranges)

    monkeypatch.setattr(polling.Polling, "_begin", beginning)
    monkeypatch.setattr(polling.Polling, "_ended", ending)
    limits = replace(RANGE_LIMITS, poll_seconds=0.0)
    with source.database.connect() as other:
        other.execute("BEGIN")
        other.execute("INSERT INTO b SELECT g, g FROM generate_series(1000, 40000) g")

        def write(receiver: Receiver) -> None:
            source.run("INSERT INTO a VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET v = a.v || 1")
            if len(calls) >= 8:
                receiver.stop()

        receive_inside(source, log, Lsn(1 << 60), lambda lsn: None, replication=False, limits=limits, orders=write)
        other.execute("COMMIT")
    for (first, last), (following, _) in pairwise(calls[1:]):
        assert following - last >= (last - first) * 0.9
    end = source.lsn()
    polled(source, log, end)
    source.receive(streamed, end)
    assert content(log) == content(streamed)


def test_a_slot_ahead_of_the_log_is_refused(source: Source) -> None:
    log = source.log("polled")
    polled(source, log, source.run("INSERT INTO a VALUES (1, 'x')"))
    old = ChangeLog(Layout.of(source.folder / "old"))
    old.create(log.identity, log.start, 1)
    source.replication = False
    receiver = source.receiver(old)
    with pytest.raises(SlotAhead):
        until_event(receiver, "started")


def test_a_slot_that_somebody_streams_from_is_not_taken(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe, "SLOT_PATIENCE_SECONDS", 0.3)
    log = source.log("polled")
    with ReplicationConnection.open(source.database.conninfo, application_name="somebody") as other:
        other.start(log.identity.slot, log.start, [PUBLICATION])
        with pytest.raises(SlotActive, match="`somebody`"):
            polled(source, log, source.lsn())
    polled(source, log, source.run("INSERT INTO a VALUES (1, 'x')"))


def test_no_slot_to_spare(source: Source) -> None:
    log = source.log("polled")
    (spare,) = source.conn.execute(
        "SELECT current_setting('max_replication_slots')::int - count(*) FROM pg_replication_slots"
    ).fetchone() or (0,)
    for number in range(spare):
        source.conn.execute("SELECT pg_create_physical_replication_slot(%s, false, true)", [f"spare_{number}"])
    with pytest.raises(SourceNotReady, match="max_replication_slots"):
        polled(source, log, source.lsn())


@pytest.mark.usefixtures("transport")
def test_values_larger_than_all_that_is_read_at_once(source: Source) -> None:
    log = source.log("polled")
    for megabytes in (1, 3, 30):
        source.run(f"INSERT INTO a VALUES ({megabytes}, repeat('x', {megabytes << 20}))")
    polled(source, log, source.lsn())
    assert [len(row["payload"]) >> 20 for row in rows(log, "kind = 'I'")] == [1, 3, 30]


@pytest.mark.usefixtures("transport")
def test_an_error_of_the_server_comes_as_what_it_means(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PluginOptions, "whole", PluginOptions(proto_version=99))
    log = source.log("polled")
    with pytest.raises(SourceFailed, match="proto_version=99"):
        polled(source, log, source.run("INSERT INTO a VALUES (1, 'x')"))


def test_a_slot_that_has_nothing_to_follow_is_touched(source: Source) -> None:
    """From 18 on a slot that nobody takes for long is invalidated."""
    limits = replace(RANGE_LIMITS, advance_seconds=0.05, poll_seconds=0.01)
    log = source.log("polled")
    advanced: list[Lsn] = []
    deadline = time.monotonic() + 10

    def stop(receiver: Receiver) -> None:
        if len(advanced) >= 5 or time.monotonic() > deadline:
            receiver.stop()

    receive_inside(source, log, Lsn(1 << 60), advanced.append, replication=False, limits=limits, orders=stop)
    assert len(advanced) >= 5 > len(set(advanced))


def test_who_looks_into_the_slot_does_not_end_the_run(source: Source) -> None:
    """But who stays does."""
    limits = replace(RANGE_LIMITS, advance_seconds=0.02, poll_seconds=0.01)
    log = source.log("polled")
    refused: list[Lsn] = []
    with ReplicationConnection.open(source.database.conninfo) as other:

        def look(receiver: Receiver) -> None:
            if not refused:
                other.start(log.identity.slot, log.start, [PUBLICATION])
                refused.append(log.start)
            elif len(refused) < 5:
                refused.append(source.run("INSERT INTO b VALUES ((SELECT count(*) FROM b), 1)"))
            elif len(refused) == 5:
                other.end_stream()
                refused.append(log.start)
                receiver.until(source.run("INSERT INTO a VALUES (1, 'x')"))

        end = receive_inside(source, log, Lsn(1 << 60), lambda lsn: None, replication=False, limits=limits, orders=look)
        assert source.confirmed(log) == end
    limits = replace(limits, held_seconds=0.1)
    with ReplicationConnection.open(source.database.conninfo) as other:

        def stay(receiver: Receiver) -> None:
            if len(refused) == 6:
                other.start(log.identity.slot, end, [PUBLICATION])
                refused.append(end)

        with pytest.raises(SlotActive):
            receive_inside(source, log, Lsn(1 << 60), lambda lsn: None, replication=False, limits=limits, orders=stay)


def test_a_lost_connection_is_told_though_it_rests(source: Source) -> None:
    limits = replace(RANGE_LIMITS, poll_seconds=60.0)
    log, ended = source.log("polled"), [0]

    def end(receiver: Receiver) -> None:
        ended[0] += 1
        if ended[0] == 10:
            source.run("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
                       " AND application_name = 'pgcdc_assets/receive'")  # fmt: skip

    began = time.monotonic()
    with pytest.raises(SourceUnavailable):
        receive_inside(source, log, Lsn(1 << 60), lambda lsn: None, replication=False, limits=limits, orders=end)
    assert time.monotonic() - began < 20
    assert ended[0] < 100, "it does not spin"


@pytest.mark.usefixtures("transport")
def test_a_lost_connection_is_told(source: Source) -> None:
    log = source.log("polled")

    def end(receiver: Receiver) -> None:
        source.run("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() "
                   "AND application_name = 'pgcdc_assets/receive'")  # fmt: skip

    with pytest.raises(SourceUnavailable):
        receive_inside(source, log, Lsn(1 << 60), lambda lsn: None, replication=False, orders=end)


def test_a_session_says_which_server_it_is_as_a_walsender_does(source: Source) -> None:
    conninfo = source.database.conninfo
    with SqlConnection.open(conninfo) as session, ReplicationConnection.open(conninfo) as walsender:
        ours, theirs = session.identify(), walsender.identify()
        assert (ours.system_identifier, ours.timeline, ours.database) == (
            theirs.system_identifier, theirs.timeline, theirs.database,
        )  # fmt: skip
        assert session.timeline_history(1) == ()
        with connect(conninfo) as conn:
            conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [source.slot("x")])
        made = session.create_slot(source.slot("made"))
        assert made.consistent_point <= source.lsn()
        assert made.snapshot_name is None
