"""Transactions that are received in progress leave the same log as transactions received without streaming."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pgcdc_assets.log.receive.client import ReceiverProcess
from tests.fix_postgres import TEST_SETTINGS, fresh_database
from tests.log.conftest import SECONDS, Source, eventually, until_event
from tests.log.received_twice import Reading, Row, Twin, Twins, little_memory, many
from tests.servers import new_server


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
    """A mark is an LSN up to which the log must become complete. The last mark is above the transaction's commit, so
    the log must then have all rows of the transaction."""
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


# Transactions in progress are kept in files ---------------------------------------------------------

TRANSACTIONS = 300
MOST = 300 << 20


@pytest.fixture
def roomy(pg_version: int, tmp_path: Path) -> Iterator[Source]:
    """A server that allows many sessions."""
    settings = {**TEST_SETTINGS, "max_connections": str(TRANSACTIONS + 50)}
    with (
        new_server(tmp_path / "server", pg_version, settings=settings) as server,
        fresh_database(server) as database,
        database.connect() as conn,
    ):
        source = Source(database, conn, tmp_path)
        source.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE TABLE foreign_table (id int)",
                   "CREATE PUBLICATION p FOR TABLE a")  # fmt: skip
        little_memory(source)
        yield source
        for receiver in source.running:
            receiver.kill()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_memory_is_bounded_with_many_open_transactions_and_one_large_transaction(roomy: Source) -> None:
    """The receiver uses the default size of segments. It deletes the files of a transaction as soon as the transaction
    is rolled back."""
    reading = Reading(roomy.log())
    twins = Twins(roomy, Twin(roomy, reading, {}), Twin(roomy, Reading(roomy.log("whole")), {"streaming": False}))
    receiver = twins.start()
    with ExitStack() as stack:
        sessions = [stack.enter_context(roomy.database.connect()) for _ in range(TRANSACTIONS)]
        for part in range(2):
            for number, session in enumerate(sessions):
                if not part:
                    session.execute("BEGIN; INSERT INTO a VALUES (%s, 'first')" % -(number + 1))
                session.execute(many((number + 1) * 1000 + 500 * part, 150).encode())
        for part in range(11):
            sessions[0].execute(many(1_000_000 + part * 10_000, 10_000).encode())
        twins.catch_up()
        twins.until_spooled(20)
        for number, session in enumerate(sessions):
            session.execute("ROLLBACK" if number % 3 == 1 else "COMMIT")
    end = twins.flushed()
    twins.streamed.complete_to(end)
    peak = peak_bytes(receiver.pid)
    receiver.until(end)
    until_event(receiver, "arrived")
    receiver.join(SECONDS)
    assert twins.spilled == []
    assert sum(row[5] == "C" for row in reading.rows()) == 200
    assert sum(len(row[7]) for row in reading.rows()) > 260 << 20
    assert reading.late > 50
    assert 50 << 20 < peak < MOST, f"{peak >> 20} MB"


def peak_bytes(pid: int | None) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10
