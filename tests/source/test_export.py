"""Exported snapshots: which rows they contain, what pgcdc waits for before a copy, and which locks it holds."""

from __future__ import annotations

import secrets
import threading
import time

import psycopg
import pytest

from pgcdc_assets.errors import CopyBlocked, CopyOutdated, SourceUnavailable
from pgcdc_assets.source.snapshot import reading
from pgcdc_assets.source.snapshot.export import _Xids, exported_snapshot
from tests.fix_postgres import Database, fresh_database
from tests.source.storm import T, copied, cut, publish, read, scalar
from tests.waiting import wait_for


def test_snapshot_and_stream_meet_at_the_consistent_point(database: Database) -> None:
    """Concurrent writers commit during the export. The snapshot has exactly the rows of transactions below the
    consistent point."""
    stop = threading.Event()
    slot = f"s_{secrets.token_hex(5)}"

    def write(start: int) -> None:
        with database.connect() as conn:
            i = start
            while not stop.is_set():
                conn.execute("INSERT INTO t VALUES (%s, 'w')", [i])
                i += 3

    with database.connect() as conn:
        publish(conn)
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        writers = [threading.Thread(target=write, args=(start,)) for start in (1, 2, 3)]
        for writer in writers:
            writer.start()
        try:
            wait_for(lambda: int(str(scalar(conn, "SELECT count(*) FROM t"))) > 100)
            with exported_snapshot(database.conninfo) as snapshot:
                point = snapshot.consistent_point
                rows = {int(line.split(b",")[0].strip(b'"')) for line in copied(database, snapshot, T)}
        finally:
            stop.set()
            for writer in writers:
                writer.join()
        before, after = _streamed(conn, slot, int(point))
        assert before == rows
        assert after
        assert not after & rows


def _streamed(conn: psycopg.Connection, slot: str, point: int) -> tuple[set[int], set[int]]:
    """Keys inserted by transactions whose commit record starts below the LSN ``point``, and all other keys."""
    found: tuple[set[int], set[int]] = (set(), set())
    commit = 0
    query = (
        "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
        " 'publication_names', 'p')"
    )
    for (data,) in conn.execute(query, [slot]):
        if data[:1] == b"B":
            commit = int.from_bytes(data[1:9], "big")
        elif data[:1] == b"I":
            size = int.from_bytes(data[9:13], "big")
            found[commit >= point].add(int(data[13 : 13 + size]))
    return found


def test_a_snapshot_that_waits_too_long_for_an_open_transaction_fails_and_names_it(database: Database) -> None:
    gid = f"g_{secrets.token_hex(4)}"
    with database.connect() as conn, database.connect(application_name="the writer") as writer:
        publish(conn)
        writer.execute("BEGIN; INSERT INTO t VALUES (1)")
        with (
            pytest.raises(CopyBlocked, match="the writer") as caught,
            exported_snapshot(database.conninfo, lock_seconds=0.8),
        ):
            pass
        assert str(writer.info.backend_pid) in caught.value.what
        assert caught.value.retryable
        writer.execute("ROLLBACK")
        conn.execute("BEGIN; INSERT INTO t VALUES (2)")
        conn.execute(f"PREPARE TRANSACTION '{gid}'".encode())
        with (
            pytest.raises(CopyBlocked, match=gid),
            exported_snapshot(database.conninfo, lock_seconds=0.8),
        ):
            pass
        conn.execute(f"COMMIT PREPARED '{gid}'".encode())
        left = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        wait_for(lambda: scalar(conn, left) == 0)


def test_the_error_of_a_copy_names_the_locked_table_and_the_locking_session(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PATIENCE_SECONDS", 0.3)
    with database.connect() as conn, database.connect() as locker:
        publish(conn)
        with exported_snapshot(database.conninfo) as snapshot:
            (piece,) = cut(snapshot)
            locker.execute("BEGIN; LOCK TABLE t")
            with pytest.raises(CopyBlocked, match=f"pid {locker.info.backend_pid}") as caught:
                read(database, snapshot, piece)
            assert "public.t" in str(caught.value)


READABLE_AFTER = [
    "ALTER TABLE t ADD COLUMN n int DEFAULT 5",
    "ALTER TABLE t RENAME TO renamed",
    "CREATE SCHEMA s; ALTER TABLE t SET SCHEMA s",
    "ALTER SCHEMA public RENAME TO s; CREATE SCHEMA public; CREATE TABLE public.t (i int, x text)",
    "ALTER TABLE t RENAME TO u; CREATE TABLE t (i int, x text)",
    "INSERT INTO t VALUES (2); CREATE INDEX ON t (x); VACUUM t",
]
NOT_READABLE_AFTER = [
    "TRUNCATE t",
    "ALTER TABLE t ALTER i TYPE bigint",
    "ALTER TABLE t ALTER x TYPE varchar(9)",
    "DROP TABLE t",
    "DROP TABLE t; CREATE TABLE t (i int PRIMARY KEY, x text)",
    "ALTER TABLE t DROP x",
    "ALTER TABLE t RENAME x TO z; ALTER TABLE t RENAME y TO x; ALTER TABLE t RENAME z TO y",
]
"""DDL after which a copy must fail. After the last DDL, a copy by column name would put each column's values into the
other column."""


@pytest.mark.parametrize("ddl", READABLE_AFTER + NOT_READABLE_AFTER)
def test_a_copy_after_ddl_equals_the_snapshot_or_fails(database: Database, ddl: str) -> None:
    """pgcdc checks that the table is as the snapshot shows it. Without this check, COPY would return no rows, rows of a
    different table, or values of a different column, without an error."""
    with database.connect() as conn:
        publish(conn, "i int PRIMARY KEY, x text, y text")
        conn.execute("INSERT INTO t VALUES (1, 'x', 'y')")
        with exported_snapshot(database.conninfo) as snapshot:
            (piece,) = cut(snapshot)
            conn.execute("SET lock_timeout = 100")
            for statement in ddl.split("; "):
                conn.execute(statement.encode())
            if ddl in READABLE_AFTER:
                assert read(database, snapshot, piece) == [b'"1","x","y"\n']
                return
            with pytest.raises(CopyOutdated) as caught:
                read(database, snapshot, piece)
            assert caught.value.retryable


def test_a_truncate_gets_its_lock_at_once_while_slot_creation_waits_for_transactions(database: Database) -> None:
    """Slot creation may also wait for the transaction of the TRUNCATE. If pgcdc held a lock on the table at that time,
    the TRUNCATE would wait for pgcdc, and both would wait for ever."""
    result: list[int] = []

    def take() -> None:
        with exported_snapshot(database.conninfo) as snapshot:
            result.extend([len(copied(database, snapshot, T))])

    with database.connect() as conn, database.connect() as blocker, database.connect() as truncating:
        publish(conn)
        conn.execute("INSERT INTO t VALUES (1)")
        blocker.execute("BEGIN; SELECT pg_current_xact_id()")
        taker = threading.Thread(target=take)
        taker.start()
        creating = "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()"
        wait_for(lambda: scalar(conn, creating))
        truncating.execute("SET lock_timeout = 100")
        truncating.execute("TRUNCATE t")
        blocker.execute("COMMIT")
        taker.join(30)
        assert result == [0]


def test_a_column_with_a_default_added_between_snapshot_and_copy_is_not_in_the_copy(database: Database) -> None:
    """ADD COLUMN with a default rewrites no row and sends no message, but queries then show the default in older rows.
    The copy must equal the snapshot, which does not have the column."""
    with database.connect() as conn:
        publish(conn)
        conn.execute("INSERT INTO t VALUES (1, 'x')")
        with exported_snapshot(database.conninfo) as snapshot:
            (piece,) = cut(snapshot)
            conn.execute("ALTER TABLE t ADD COLUMN n int DEFAULT 5")
            assert b"".join(read(database, snapshot, piece)) == b'"1","x"\n'


def test_the_session_that_holds_the_snapshot_survives_the_timeouts_of_idle_sessions(database: Database) -> None:
    """The source is configured to end idle sessions, inside and outside of transactions. The session that holds the
    snapshot is idle during a copy."""
    names = ["idle_in_transaction_session_timeout", "idle_session_timeout", "statement_timeout"]
    with database.connect() as conn:
        if conn.info.server_version >= 170000:
            names.append("transaction_timeout")
        for name in names:
            conn.execute(f"ALTER DATABASE {database.name} SET {name} = '400ms'".encode())
        publish(conn)
        conn.execute("INSERT INTO t VALUES (1)")
    # The source ends an ordinary session, which shows that the timeouts are in effect.
    with database.connect(autocommit=False) as careless:
        careless.execute("SELECT 1")
        wait_for(lambda: _ended(careless))
    with exported_snapshot(database.conninfo) as snapshot:
        time.sleep(1.2)
        snapshot.holder.execute("SELECT 1")
        assert len(copied(database, snapshot, T)) == 1


def _ended(conn: psycopg.Connection) -> bool:
    try:
        conn.execute("SELECT 1")
    except psycopg.Error:
        return True
    time.sleep(0.6)
    return False


def test_the_error_of_an_export_names_a_prepared_transaction_of_another_database(database: Database) -> None:
    """Slot creation waits for transactions of all databases. The transaction in the other database would not be found
    by a query for transactions of our own database."""
    gid = f"g_{secrets.token_hex(4)}"
    with fresh_database(database.server) as other, other.connect() as elsewhere, database.connect() as conn:
        publish(conn)
        elsewhere.execute("BEGIN; SELECT pg_current_xact_id()")
        elsewhere.execute(f"PREPARE TRANSACTION '{gid}'".encode())
        started = time.monotonic()
        with pytest.raises(CopyBlocked, match=gid) as caught, exported_snapshot(database.conninfo, lock_seconds=1):
            pass
        assert time.monotonic() - started < 15
        assert other.name in str(caught.value)
        elsewhere.execute(f"ROLLBACK PREPARED '{gid}'".encode())
        with exported_snapshot(database.conninfo, lock_seconds=10):
            pass


def test_the_end_of_the_session_that_holds_the_snapshot_is_an_error(database: Database) -> None:
    with database.connect() as conn:
        publish(conn)
        with pytest.raises(SourceUnavailable, match="held"), exported_snapshot(database.conninfo) as snapshot:  # noqa: PT012
            conn.execute("SELECT pg_terminate_backend(%s, 5000)", [snapshot.holder.info.backend_pid])
            with pytest.raises(SourceUnavailable):
                snapshot.holder.execute("SELECT 1")
            with pytest.raises(SourceUnavailable, match="the snapshot is gone"), snapshot.reading():
                pass


def test_a_copy_starts_when_a_new_snapshot_shows_at_least_the_same_transactions_as_ended() -> None:
    """A copy waits until each transaction that the slot's snapshot shows as ended has also ended according to a new
    snapshot."""
    ours = _Xids.parse("10:20:12,15")
    assert ours.agrees(_Xids.parse("12:20:12"))
    assert ours.agrees(_Xids.parse("21:25:21,22"))
    assert not ours.agrees(_Xids.parse("10:19:12")), "the second snapshot is older than the first"
    assert not ours.agrees(_Xids.parse("10:20:12,13,15")), "13 has ended only in the first snapshot"
    assert ours.agrees(_Xids.parse("20:20:"))


def test_a_copy_waits_until_a_commit_in_the_wal_is_visible(database: Database) -> None:
    """A commit that waits for a synchronous standby is in the WAL, but not yet visible to new snapshots. The copy waits
    until it is visible.

    The test commits so late that slot creation does not wait for this transaction. On servers without PostgreSQL's fix
    of 2026, the slot's snapshot then shows the transaction as committed, although other sessions do not see its rows.
    """
    with database.connect() as conn, database.connect() as first, database.connect() as second:
        publish(conn)
        conn.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        conn.execute("SELECT pg_reload_conf()")
        entered = threading.Event()
        counted: list[int] = []

        def take() -> None:
            with exported_snapshot(database.conninfo) as snapshot:
                entered.set()
                counted.append(len(copied(database, snapshot, T)))

        writer = database.connect()
        creating = "SELECT count(*) FROM pg_stat_activity WHERE {} = ANY(pg_blocking_pids(pid))"
        try:
            wait_for(lambda: scalar(conn, "SHOW synchronous_standby_names") == "nobody")
            for session in (first, second):
                session.execute("SET synchronous_commit = local")
            first.execute("BEGIN; SELECT pg_current_xact_id()")
            taking = threading.Thread(target=take)
            taking.start()
            wait_for(lambda: scalar(conn, creating.format(first.info.backend_pid)))
            second.execute("BEGIN; SELECT pg_current_xact_id()")
            first.execute("COMMIT")
            wait_for(lambda: scalar(conn, creating.format(second.info.backend_pid)))
            writing = threading.Thread(target=lambda: writer.execute("INSERT INTO t VALUES (1)"))
            writing.start()
            wait_for(lambda: scalar(conn, "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'") == 1)
            second.execute("COMMIT")
            assert not entered.wait(1.5)
        finally:
            conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
            conn.execute("SELECT pg_reload_conf()")
        writing.join(20)
        taking.join(20)
        writer.close()
        assert counted == [1]
