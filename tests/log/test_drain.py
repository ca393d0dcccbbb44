"""Drains: the receiver reads a backlog with the SQL function pg_logical_slot_get_binary_changes. The log then equals a
log that was received through the stream."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.errors import SlotActive, SourceFailed
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.source.connect.pluginoptions import PluginOptions
from pgcdc_assets.source.connect.readers import SocketReader
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.slot import WAL_ENDS, WITHIN, flush_lsn
from pgcdc_assets.source.stream.drain import RANGE_LIMITS, RangeLimits
from tests.log.conftest import PUBLICATION, Source, content, eventually, rows
from tests.log.inside import ranges_of, receive_inside

LARGE = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 300) g)"


@pytest.fixture(params=[20_000, 256 << 20], ids=["ranges", "one range"])
def limits(request: pytest.FixtureRequest) -> RangeLimits:
    return ranges_of(request.param)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the commands that the socket reader sends to the server."""
    asked: list[str] = []
    command = SocketReader.command

    def noted(reader: SocketReader, text: str) -> None:
        asked.append(text)
        command(reader, text)

    monkeypatch.setattr(SocketReader, "command", noted)
    return asked


def everything(source: Source) -> None:
    """Writes messages of each kind, overlapping transactions, DDL, and WAL without published changes."""
    source.run("CREATE TYPE mood AS ENUM ('sad', 'ok')", "ALTER TABLE a ADD COLUMN m mood, ADD COLUMN large text",
               "ALTER TABLE a ALTER large SET STORAGE EXTERNAL")  # fmt: skip
    for number in range(30):
        source.transaction(
            f"INSERT INTO a VALUES ({number}, 'ünï', 'ok', {LARGE})", f"UPDATE a SET v = v || 1 WHERE id <= {number}",
            f"INSERT INTO b VALUES ({number}, 1.50)", f"UPDATE a SET id = id + 1000 WHERE id = {number - 3}",
        )  # fmt: skip
        source.run("CHECKPOINT")  # otherwise restart_lsn would not advance
        source.run(f"SELECT pg_logical_emit_message({number % 2 == 0}, 'p', repeat('x', {number}))",
                   f"INSERT INTO foreign_table SELECT g, 'x' FROM generate_series(1, {number * 3}) g")  # fmt: skip
    with source.database.connect() as other:
        other.execute("BEGIN")
        other.execute("INSERT INTO b SELECT g, g FROM generate_series(1000, 9000) g")
        other.execute("SAVEPOINT s")
        other.execute("DELETE FROM b WHERE id > 5000")
        source.run("DELETE FROM b WHERE id < 3", "TRUNCATE foreign_table")
        other.execute("ROLLBACK TO s")
        other.execute("COMMIT")
    source.run("ALTER TABLE b ADD COLUMN more date")
    source.transaction("INSERT INTO a VALUES (77, 'x')", "TRUNCATE a, b", "INSERT INTO b VALUES (1, 1, now())")


@contextmanager
def origin(source: Source) -> Iterator[None]:
    name = f"o_{source.database.name}"
    source.run(
        f"SELECT pg_replication_origin_create('{name}')", f"SELECT pg_replication_origin_session_setup('{name}')"
    )
    yield
    source.run("SELECT pg_replication_origin_session_reset()", f"SELECT pg_replication_origin_drop('{name}')")


def drained(source: Source, log: ChangeLog, until: Lsn, limits: RangeLimits = RANGE_LIMITS) -> Lsn:
    return receive_inside(source, log, until, lambda lsn: None, drain_bytes=1, limits=limits)


def test_drained_log_equals_the_streamed_log(source: Source, limits: RangeLimits, commands: list[str]) -> None:
    streamed, log = source.log("streamed"), source.log("drained")
    with origin(source):
        everything(source)
    everything_again = source.run("INSERT INTO b VALUES (2, 2)")
    end = source.lsn()
    assert end >= everything_again
    source.receive(streamed, end)
    drained(source, log, end, limits)
    ranges = [command for command in commands if command.startswith("COPY")]
    assert len(ranges) > 5 if limits.largest_range < 1 << 20 else len(ranges) == 1
    assert content(log) == content(streamed)
    assert log.verify(LsnRange(log.start, log.position()))
    assert source.confirmed(log) == log.position()


def test_stream_starts_where_the_drain_ended(source: Source, commands: list[str]) -> None:
    """One run drains the backlog from a copy of the slot, then streams from the slot. Everything is received once, and
    the copy of the slot is dropped."""
    streamed, log = source.log("streamed"), source.log("drained")
    everything(source)
    ends: list[Lsn] = []

    def write_more(receiver: Receiver) -> None:
        if not ends and any(command.startswith("START_REPLICATION") for command in commands):
            source.run("INSERT INTO a VALUES (5, 'streamed')")
            ends.append(source.lsn())
            receiver.until(ends[0])

    far = Lsn(source.lsn() + (1 << 40))
    receive_inside(source, log, far, lambda lsn: None, drain_bytes=1 << 20, orders=write_more)
    source.receive(streamed, ends[0])
    assert commands[0].startswith("COPY")
    assert content(log) == content(streamed)
    places = [(row["commit_lsn"], row["tx_ordinal"], row["relation_id"], row["lsn"]) for row in rows(log)]
    assert len(set(places)) == len(places)
    found = source.conn.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'pgcdc_drain%'")
    assert found.fetchall() == [(0,)]


def test_slot_is_advanced_only_to_durable_positions(source: Source) -> None:
    log = source.log("drained")
    everything(source)
    confirmed: list[Lsn] = []

    def confirming(lsn: Lsn) -> None:
        confirmed.append(lsn)
        assert lsn <= ChangeLog(Layout.of(source.folder / "drained")).open().position()

    end = source.lsn()
    receive_inside(source, log, end, confirming, drain_bytes=1, limits=ranges_of(20_000, release_bytes=1))
    assert len(set(confirmed)) > 5
    assert source.confirmed(log) == log.position()


def test_drain_acquires_the_slot_often_enough_to_keep_it_valid(source: Source) -> None:
    """The drain reads from a copy of the slot. Since PostgreSQL 18, the server can invalidate a slot that no session
    acquires, so the drain acquires the slot itself from time to time."""
    limits = ranges_of(4000, touch_seconds=0.1)
    log = source.log("drained")
    source.run(*(f"INSERT INTO a VALUES ({number}, {LARGE})" for number in range(30)))
    touched: list[Lsn] = []

    def slow(receiver: Receiver) -> None:
        if len(touched) < 4:
            time.sleep(0.15)
            receiver._send_status()

    receive_inside(source, log, source.lsn(), touched.append, drain_bytes=1, limits=limits, orders=slow)
    assert sum(lsn == log.start for lsn in touched) >= 4


@pytest.mark.long
def test_backlog_with_a_long_open_transaction_is_streamed_instead_of_drained(
    source: Source, commands: list[str]
) -> None:
    """If the backlog were drained, each call of the SQL function would decode the WAL again from the start of the open
    transaction."""
    streamed, log = source.log("streamed"), source.log("drained")
    with source.database.connect() as other:
        other.execute("BEGIN")
        other.execute("SELECT pg_logical_emit_message(true, 'open', 'for long')")
        everything(source)
        other.execute("COMMIT")
    end = source.lsn()
    drained(source, log, end, ranges_of(2_000))
    source.receive(streamed, end)
    assert commands[-1].startswith("START_REPLICATION")
    assert content(log) == content(streamed)


def test_complete_transactions_are_drained_even_if_a_later_record_is_incomplete(
    source: Source, commands: list[str]
) -> None:
    """The flushed WAL ends in the middle of a record of an open transaction, and the source writes nothing more. The
    drain must end below this record."""
    limits = replace(RANGE_LIMITS, unsure_bytes=64 << 10)
    for attempt in range(3):
        commands.clear()
        log = source.log(f"drained_{attempt}")
        source.run(f"INSERT INTO b SELECT g, g FROM generate_series({attempt}0000, {attempt}9000) g")
        end = source.lsn()
        with source.database.connect() as other:
            other.execute("BEGIN")

            def written_ahead(writer: psycopg.Connection = other) -> bool:
                query = f"SELECT wal.inserted - wal.flushed, {WITHIN} FROM {WAL_ENDS}"
                ((unflushed, within),) = source.conn.execute(query.encode()).fetchall()
                if not unflushed:
                    writer.execute("INSERT INTO foreign_table SELECT g, 'x' FROM generate_series(1, 3000) g")
                return bool(within and unflushed < 8192)

            eventually(written_ahead)
            within = flush_lsn(source.conn)
            drained(source, log, end, limits)
            rested = flush_lsn(source.conn) == within
        asked = [re.findall(r"'([0-9A-F]+/[0-9A-F]+)'", command) for command in commands]
        assert log.position() == end
        # Every 15 s the server writes and flushes a list of running transactions. If it has done so since ``within``
        # was read, the incomplete record is now complete, and the test makes another attempt.
        if rested:
            assert 0 < max(Lsn.parse(upto) for (upto,) in asked) <= within - limits.unsure_bytes
            return
    raise AssertionError("it waited for the source to write each time")


@pytest.mark.long
def test_backlog_is_streamed_if_no_slot_is_free_for_a_drain(source: Source, commands: list[str]) -> None:
    """A drain reads from a copy of the slot, and the copy counts for max_replication_slots."""
    log = source.log("drained")
    everything(source)
    (spare,) = source.conn.execute(
        "SELECT current_setting('max_replication_slots')::int - count(*) FROM pg_replication_slots"
    ).fetchone() or (0,)
    for number in range(spare):
        source.conn.execute("SELECT pg_create_physical_replication_slot(%s, false, true)", [f"spare_{number}"])
    drained(source, log, source.lsn())
    assert [command.split()[0] for command in commands] == ["START_REPLICATION"]


@pytest.mark.long
def test_drain_loses_nothing_when_another_session_advances_the_slot(source: Source) -> None:
    """The drain reads from its own copy of the slot, so the log misses no change if the slot itself is advanced."""
    streamed, log = source.log("streamed"), source.log("drained")
    everything(source)
    end = source.lsn()
    done: list[Lsn] = []

    def advance(receiver: Receiver) -> None:
        if not done:
            done.append(end)
            source.conn.execute("SELECT pg_replication_slot_advance(%s, %s)", [log.identity.slot, str(end)])

    receive_inside(source, log, end, lambda lsn: None, drain_bytes=1, orders=advance)
    source.receive(streamed, end)
    assert content(log) == content(streamed)


def test_values_larger_than_one_read_of_the_socket_are_received(source: Source) -> None:
    """A message of 30 MB arrives in thousands of pieces, both through the stream and through a drain."""
    streamed, log = source.log("streamed"), source.log("drained")
    for megabytes in (1, 3, 30):
        source.run(f"INSERT INTO a VALUES ({megabytes}, repeat('x', {megabytes << 20}))",
                   f"INSERT INTO b VALUES ({megabytes}, 1)")  # fmt: skip
    end = source.lsn()
    source.receive(streamed, end)
    drained(source, log, end)
    assert content(log) == content(streamed)
    large = [row for row in rows(log, "kind = 'I'") if len(row["payload"]) > 1000]
    assert [len(row["payload"]) >> 20 for row in large] == [1, 3, 30]


@pytest.mark.long
@pytest.mark.parametrize("held_seconds", [30.0, 0.1], ids=["briefly", "for long"])
def test_drain_waits_a_limited_time_for_a_session_that_holds_the_slot(source: Source, held_seconds: float) -> None:
    """The drain reads from a copy of the slot. It needs the slot itself only to advance the slot."""
    limits = ranges_of(4000, release_bytes=1, held_seconds=held_seconds)
    log, events = source.log("drained"), ["start", "end"]
    source.run(*(f"INSERT INTO a VALUES ({number}, {LARGE})" for number in range(30)))
    with ReplicationConnection.open(source.database.conninfo) as other:

        def hold(receiver: Receiver) -> None:
            if events == ["start", "end"]:
                other.start(log.identity.slot, log.start, [PUBLICATION])
                events.pop(0)
            elif events == ["end"] and held_seconds > 1 and log.open().position() > log.start:
                other.end_stream()
                events.pop(0)

        end = source.lsn()
        if held_seconds > 1:
            receive_inside(source, log, end, lambda lsn: None, drain_bytes=1, limits=limits, orders=hold)
            assert events == []
            assert source.confirmed(log) == log.position()
        else:
            with pytest.raises(SlotActive):
                receive_inside(source, log, end, lambda lsn: None, drain_bytes=1, limits=limits, orders=hold)


def test_server_error_during_a_drain_is_raised_as_source_failed(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PluginOptions, "whole", PluginOptions(proto_version=99))
    log = source.log("drained")
    with pytest.raises(SourceFailed, match="proto_version=99"):
        drained(source, log, source.run("INSERT INTO a VALUES (1, 'x')"))
