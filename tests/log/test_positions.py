"""The positions that the receiver confirms. A receiver must never make the source keep WAL or delay its shutdown."""

from __future__ import annotations

import time

import psutil
import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.receive.batches import Limits
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import Database
from tests.log.conftest import Source, content, eventually, rows, until_event
from tests.servers import new_server

_FOREIGN = "INSERT INTO foreign_table SELECT g, repeat('x', 500) FROM generate_series(1, 40000) g"
"""About 22 MB of WAL."""


@pytest.mark.long
def test_receiver_does_not_import_pandas(source: Source) -> None:
    """pyarrow imports pandas when it converts a list to an array. That costs each run 0.3 s of CPU time and 60 MB."""
    receiver = source.receiver(source.log())
    until_event(receiver, "started")
    source.run("INSERT INTO a VALUES (1, 'x')")
    until_event(receiver, "batch")
    libraries = [library.path for library in psutil.Process(receiver.pid).memory_maps()]
    assert any("/pyarrow/" in path for path in libraries)
    assert not any("/pandas/" in path for path in libraries)
    receiver.stop()


def test_position_past_foreign_wal_is_recorded_before_it_is_confirmed(source: Source) -> None:
    log = source.log()
    # With streaming, the end of an unpublished transaction would be a boundary, too.
    receiver = source.receiver(log, streaming=False)
    until_event(receiver, "started")
    before = source.lsn()
    source.run(_FOREIGN)
    position = until_event(receiver, "position")[-1].lsn
    assert position - before >= Limits.foreign_wal_bytes // 2
    assert log.position() >= position
    eventually(lambda: source.confirmed(log) >= position)
    assert rows(log, "true") == []
    receiver.stop()


@pytest.mark.long
def test_apply_lsn_that_the_parent_reports_is_sent_to_the_server(source: Source) -> None:
    log = source.log()
    receiver = source.receiver(log)
    until_event(receiver, "started")
    source.run("INSERT INTO a VALUES (1, 'x')")
    end = until_event(receiver, "batch")[-1].lsn
    receiver.report_apply(end)
    source.run("INSERT INTO a VALUES (2, 'x')")
    until_event(receiver, "batch")
    eventually(lambda: source.scalar_lsn(_reported("replay_lsn")) == end)
    receiver.report_apply(log.start)
    source.run("INSERT INTO a VALUES (3, 'x')")
    until_event(receiver, "batch")
    assert source.scalar_lsn(_reported("replay_lsn")) == end
    receiver.stop()


def test_large_transaction_is_spilled_to_files_and_stored_completely(source: Source) -> None:
    log = source.log()
    source.transaction(
        "INSERT INTO a SELECT g, repeat(md5(g::text), 12) FROM generate_series(1, 120000) g",
        "INSERT INTO b SELECT g, g FROM generate_series(1, 1000) g",
        "UPDATE a SET v = 'y' WHERE id <= 1000",
    )
    end = source.run("INSERT INTO a VALUES (0, 'after')")
    receiver = source.receiver(log, batch_bytes=1 << 20)
    receiver.until(end)
    until_event(receiver, "arrived")
    found = rows(log)
    commits = [row["commit_lsn"] for row in found]
    assert len(set(commits)) == 2
    first = min(commits)
    large = [row for row in found if row["commit_lsn"] == first]
    assert [row["tx_ordinal"] for row in large] == list(range(122_001))
    holders = [batch for batch in log.batches(log.start) if batch.start <= first < batch.end]
    # One batch contains both transactions. Its counts include all rows except the two Commits.
    assert [sum(sum(kinds.values()) for kinds in batch.counts.values()) for batch in holders] == [len(large) - 1 + 1]
    assert [batch.others["C"] for batch in holders] == [2]
    assert len({row["xid"] for row in large}) == 1
    assert not list(path_of(log.path / "_spill").iterdir())


def test_source_can_shut_down_while_a_receiver_is_connected(database: Database, source: Source) -> None:
    """A fast shutdown waits until everything that was sent is confirmed. The server's keepalive requests a reply, which
    ends the batch."""
    server = new_server(source.folder / "own", database.server.version)
    with server:
        mine = Database(server, "postgres")
        with mine.connect() as conn:
            own = Source(mine, conn, source.folder / "lake")
            own.run("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE a")
            log = own.log()
            receiver = own.receiver(log, batch_seconds=3600)
            try:
                until_event(receiver, "started")
                end = own.run("INSERT INTO a VALUES (1, 'x')")
                # The relation must be described before the shutdown, because a shutdown ends SQL sessions first.
                eventually(lambda: _written(own) >= end)
                conn.close()
                started = time.monotonic()
                server.stop()
                assert time.monotonic() - started < 10
                assert [row["kind"] for row in rows(log)] == ["I", "C"]
            finally:
                receiver.kill()
        server.start(survive=False)
        with mine.connect() as conn:
            own = Source(mine, conn, source.folder / "lake")
            own.receive(log, own.lsn())
            assert len(content(log)) == 2


def _written(source: Source) -> Lsn:
    return source.scalar_lsn(_reported("write_lsn"))


def _reported(column: str) -> str:
    """A query for a column of pg_stat_replication, in the row of the receiver that holds the slot of this database."""
    return (
        f"SELECT coalesce(max(r.{column}), '0/0') FROM pg_stat_replication r "
        "JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE s.database = current_database()"
    )


def test_locked_table_does_not_delay_the_stream(source: Source, database: Database) -> None:
    """A TRUNCATE, ALTER TABLE or VACUUM FULL holds the lock. The server continues to send, so the slot must advance."""
    log = source.log()
    end = source.run("INSERT INTO a VALUES (1, 'x')")
    with database.connect() as other:
        other.execute("BEGIN; TRUNCATE a")
        source.receive(log, end)
        assert [row["kind"] for row in rows(log)] == ["I", "C"]
        other.execute("ROLLBACK")
