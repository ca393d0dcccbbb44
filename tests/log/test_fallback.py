"""Transactions that cannot be received in progress are received without streaming, after their commit. Later
transactions are streamed again."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LogAhead
from pgcdc_assets.log.batch import BatchWriter
from pgcdc_assets.log.receive.connections import Fallback
from pgcdc_assets.log.receive.messages import EventName
from pgcdc_assets.log.relations import Relations
from tests.log.conftest import SECONDS, Source, eventually, until_event
from tests.log.received_twice import Twins, little_memory, many

FALLBACK_SECONDS = 0.3
EMIT = "SELECT pg_logical_emit_message(true, 'app', '{}')"
UNDECODABLE = ["BEGIN", "SAVEPOINT s", "TRUNCATE own", many(1001, table="own"), "ROLLBACK TO s",
               many(2001, table="own"), "ALTER TABLE own ADD w int", many(3001, table="own")]  # fmt: skip
"""No server version can decode this transaction while it is in progress: the server reports "could not map
filenode"."""


@pytest.fixture
def twins(source: Source) -> Twins:
    little_memory(source)
    return Twins.of(source, fallback_seconds=FALLBACK_SECONDS)


def streams_again(twins: Twins, first: int) -> None:
    """Checks that the receiver uses streaming again: a new transaction is received while it is in progress."""
    late = twins.streamed.reading.late
    with twins.source.database.connect() as other:
        other.execute("BEGIN; INSERT INTO b VALUES (-1, 1)")
        number = first

        def spilled() -> bool:
            nonlocal number
            other.execute(many(number, 100))
            number += 100
            twins.catch_up()
            return bool(twins.spilled)

        eventually(spilled)
        other.execute("COMMIT")
    twins.streamed.complete_to(twins.flushed())
    twins.streamed.reading.rows()
    assert twins.streamed.reading.late > late


@pytest.mark.long
@pytest.mark.timeout(120)
def test_transaction_that_cannot_be_decoded_in_progress_is_received_after_its_commit(
    twins: Twins, capfd: pytest.CaptureFixture[str]
) -> None:
    """The receiver reconnects without streaming. It keeps the goal and the marks that it got before it reconnected. (A
    mark is an LSN up to which the receiver must complete the log.) It reports each mark once."""
    source = twins.source
    source.run("CREATE TABLE own (id int PRIMARY KEY, v text)", "ALTER PUBLICATION p ADD TABLE own")
    receiver = twins.streamed.start()
    events = until_event(receiver, "started")
    with source.database.connect() as conn, source.database.connect() as open_beside:
        open_beside.execute("BEGIN; " + many(50_001))
        early = source.run("INSERT INTO b VALUES (1, 1)")
        twins.catch_up()
        receiver.mark(early)
        events += until_event(receiver, "complete")
        later, goal = Lsn(source.lsn() + (1 << 23)), Lsn(source.lsn() + (1 << 25))
        receiver.mark(later)
        receiver.until(goal)
        receiver.report_apply(early)
        for statement in UNDECODABLE:
            conn.execute(statement.encode())
        pid = walsender(twins)
        twins.flushed()
        eventually(lambda: walsender(twins) not in (pid, None))
        small = source.run("INSERT INTO b VALUES (2, 2)")
        receiver.mark(small)
        events += until_event(receiver, "complete")
        conn.execute("COMMIT")
        open_beside.execute(many(51_001))
        open_beside.execute("COMMIT")
    while source.lsn() < later:
        source.run("INSERT INTO foreign_table (id, v) SELECT 1, repeat('x', 1000) FROM generate_series(1, 5000)")
    events += until_event(receiver, "complete")
    streams_again(twins, 60_001)
    while source.lsn() < goal:
        source.run("INSERT INTO foreign_table (id, v) SELECT 1, repeat('x', 1000) FROM generate_series(1, 5000)")
    events += until_event(receiver, "arrived")
    receiver.join(SECONDS)
    assert "could not map" in capfd.readouterr().err
    assert [event.name for event in events].count(EventName.STARTED) == 1
    assert [event.lsn for event in events if event.name == EventName.COMPLETE][:3] == [early, small, later]
    assert len(twins.check(upto=goal)) > 1600
    assert twins.spilled == []


def walsender(twins: Twins) -> Any:
    return twins.source.slot_row(twins.streamed.log, "active_pid")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_transaction_is_received_unstreamed_if_its_message_may_have_been_rolled_back(twins: Twins) -> None:
    """The protocol does not say to which subtransaction a logical message of a streamed transaction belongs. So after a
    rollback to a savepoint, the receiver cannot know whether the message was rolled back, too."""
    source, receiver = twins.source, twins.start()
    pid = walsender(twins)
    with source.database.connect() as one, source.database.connect() as two:
        for statement in ("BEGIN", many(1), EMIT.format("first"), "SAVEPOINT s", EMIT.format("gone"), many(1001)):
            one.execute(statement.encode())
        for statement in ("BEGIN", many(20_001), EMIT.format("sure")):
            two.execute(statement.encode())
        twins.catch_up()
        twins.until_spooled()
        source.run(EMIT.format("alone"), "SELECT pg_logical_emit_message(false, 'app', 'loose')")
        for statement in ("ROLLBACK TO s", EMIT.format("kept"), many(2001)):
            one.execute(statement.encode())
        twins.catch_up()
        assert walsender(twins) == pid
        one.execute("COMMIT")
        eventually(lambda: walsender(twins) not in (pid, None))
        twins.streamed.complete_to(source.run("INSERT INTO b VALUES (1, 1)"))
        two.execute(many(21_001))
        two.execute("COMMIT")
        twins.streamed.complete_to(twins.flushed())
    streams_again(twins, 30_001)
    receiver.stop()
    messages = [row[7] for row in twins.check(facts=True) if row[5] == "M"]
    assert [text for text in (b"first", b"gone", b"sure", b"alone", b"loose", b"kept")
            if any(message.endswith(text) for message in messages)] == [
                b"first", b"sure", b"alone", b"loose", b"kept"]  # fmt: skip
    assert len(messages) == 5


@pytest.mark.long
@pytest.mark.timeout(120)
def test_restored_source_is_refused_if_it_streams_a_transaction_that_the_log_lacks(twins: Twins) -> None:
    """The server sends a large transaction that the log does not have, although the transaction's commit is below the
    log's position."""
    source, log = twins.source, twins.streamed.log
    with source.slot_set_back(log):
        twins.streamed.receive(source.run("BEGIN", many(1), many(1001), "COMMIT"))
        with_other = source.run("BEGIN", many(5001), many(6001), "COMMIT")
    # Move the log's position above the second transaction, which the log does not have.
    _move(twins, with_other)
    for _ in range(2):
        receiver = twins.streamed.start()
        with pytest.raises(LogAhead):
            until_event(receiver, "arrived")


def _move(twins: Twins, position: Lsn) -> None:
    log = twins.streamed.log
    BatchWriter(log.path, log.identity, log.timeline, Relations()).advance(position)


def test_streaming_stays_off_until_the_fallback_time_is_over_and_the_lsn_is_reached() -> None:
    """``failed`` turns streaming off for some seconds. Each further call doubles this time, up to an hour. ``until``
    turns streaming off until the log is received up to the given LSN."""
    fallback = Fallback(True, 0.0)
    assert not fallback.whole
    assert fallback.failed() == fallback.failed() == 0.0
    fallback.until(Lsn(100))
    fallback.until(Lsn(50))
    assert fallback.whole
    assert not fallback.over(Lsn(99))
    assert fallback.over(Lsn(100))
    assert not fallback.whole
    fallback = Fallback(True, 1000.0)
    assert [fallback.failed() for _ in range(3)] == [1000.0, 2000.0, 3600.0]
    assert not fallback.over(Lsn(1))
    assert Fallback(False).whole
    assert not Fallback(False).over(Lsn(1))
