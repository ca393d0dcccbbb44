"""Transactions that are received in progress leave the same log as transactions received without streaming."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

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
