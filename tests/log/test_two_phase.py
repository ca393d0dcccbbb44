"""With ``two_phase``, the server sends a prepared transaction at its PREPARE, not at its commit. The log must equal a
log that was received without ``two_phase``, no matter when the transaction ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pgcdc_assets.errors import IdentityMismatch, LogCorrupt, PgcdcError, PreparedLost
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.spill import PREPARED, PreparedFolder
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.store import storage
from tests.log.conftest import Source, in_each_place, rows, until_event
from tests.log.received_twice import (
    Row,
    Twins,
    durable,
    end,
    gid,
    kinds,
    little_memory,
    many,
    prepare,
    recorded,
    restart,
)

pytestmark = in_each_place

IN_BLOCKS, WHOLE = {"streaming": True}, {"streaming": False}


@pytest.fixture
def twins(source: Source, request: pytest.FixtureRequest) -> Twins:
    """Two logs of the same source. ``streamed`` is received with ``two_phase``. It receives large transactions in
    blocks, unless the test is parametrized with ``WHOLE``."""
    little_memory(source)
    return Twins.of(source, two_phase=True, **getattr(request, "param", IN_BLOCKS))


both = pytest.mark.parametrize("twins", [IN_BLOCKS, WHOLE], ids=["in blocks", "whole"], indirect=True)


def kept(twins: Twins) -> list[str]:
    return [transaction.key.gid for transaction in PreparedFolder(twins.streamed.log.path).pending()]


def files(twins: Twins) -> list[str]:
    return [entry.name for entry in storage.list_after(twins.streamed.log.path / PREPARED)]


def finish(twins: Twins, *, facts: bool = True) -> list[Row]:
    """Ends the receiver at the current LSN, and checks that both logs are equal. Returns the rows."""
    twins.streamed.arrive(twins.flushed())
    return twins.check(facts=facts)


def fails(receiver: ReceiverProcess, error: type[PgcdcError]) -> PgcdcError:
    with pytest.raises(error) as caught:
        until_event(receiver, "arrived")
    return caught.value


@pytest.mark.long
@both
@pytest.mark.parametrize("large", [False, True])
def test_prepared_transaction_is_ordered_by_its_commit_and_not_by_its_prepare(twins: Twins, large: bool) -> None:
    source = twins.source
    twins.start()
    prepare(source, many(1, 1000) if large else "INSERT INTO a VALUES (1, 'x')", "TRUNCATE b")
    between = source.run("INSERT INTO a VALUES (-1, 'between')")
    durable(twins, between)
    assert kinds(twins.streamed.reading.rows()) == "IC"
    assert kept(twins) == [gid(source).replace("''", "'")]
    end(source)
    source.run("INSERT INTO a VALUES (-2, 'after')")
    found = finish(twins)
    assert kinds(found) == "IC" + "I" * (1000 if large else 1) + "TC" + "IC"
    assert files(twins) == []


@pytest.mark.long
@both
@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
def test_prepared_transaction_may_end_after_a_restart(twins: Twins, how: str) -> None:
    """Once the PREPARE is confirmed, the server sends only the COMMIT PREPARED or ROLLBACK PREPARED."""
    source = twins.source
    twins.start()
    durable(twins, prepare(source, many(1, 600), "SAVEPOINT s", many(2001, 600), "ROLLBACK TO s", many(5001, 10)))
    restart(twins)
    restart(twins)
    assert len(kept(twins)) == 1
    end(source, how)
    source.run("INSERT INTO b VALUES (1, 1)")
    assert kinds(finish(twins)) == ("I" * 610 + "C") * (how == "COMMIT") + "IC"
    assert files(twins) == []


def test_several_prepared_transactions_may_be_open_at_the_same_time(twins: Twins) -> None:
    source = twins.source
    twins.start()
    for number in range(3):
        lsn = prepare(source, f"INSERT INTO a VALUES ({number}, 'x')", name=str(number))
    durable(twins, lsn)
    end(source, name="2")
    end(source, "ROLLBACK", name="1")
    restart(twins)
    end(source, name="0")
    assert kinds(finish(twins)) == "ICIC"


@pytest.mark.long
@pytest.mark.parametrize("first", ["log", "server"])
def test_commit_prepared_that_is_sent_again_is_stored_once(twins: Twins, first: str) -> None:
    """The receiver is killed after the log has the transaction. The server may then send COMMIT PREPARED again,
    although the content that was stored at the PREPARE is already deleted."""
    source = twins.source
    copy = source.log("behind", copy_of=twins.streamed.log) if first == "server" else None
    twins.start()
    durable(twins, prepare(source, "INSERT INTO a VALUES (1, 'x')"))
    commit = end(source)
    source.run("INSERT INTO a VALUES (2, 'x')")
    durable(twins, commit)
    assert twins.streamed.receiver is not None
    twins.streamed.receiver.kill()
    if copy is not None:
        # A copied slot has no two_phase, so the server sends the complete transaction at its commit.
        source.receive(copy, source.lsn())
    twins.start()
    source.run("INSERT INTO a VALUES (3, 'x')")
    assert kinds(finish(twins)) == "ICICIC"


def test_run_that_ends_between_prepare_and_commit_keeps_the_prepared_transaction(twins: Twins) -> None:
    source = twins.source
    goal = prepare(source, "INSERT INTO a VALUES (1, 'x')")
    commit = end(source)
    twins.streamed.receive(goal)
    assert (twins.streamed.reading.rows(), len(kept(twins))) == ([], 1)
    twins.streamed.receive(commit)
    assert kinds(twins.check(facts=True)) == "IC"


@pytest.mark.long
def test_run_ends_with_an_error_if_the_content_of_a_prepared_transaction_is_lost(twins: Twins) -> None:
    """Without the error, the log would lack a transaction of the source, and nobody would notice."""
    source = twins.source
    twins.start()
    durable(twins, prepare(source, "INSERT INTO a VALUES (1, 'x')"))
    assert twins.streamed.receiver is not None
    twins.streamed.receiver.kill()
    for name in files(twins):
        storage.delete([twins.streamed.log.path / PREPARED / name])
    end(source)
    error = fails(twins.streamed.start(), PreparedLost)
    assert f"'{gid(source)}'".replace("''", "'") in str(error).replace('"', "'")
    assert error.lsn is not None
    assert "pgcdc teardown" in str(error)
    assert twins.streamed.reading.rows() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "damaged"),
    [(".parquet", lambda content: content[:20]), (".json", lambda _: b""), (".json", lambda _: b"[1]")],
    ids=["cut", "empty", "other JSON"],
)
def test_run_ends_with_an_error_if_a_file_of_a_prepared_transaction_is_damaged(
    twins: Twins, kind: str, damaged: Callable[[bytes], bytes]
) -> None:
    source = twins.source
    twins.start()
    durable(twins, prepare(source, "INSERT INTO a VALUES (1, 'x')"))
    assert twins.streamed.receiver is not None
    twins.streamed.receiver.kill()
    (name,) = [name for name in files(twins) if name.endswith(kind)]
    place = twins.streamed.log.path / PREPARED / name
    storage.replace(place, damaged(storage.read(place)))
    end(source)
    assert PREPARED in str(fails(twins.streamed.start(), LogCorrupt))
    assert twins.streamed.reading.rows() == []


@pytest.mark.long
def test_two_phase_setting_that_differs_from_the_slot_is_refused(source: Source) -> None:
    for made in (False, True):
        log = source.log(f"tp_{made:d}", two_phase=made)
        error = fails(source.receiver(log, two_phase=not made), IdentityMismatch)
        assert f"set `two_phase` to {str(made).lower()}" in str(error)


@pytest.mark.long
def test_slot_with_two_phase_is_not_drained(source: Source) -> None:
    """A drain reads from a copy of the slot. The copy has no two_phase, so it sends a prepared transaction only at its
    commit. If the drain ended before the commit, the stream would send COMMIT PREPARED without the content."""
    log = source.log(two_phase=True)
    prepare(source, "INSERT INTO a VALUES (1, 'x')")
    source.run(many(2, 2000))
    receiver = source.receiver(log, two_phase=True, drain_bytes=1)
    commit = end(source)
    receiver.until(commit)
    until_event(receiver, "arrived")
    assert len(rows(log)) == 2003


@pytest.mark.long
@pytest.mark.since(18, "two_phase of a slot can be changed")
def test_content_of_a_prepared_transaction_is_deleted_after_two_phase_is_switched_off(source: Source) -> None:
    """Without two_phase, the server sends the complete transaction at COMMIT PREPARED."""
    log = source.log(two_phase=True)
    receiver = source.receiver(log, two_phase=True)
    lsn = prepare(source, "INSERT INTO a VALUES (1, 'x')")
    recorded(source, log, receiver, lsn)
    receiver.stop()
    with ReplicationConnection.open(source.database.conninfo, application_name="test") as connection:
        connection.execute(f"ALTER_REPLICATION_SLOT {log.identity.slot} (two_phase false)")
    source.receive(log, end(source))
    assert [row["kind"] for row in rows(log)] == ["I", "C"]
    assert PreparedFolder(log.path).pending() == []
