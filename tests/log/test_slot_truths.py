"""What a run does after a crash or a restore of the source, or after something happened to the slot: it continues
without loss, or ends with an error and leaves the log unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import IdentityMismatch, LogAhead, PgcdcError, SlotAhead, SlotLost
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.batches import Limits
from pgcdc_assets.source.connect.connection import APPLICATION
from tests.fix_postgres import TEST_SETTINGS, fresh_database
from tests.log.conftest import Source, content, eventually, rows, until_event
from tests.servers import copied, new_server


@pytest.fixture(scope="module")
def own(pg_version: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server that only the tests of this module use, so that they may stop it."""
    folder = tmp_path_factory.mktemp("own")
    with new_server(folder / "server", pg_version, settings=TEST_SETTINGS) as server:
        yield server


@pytest.fixture
def source(own: EmbeddedServer, tmp_path: Path) -> Iterator[Source]:
    own.start(survive=False)
    with fresh_database(own) as database, database.connect() as conn:
        source = Source(database, conn, tmp_path)
        source.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE a")
        yield source
        source.conn.close()
        for receiver in source.running:
            receiver.kill()


def refused(source: Source, log: ChangeLog, kind: type[PgcdcError], *, event: str = "started") -> str:
    """Starts a receiver. It must end with this kind of error before it reports ``event``, and leave the log unchanged.
    Returns the error's text."""
    before = content(log), log.position()
    receiver = source.receiver(log)
    with pytest.raises(kind) as caught:
        until_event(receiver, event)
    receiver.join(5)
    assert (content(log), log.position()) == before
    assert not caught.value.retryable
    assert caught.value.do
    return str(caught.value)


def start_again(own: EmbeddedServer, source: Source) -> None:
    own.start(survive=False)
    source.conn = source.database.connect()


def test_no_change_is_lost_if_a_crash_of_the_source_sets_the_slot_back(own: EmbeddedServer, source: Source) -> None:
    """PostgreSQL does not write confirmations to disk at once, so an immediate stop loses the last confirmation."""
    log, twin = source.log(), source.log("twin")
    other = source.database.connect()
    # While this transaction is open, restart_lsn does not move. PostgreSQL writes a slot to disk at once only if
    # restart_lsn moves.
    other.execute("BEGIN; SELECT pg_current_xact_id()")
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')", "INSERT INTO a VALUES (2, 'x')"))
    confirmed = log.position()
    assert source.confirmed(log) == confirmed
    own.stop(mode="immediate")
    other.close()
    start_again(own, source)
    assert source.confirmed(log) < confirmed
    assert len(rows(log, "kind = 'I'")) == 2
    end = source.run("INSERT INTO a VALUES (3, 'y')")
    source.receive(log, end)
    source.receive(twin, end)
    assert content(log) == content(twin)
    assert len(rows(log, "kind = 'I'")) == 3
    assert source.confirmed(log) == log.position() > confirmed


def test_slot_advanced_past_the_log_is_refused(source: Source) -> None:
    log = source.log()
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    source.run("INSERT INTO a VALUES (2, 'lost')")
    source.conn.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", [log.identity.slot])
    told = refused(source, log, SlotAhead)
    assert str(log.position()) in told
    assert str(source.confirmed(log)) in told


def test_changes_that_another_receiver_confirms_during_the_wait_for_the_slot_are_not_lost(source: Source) -> None:
    """The second receiver reads the log's position, and then waits for the slot. Then the first receiver writes a
    transaction to the log and confirms it, so the slot is above the position that the second receiver has read."""
    log = source.log()
    first = source.receiver(log)
    until_event(first, "started")
    second = source.receiver(log)
    eventually(lambda: _receiving(source) == 2)
    end = source.run("INSERT INTO a VALUES (1, 'x')")
    eventually(lambda: source.confirmed(log) >= end)
    first.stop()
    until_event(second, "started")
    source.run("INSERT INTO a VALUES (2, 'y')")
    until_event(second, "batch")
    second.stop()
    assert len(rows(log, "kind = 'I'")) == 2


def _receiving(source: Source) -> int:
    """The number of receivers that are connected to the source's server."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    ((count,),) = source.conn.execute(query, [f"{APPLICATION}/receive"]).fetchall()
    return int(count)


@pytest.mark.long
@pytest.mark.parametrize("gone_on", [False, True])
def test_log_ahead_of_a_restored_backup_is_refused(
    own: EmbeddedServer, source: Source, tmp_path: Path, gone_on: bool
) -> None:
    """An older copy of the data directory is restored, so the log has transactions that the source does not have. LSNs
    show this only until the source has again written WAL up to the log's position. After that, only a comparison of the
    transactions shows it."""
    log = source.log()
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    source.conn.close()
    own.stop()
    backup = tmp_path / "backup"
    copied(own.data, backup)
    start_again(own, source)
    source.receive(log, source.run("INSERT INTO a SELECT g, 'never was' FROM generate_series(2, 20000) g"))
    position = log.position()
    source.conn.close()
    own.stop()
    shutil.rmtree(own.data)
    copied(backup, own.data)
    start_again(own, source)
    if gone_on:
        source.run(*(f"INSERT INTO a SELECT {number}0000 + g, 'new' FROM generate_series(1, 9000) g"
                     for number in range(3, 9)))  # fmt: skip
        assert source.lsn() > position
    for _ in range(2):
        told = refused(source, log, LogAhead, event="batch" if gone_on else "started")
        assert gone_on or str(position) in told
        assert "restored" in told
        assert "teardown --lake" in told


def test_source_with_a_transaction_that_the_log_lacks_is_refused_at_each_run(source: Source) -> None:
    """The log has no transaction between the slot's position and the log's position. If the server sends a transaction
    of this range, the source has a different history than the log. Only the slot's position shows this, so a refused
    run does not move the slot."""
    other, confirmed = _log_with_another_history(source)
    for _ in range(2):
        told = refused(source, other, LogAhead, event="batch")
        assert "differ from those of the source" in told
        assert source.confirmed(other) == confirmed


def test_run_that_ends_before_the_log_is_compared_with_the_source_does_not_move_the_slot(source: Source) -> None:
    """The log has already reached the LSN at which the run must end, so the run reads nothing from the source."""
    other, confirmed = _log_with_another_history(source)
    source.receive(other, other.position())
    assert source.confirmed(other) == confirmed
    refused(source, other, LogAhead, event="batch")


def _log_with_another_history(source: Source) -> tuple[ChangeLog, Lsn]:
    """Returns an empty log whose position is above a transaction that its slot still sends, and the position of this
    slot."""
    log = source.log()
    end = source.run("INSERT INTO a VALUES (1, 'x')")
    other = ChangeLog(Layout.of(source.folder / "other"))
    other.create(log.identity, end, 1)
    return other, source.confirmed(log)


def test_slot_behind_the_log_is_moved_to_its_end_although_the_source_is_idle(source: Source) -> None:
    """The last confirmation was lost, and no transaction follows. The log is compared with what the server sends again,
    and its end is then confirmed before the next regular status update."""
    log = source.log()
    with source.slot_set_back(log):
        source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    assert source.confirmed(log) < log.position()
    receiver = source.receiver(log)
    until_event(receiver, "started")
    eventually(lambda: source.confirmed(log) == log.position(), Limits(0, 0).status_seconds)
    receiver.stop()


def test_slot_recreated_under_the_same_name_is_refused(source: Source) -> None:
    log = source.log()
    slot = log.identity.slot
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    source.conn.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    source.run("INSERT INTO a VALUES (2, 'in no slot')")
    source.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    source.run("INSERT INTO a VALUES (3, 'in the new slot')")
    told = refused(source, log, SlotAhead)
    assert str(log.position()) in told


def test_slot_of_the_same_name_in_another_database_is_refused(own: EmbeddedServer, source: Source) -> None:
    """Slot names belong to the cluster. Here, the log's slot was dropped, and then a slot of the same name was created
    in another database."""
    log = source.log()
    slot = log.identity.slot
    source.conn.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    with fresh_database(own) as other, other.connect() as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        told = refused(source, log, IdentityMismatch)
        assert other.name in told
        assert source.database.name in told


def test_slot_invalidated_by_max_slot_wal_keep_size_is_refused(source: Source) -> None:
    log = source.log()
    source.receive(log, source.run("INSERT INTO a VALUES (1, 'x')"))
    source.run("INSERT INTO a VALUES (2, 'lost')", "ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'",
               "SELECT pg_reload_conf()")  # fmt: skip
    try:
        for _ in range(4):
            source.run("SELECT pg_switch_wal(), pg_current_xact_id()", "CHECKPOINT")
    finally:
        source.run("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")
    assert source.slot_row(log, "wal_status") == "lost"
    told = refused(source, log, SlotLost)
    assert log.identity.slot in told
    assert "copies all tables again" in told
