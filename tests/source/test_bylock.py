"""A snapshot whose LSN comes from a lock: whom it keeps waiting, whom it gives way to, and where it cannot be had."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, SourceNotReady
from pgcdc_assets.source.connect.connection import SourceConnection, connect
from pgcdc_assets.source.positions import RECORD_END, flush_lsn
from pgcdc_assets.source.snapshot import bylock
from pgcdc_assets.source.snapshot.export import exported_snapshot
from tests.fix_postgres import Database
from tests.source.test_export import T, copied, publish, scalar, wait_for


def taken(database: Database, *, lock_seconds: float = 20) -> list[int]:
    with exported_snapshot(
        database.conninfo, [T], lock_seconds=lock_seconds, replication_connections=False
    ) as snapshot:
        return [len(copied(database, snapshot, T)), int(snapshot.consistent_point)]


def test_a_writer_that_stays_open_is_in_nobody_s_way_but_ours(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock is asked for, behind which other writers would stand in line."""
    asked: list[Sequence[TableName]] = []
    locked = bylock._locked

    def noted(holder: SourceConnection, names: Sequence[TableName]) -> tuple[Lsn, list[int]]:
        asked.append(names)
        return locked(holder, names)

    monkeypatch.setattr(bylock, "_locked", noted)
    with database.connect() as conn, database.connect() as open_writer:
        publish(conn)
        open_writer.execute("BEGIN; INSERT INTO t VALUES (1)")
        with pytest.raises(CopyBlocked):
            taken(database, lock_seconds=1.5)
        assert not asked
        open_writer.execute("COMMIT")
        taken(database)
        assert asked


def test_the_snapshot_is_had_between_two_writers(database: Database) -> None:
    with database.connect() as conn, database.connect() as writer:
        publish(conn)
        writer.execute("BEGIN; INSERT INTO t VALUES (1)")
        rows: list[int] = []
        taker = threading.Thread(target=lambda: rows.extend(taken(database)))
        taker.start()
        time.sleep(1.5)
        assert not rows
        writer.execute("COMMIT")
        taker.join(20)
        assert rows[0] == 1


@pytest.mark.parametrize("order", [("t", "u"), ("u", "t")])
def test_no_writer_of_the_source_becomes_the_victim_of_a_deadlock(
    database: Database, order: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has written ``u`` and waits for the other's row; the other goes on to write ``t``.

    We would wait for longer than it takes PostgreSQL to look for deadlocks, and it would end one of us three.
    """
    monkeypatch.setattr(bylock, "WAIT_SECONDS", 3)
    names = [TableName("public", name) for name in order]
    with (
        ThreadPoolExecutor() as threads,
        database.connect() as conn,
        database.connect() as one,
        connect(database.conninfo) as holder,
        database.connect() as other,
    ):
        publish(conn)
        conn.execute("CREATE TABLE u (i int); CREATE TABLE r (i int); INSERT INTO r VALUES (1)")
        one.execute("BEGIN; INSERT INTO u VALUES (1)")
        other.execute("BEGIN; UPDATE r SET i = 2")
        waiting = threads.submit(one.execute, "UPDATE r SET i = 3")
        wait_for(lambda: waits_for_lock(conn, one))
        locking = threads.submit(_refused, holder, names)
        wait_for(lambda: locking.done() or waits_for_lock(conn, holder))
        other.execute("INSERT INTO t VALUES (1)")
        locking.result(20)
        assert not waiting.done(), "nobody ended it"
        other.execute("COMMIT")
        waiting.result(20)
        assert one.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        one.execute("COMMIT")
        assert conn.execute("SELECT i FROM r").fetchall() == [(3,)]


def waits_for_lock(conn: psycopg.Connection, waiter: psycopg.Connection) -> bool:
    return bool(scalar(conn, f"SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = {waiter.info.backend_pid}"))


def test_a_writer_that_has_just_come_is_not_passed_over(database: Database) -> None:
    """Nobody was seen to write, and somebody has before the lock is asked for."""
    with database.connect() as conn, database.connect() as writer, connect(database.conninfo) as holder:
        publish(conn)
        writer.execute("BEGIN; INSERT INTO t VALUES (1)")
        _refused(holder, [T])


def _refused(holder: SourceConnection, names: Sequence[TableName]) -> None:
    with pytest.raises(psycopg.errors.LockNotAvailable):
        bylock._locked(holder, names)


def test_we_may_fall_asleep_at_any_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two messages to the server: no lock on the table is held or asked for then."""
    execute = SourceConnection.execute
    held: list[list[str]] = []

    with database.connect() as conn:
        publish(conn)

        def watched(source: SourceConnection, *given: Any, **more: Any) -> Any:
            held.append(locks())
            result = execute(source, *given, **more)
            held.append(locks())
            return result

        def locks() -> list[str]:
            """Of sessions, and not of an autovacuum that has come by."""
            query = """SELECT mode FROM pg_locks JOIN pg_stat_activity USING (pid)
                       WHERE relation = 't'::regclass AND backend_type = 'client backend'"""
            return [mode for (mode,) in conn.execute(query).fetchall()]

        monkeypatch.setattr(SourceConnection, "execute", watched)
        with exported_snapshot(database.conninfo, [T], replication_connections=False):
            pass
        assert held
        assert not [modes for modes in held if modes]


def test_two_tables_that_are_always_written_are_copied(database: Database) -> None:
    stop = threading.Event()

    def write(table: str) -> None:
        with database.connect() as conn:
            number = 0
            while not stop.is_set():
                conn.execute(f"INSERT INTO {table} VALUES ({(number := number + 1)})".encode())

    with database.connect() as conn:
        publish(conn)
        conn.execute("CREATE TABLE u (i int)")
        writers = [threading.Thread(target=write, args=(table,)) for table in ("t", "u")]
        for writer in writers:
            writer.start()
        try:
            names = [T, TableName("public", "u")]
            with exported_snapshot(
                database.conninfo, names, lock_seconds=60, replication_connections=False
            ) as snapshot:
                assert snapshot.consistent_point
        finally:
            stop.set()
            for writer in writers:
                writer.join()


def test_a_partition_s_writer_is_waited_for(database: Database) -> None:
    with database.connect() as conn, database.connect(application_name="the writer") as writer:
        conn.execute("CREATE TABLE t (i int PRIMARY KEY) PARTITION BY RANGE (i)")
        conn.execute("CREATE TABLE leaf PARTITION OF t FOR VALUES FROM (0) TO (10)")
        writer.execute("BEGIN; INSERT INTO leaf VALUES (1)")
        with pytest.raises(CopyBlocked, match="the writer"):
            taken(database, lock_seconds=0.5)


def test_what_is_seen_is_durable(database: Database) -> None:
    """An asynchronous commit is seen before it is flushed."""
    with database.connect() as conn:
        publish(conn)
        conn.execute("SET synchronous_commit = off")
        for number in range(5):
            conn.execute("INSERT INTO t VALUES (%s)", [number])
            with exported_snapshot(database.conninfo, [T], replication_connections=False) as snapshot:
                assert flush_lsn(conn) >= snapshot.consistent_point
                assert len(copied(database, snapshot, T)) == number + 1


def test_the_point_is_where_a_record_ends(database: Database) -> None:
    """At the ends of pages and of files the insert position stands behind a header, where no flush stands."""
    with database.connect() as conn:
        publish(conn)
        # Some milliseconds each: an autovacuum that writes beside it takes longer than fifty of them.
        for _ in range(3000):
            before = Lsn.parse(str(scalar(conn, RECORD_END)))
            bare = Lsn.parse(str(scalar(conn, "SELECT pg_logical_emit_message(false, '', '')"))) - before
            # One that fills the page to its end, if nobody writes meanwhile and it does not end too near.
            room = (-(before + bare)) % 8192 - bare
            if room < 0:
                continue
            conn.execute("SELECT pg_logical_emit_message(false, '', repeat('x', %s))", [room])
            end = Lsn.parse(str(scalar(conn, RECORD_END)))
            inserted = Lsn.parse(str(scalar(conn, "SELECT pg_current_wal_insert_lsn()")))
            assert end == inserted or (end % 8192 == 0 and inserted - end in (24, 40))
            if end != inserted:
                break
        else:
            raise AssertionError("no record ended with its page")
        conn.execute("SELECT pg_switch_wal()")
        assert Lsn.parse(str(scalar(conn, RECORD_END))) % (1 << 20) == 0


def test_who_may_only_read_cannot_copy_so(database: Database) -> None:
    role = f"r_{secrets.token_hex(4)}"
    with database.connect() as conn:
        publish(conn)
        conn.execute(f"CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON t TO {role}".encode())
        try:
            conninfo = f"{database.conninfo} user={role}"
            with (
                pytest.raises(SourceNotReady, match="permission denied"),
                exported_snapshot(conninfo, [T], replication_connections=False),
            ):
                pass
            conn.execute(f"GRANT TRUNCATE ON t TO {role}".encode())
            with exported_snapshot(conninfo, [T], replication_connections=False):
                pass
        finally:
            conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
