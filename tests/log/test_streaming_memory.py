"""Transactions in progress are kept in files: the receiver's memory depends neither on their number nor on their
size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fix_postgres import TEST_SETTINGS, fresh_database
from tests.log.conftest import SECONDS, Source, until_event
from tests.log.received_twice import Reading, Twin, Twins, little_memory, many
from tests.servers import new_server

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
def test_memory_is_bounded_for_many_open_transactions_and_a_large_one(roomy: Source) -> None:
    """Segments have their default size. The files of a transaction are deleted as soon as it is rolled back."""
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
