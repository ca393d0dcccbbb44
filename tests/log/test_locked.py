"""When a transaction on a table with a row filter commits, another session holds a lock on the table. The receiver
cannot read the filter from the catalog until the lock is released."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.receive import relationfacts
from tests.log.conftest import SECONDS, Source, eventually, rows
from tests.log.inside import receive_inside
from tests.log.received_twice import Row, Twins, durable, gid, kinds, little_memory, many, prepare, restart

WHOLE: dict[str, Any] = {"streaming": False}
IN_BLOCKS: dict[str, Any] = {"streaming": True}
PREPARED: dict[str, Any] = {"streaming": False, "two_phase": True}
HELD_SECONDS = 3.0
LOCK = "BEGIN; LOCK TABLE rf"
MANY = "I" * 600 + "C"


@pytest.fixture(params=[WHOLE, IN_BLOCKS, PREPARED], ids=["whole", "in blocks", "prepared"])
def twins(source: Source, request: pytest.FixtureRequest) -> Twins:
    return filtered(source, request.param)


def filtered(source: Source, options: dict[str, Any]) -> Twins:
    little_memory(source)
    source.run("CREATE TABLE rf (id int PRIMARY KEY, v text)", "ALTER PUBLICATION p ADD TABLE rf WHERE (id > 0)")
    return Twins.of(source, **options)


@contextmanager
def locked_at_a_commit(twins: Twins) -> Iterator[psycopg.Connection[Any]]:
    """Commits a transaction on the filtered table while another session waits for a lock on the table. The commit gives
    the lock to that session. Yields the session, which holds the lock until the test commits."""
    source = twins.source
    with source.database.connect() as writer, source.database.connect() as locker:
        writer.execute(("BEGIN; " + many(1, 600, "rf")).encode())
        twins.catch_up()
        commit = "COMMIT"
        if "two_phase" in twins.streamed.options:
            writer.execute(f"PREPARE TRANSACTION '{gid(source)}'".encode())
            commit = f"COMMIT PREPARED '{gid(source)}'"
        queued = threading.Thread(target=locker.execute, args=(LOCK,), daemon=True)
        queued.start()
        eventually(lambda: queues(source, locker.info.backend_pid))
        before = source.run("INSERT INTO a VALUES (-1, 'before')")
        # The receiver reads the catalog once for all relations that arrive together. If the small transaction on ``a``
        # arrived together with the filtered table, its catalog read would wait for the lock, too. So the receiver must
        # have the small transaction before the commit of the large transaction.
        eventually(lambda: written(twins) >= before)
        writer.execute(commit.encode())
        queued.join(SECONDS)
        yield locker


def queues(source: Source, pid: int) -> bool:
    query = "SELECT FROM pg_locks WHERE pid = %s AND NOT granted"
    return source.conn.execute(query, [pid]).fetchone() is not None


def finish(twins: Twins) -> list[Row]:
    twins.streamed.arrive(twins.flushed())
    return twins.check(facts=True)


def replicated(twins: Twins, column: str) -> str:
    """The value of a column in the receiver's row of pg_stat_replication."""
    query = f"""SELECT r.{column}::text FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid
                WHERE s.slot_name = %s"""
    ((value,),) = twins.source.conn.execute(query.encode(), [twins.streamed.log.identity.slot]).fetchall()
    return str(value)


def written(twins: Twins) -> Lsn:
    return Lsn.parse(replicated(twins, "write_lsn"))


@pytest.mark.long
def test_receiver_waits_until_the_lock_on_a_filtered_table_is_released(twins: Twins) -> None:
    """While the receiver waits, earlier transactions become durable, and the receiver answers the server."""
    source, log = twins.source, twins.streamed.log
    twins.start(batch_seconds=2.0)
    with locked_at_a_commit(twins) as locker:
        commit = source.lsn()
        source.run("INSERT INTO a VALUES (-2, 'after')")
        end, heard = time.monotonic() + HELD_SECONDS, set()
        while time.monotonic() < end:
            heard.add(replicated(twins, "reply_time"))
            time.sleep(0.05)
        assert kinds(twins.streamed.reading.rows()) == "IC"
        assert log.start < source.confirmed(log) <= log.position() < commit
        assert len(heard) > 3
        locker.execute("COMMIT")
    assert kinds(finish(twins)) == "IC" + MANY + "IC"


def test_receiver_logs_which_session_holds_the_lock(
    source: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relationfacts, "TELL_SECONDS", 0.2)
    log = filtered(source, WHOLE).streamed.log
    goal = source.run("INSERT INTO rf VALUES (1, 'x')")
    with source.database.connect() as locker:
        locker.execute(LOCK)
        ended = threading.Timer(HELD_SECONDS, locker.execute, ["COMMIT"])
        ended.start()
        receive_inside(source, log, goal, lambda lsn: None)
        ended.join()
        told = [record.getMessage() for record in caplog.records if "waiting for the source" in record.getMessage()]
        assert 1 <= len(told) < 6
        assert f"pid {locker.info.backend_pid}" in told[0]
    assert len(rows(log)) == 2


@pytest.mark.long
def test_receiver_leaves_the_lock_queue_between_two_catalog_reads(source: Source) -> None:
    """If the receiver stayed in the queue, every session that uses the table would wait behind it."""
    twins = filtered(source, WHOLE)
    twins.start()
    with locked_at_a_commit(twins) as locker:
        eventually(lambda: len(rows(twins.streamed.log)) == 2)
        query = """SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                   WHERE l.relation = 'rf'::regclass AND a.application_name LIKE '%/catalog'"""
        seen = []
        for _ in range(60):
            seen.append(source.conn.execute(query).fetchone() is not None)
            time.sleep(0.05)
        locker.execute("COMMIT")
    assert 0 < sum(seen) < 0.6 * len(seen)


@pytest.mark.long
@pytest.mark.parametrize("streaming", [False, True])
def test_prepared_transaction_that_locks_a_table_delays_no_transaction_on_other_tables(
    source: Source, streaming: bool
) -> None:
    """The prepared transaction truncates the filtered table, so it holds a lock on the table until it ends, perhaps for
    days. During that time, the receiver must store transactions on other tables."""
    twins = filtered(source, {"streaming": streaming, "two_phase": True})
    twins.start()
    durable(twins, source.run("INSERT INTO rf VALUES (-5, 'not sent'), (5, 'told')"))
    prepare(source, "INSERT INTO a VALUES (1, 'x')", "TRUNCATE rf", many(100, 600, "rf"))
    durable(twins, source.run("INSERT INTO a VALUES (2, 'beside')", "INSERT INTO b VALUES (1, 1)"))
    restart(twins)
    durable(twins, source.run("INSERT INTO a VALUES (3, 'beside')", many(1000, 600)))
    expected = "IC" + "IC" + "IC" + "IC" + MANY
    assert kinds(twins.streamed.reading.rows()) == expected
    source.run(f"COMMIT PREPARED '{gid(source)}'", "INSERT INTO rf VALUES (6, 'after')")
    assert kinds(finish(twins)) == expected + "IT" + MANY + "IC"
