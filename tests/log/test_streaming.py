"""Transactions that are received in progress leave the same log as transactions received without streaming."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import SourceUnavailable
from pgcdc_assets.log.receive.client import ReceiverProcess
from tests.log.conftest import SECONDS, Source, eventually, until_event
from tests.log.received_twice import Row, Twins, little_memory, many


@pytest.fixture
def twins(source: Source) -> Twins:
    little_memory(source)
    return Twins.of(source)


def kinds(rows: list[Row]) -> str:
    return "".join(row[5] for row in rows)


@pytest.mark.timeout(120)
def test_streamed_transactions_leave_the_same_log_as_unstreamed_transactions(twins: Twins) -> None:
    source, receiver = twins.source, twins.start()
    with source.database.connect() as other:
        for statement in ("BEGIN", many(1, 2000), "SAVEPOINT s", many(6000, 1000)):
            other.execute(statement.encode())
        source.run("INSERT INTO a VALUES (-1, 'between')")
        for statement in ("ROLLBACK TO s", many(10_000, 1000), "TRUNCATE b", "COMMIT"):
            other.execute(statement.encode())
    end = source.run("INSERT INTO a VALUES (-2, 'after')")
    receiver.until(end)
    until_event(receiver, "arrived")
    receiver.join(SECONDS)
    assert kinds(twins.check(facts=True)) == "IC" + "I" * 3000 + "TCIC"
    assert twins.streamed.reading.late > 2


def history(source: Source) -> None:
    """Two large transactions that overlap each other and also small transactions. They end in every possible way."""
    with source.database.connect() as one, source.database.connect() as two:
        source.run("INSERT INTO b VALUES (1, 1)")
        one.execute("BEGIN; " + many(1))
        two.execute("BEGIN; SAVEPOINT s; " + many(1001))
        source.run("INSERT INTO b VALUES (2, 2)")
        two.execute("ROLLBACK TO s; " + many(2001))
        one.execute(many(3001))
        one.execute("COMMIT")
        source.run("SELECT pg_logical_emit_message(false, 'app', 'loose')", "INSERT INTO foreign_table VALUES (1)")
        two.execute(many(4001))
        two.execute("COMMIT")
        source.run("BEGIN", many(5001), "ROLLBACK", "INSERT INTO b VALUES (3, 3)")


@pytest.mark.long
def test_failed_run_leaves_no_file(twins: Twins) -> None:
    source, receiver = twins.source, twins.start()
    with source.database.connect() as other:
        other.execute(("BEGIN; " + many(1, 1000)).encode())
        twins.flushed()
        twins.until_spooled()
        query = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s"
        source.conn.execute(query, [twins.streamed.log.identity.slot])
        with pytest.raises(SourceUnavailable):
            until_event(receiver, "arrived")
        receiver.join(SECONDS)
        assert twins.spilled == []


def stopped(receiver: ReceiverProcess) -> None:
    receiver.stop()


def terminated(receiver: ReceiverProcess) -> None:
    assert receiver.pid is not None
    os.kill(receiver.pid, signal.SIGTERM)
    eventually(lambda: not receiver.alive)


def killed(receiver: ReceiverProcess) -> None:
    receiver.kill()


@pytest.mark.long
@pytest.mark.parametrize("end", [stopped, terminated, killed])
def test_transaction_open_at_the_end_of_a_run_is_received_again(
    twins: Twins, end: Callable[[ReceiverProcess], None]
) -> None:
    """The server sends the transaction again from its start, with or without streaming. The part that the first run
    stored is deleted, so no change is stored twice."""
    source, receiver = twins.source, twins.start()
    with source.database.connect() as one, source.database.connect() as two:
        one.execute("BEGIN; " + many(1) + "; SAVEPOINT s; " + many(1001))
        two.execute("BEGIN; " + many(10_001))
        small = source.run("INSERT INTO b VALUES (1, 1)")
        twins.catch_up()
        twins.until_spooled()
        twins.streamed.complete_to(small)
        one.execute("ROLLBACK TO s; " + many(2001))
        twins.catch_up()
        end(receiver)
        assert kinds(twins.streamed.reading.rows()) == "IC"
        assert source.confirmed(twins.streamed.log) <= twins.streamed.log.position()
        assert (twins.spilled == []) == (end is not killed)
        twins.start()
        one.execute(many(3001))
        twins.catch_up()
        one.execute("COMMIT")
        two.execute("ROLLBACK")
    twins.streamed.complete_to(twins.flushed())
    assert kinds(twins.check(facts=True)) == "IC" + 1200 * "I" + "C"
    assert twins.spilled == []


@pytest.mark.long
def test_marks_are_reached_while_transactions_are_open(twins: Twins) -> None:
    """The first mark is below the transaction's commit. The second mark is above it, so the log must have all rows of
    the transaction."""
    source, receiver = twins.source, twins.start(batch_seconds=3600)
    with source.database.connect() as one:
        one.execute("BEGIN; " + many(1))
        twins.catch_up()
        twins.until_spooled()
        mark = twins.flushed()
        twins.streamed.complete_to(mark)
        assert twins.streamed.log.position() >= mark
        assert twins.streamed.reading.rows() == []
        one.execute(many(1001))
        mark = source.run("INSERT INTO b VALUES (1, 1)")
        one.execute("COMMIT")
        end = source.lsn()
        twins.streamed.complete_to(mark)
        assert kinds(twins.streamed.reading.rows())[:2] == "IC"
        twins.streamed.complete_to(end)
        assert kinds(twins.streamed.reading.rows()) == "IC" + 800 * "I" + "C"
    receiver.stop()
    twins.check(facts=True)


@pytest.mark.long
def test_withdrawn_goal_stays_withdrawn_after_a_reconnect(twins: Twins) -> None:
    """After a reconnect, the receiver reads the list of orders again."""
    source, receiver = twins.source, twins.start()
    receiver.until(Lsn(source.lsn() + (1 << 16)))
    receiver.follow()
    # Orders are read one after another, so the goal has been withdrawn when the log is complete to this LSN.
    twins.streamed.complete_to(source.run("INSERT INTO b VALUES (1, 1)"))
    _reconnect(twins)
    twins.streamed.complete_to(source.run("INSERT INTO a VALUES (-1, 'x')"))
    assert receiver.alive
    receiver.stop()
    twins.check()


def _reconnect(twins: Twins) -> None:
    """Commits a transaction with a message that may be rolled back. The receiver must reconnect and request the
    transaction without streaming."""
    source = twins.source
    end = source.run("BEGIN", many(90_001), "SAVEPOINT s", "SELECT pg_logical_emit_message(true, 'app', 'gone')",
                     many(91_001), "ROLLBACK TO s", "COMMIT")  # fmt: skip
    twins.streamed.complete_to(end)


@pytest.mark.long
@pytest.mark.parametrize("immediate", [False, pytest.param(True, marks=pytest.mark.since(16, "immediate streaming"))])
def test_transactions_committed_before_the_receiver_starts_are_streamed(source: Source, immediate: bool) -> None:
    """All transactions have committed before the receiver starts. The server streams them nevertheless."""
    little_memory(source, immediate=immediate)
    twins = Twins.of(source)
    history(source)
    twins.streamed.receive(twins.flushed())
    assert len(twins.check(facts=True)) == 1609
    assert twins.streamed.reading.late > 0
