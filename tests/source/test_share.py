"""A snapshot whose LSN comes from a lock: whom it keeps waiting, whom it gives way to, and where it cannot be had."""

from __future__ import annotations

import secrets
import threading
import time

import psycopg
import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, SourceNotReady
from pgcdc_assets.source.connection import connect
from pgcdc_assets.source.positions import flush_lsn, record_end
from pgcdc_assets.source.share import BEGIN, Written, still_point
from pgcdc_assets.source.snapshots import exported_snapshot
from tests.fix_postgres import Database
from tests.source.test_snapshots import T, copied, publish, scalar, wait_for


def taken(database: Database, *, lock_seconds: float = 20) -> list[int]:
    with exported_snapshot(database.conninfo, [T], lock_seconds=lock_seconds, replication=False) as snapshot:
        return [len(copied(database, snapshot, T)), int(snapshot.consistent_point)]


def test_writers_wait_for_a_moment_only(database: Database) -> None:
    """One that has written and stays open keeps the copy waiting, and nobody else: no lock is asked for."""

    def blocked() -> None:
        with pytest.raises(CopyBlocked):
            taken(database, lock_seconds=2.5)

    with database.connect() as conn, database.connect() as open_writer:
        publish(conn)
        open_writer.execute("BEGIN; INSERT INTO t VALUES (1)")
        time.sleep(0.6)
        taker = threading.Thread(target=blocked)
        taker.start()
        slowest, number = 0.0, 10
        while taker.is_alive():
            began = time.monotonic()
            conn.execute("INSERT INTO t VALUES (%s)", [number])
            slowest, number = max(slowest, time.monotonic() - began), number + 1
        assert number > 20
        assert slowest < 0.4


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


def test_no_writer_of_the_source_becomes_the_victim_of_a_deadlock(database: Database) -> None:
    """It has written one table and truncates the other, for which it waits for us, and we for it."""
    with database.connect() as conn, database.connect() as writer:
        publish(conn)
        conn.execute("CREATE TABLE u (i int)")
        names = [T, TableName("public", "u")]
        for _ in range(3):
            writer.execute("BEGIN; INSERT INTO t VALUES (1)")
            with connect(database.conninfo) as holder, connect(database.conninfo) as observer:
                holder.execute(BEGIN)
                holder.execute("LOCK TABLE public.u IN ACCESS SHARE MODE")
                truncating = threading.Thread(target=lambda: writer.execute("TRUNCATE u"))
                truncating.start()
                wait_for(lambda: scalar(conn, "SELECT count(*) FROM pg_locks WHERE NOT granted"))
                with pytest.raises(Written):
                    still_point(holder, observer, names)
            truncating.join(10)
            assert writer.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
            writer.execute("ROLLBACK")


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
            with exported_snapshot(database.conninfo, [T], replication=False) as snapshot:
                assert flush_lsn(conn) >= snapshot.consistent_point
                assert len(copied(database, snapshot, T)) == number + 1


def test_the_point_is_where_a_record_ends(database: Database) -> None:
    """At the ends of pages and of files the insert position stands behind a header, where no flush stands."""
    with database.connect() as conn:
        publish(conn)
        conn.execute("SET synchronous_commit = off")
        headers = 0
        for size in range(0, 8192, 8):
            conn.execute("SELECT pg_logical_emit_message(false, '', repeat('x', %s))", [size])
            end, inserted = record_end(conn), Lsn.parse(str(scalar(conn, "SELECT pg_current_wal_insert_lsn()")))
            headers += end != inserted
            assert end == inserted or (end % 8192 == 0 and inserted - end in (24, 40))
        assert headers
        conn.execute("SELECT pg_switch_wal()")
        assert record_end(conn) % (1 << 20) == 0


def test_who_may_only_read_cannot_copy_so(database: Database) -> None:
    role = f"r_{secrets.token_hex(4)}"
    with database.connect() as conn:
        publish(conn)
        conn.execute(f"CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON t TO {role}".encode())
        try:
            conninfo = f"{database.conninfo} user={role}"
            with (
                pytest.raises(SourceNotReady, match="permission denied"),
                exported_snapshot(conninfo, [T], replication=False),
            ):
                pass
            conn.execute(f"GRANT TRUNCATE ON t TO {role}".encode())
            with exported_snapshot(conninfo, [T], replication=False):
                pass
        finally:
            conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
