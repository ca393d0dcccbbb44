"""PostgreSQL 18 sends Stream Abort even with protocol version 1. Every way of receiving must skip it."""

from __future__ import annotations

import pytest

from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import Insert
from tests.log.conftest import SECONDS, Source, rows, until_event

SENDS_STREAM_ABORTS = 18
WAYS = ["stream", "drain"]


def many(first: int) -> str:
    """More rows than fit into logical_decoding_work_mem."""
    return f"INSERT INTO a SELECT g, repeat('x', 200) FROM generate_series({first}, {first + 1999}) g"


def one(number: int) -> str:
    return f"INSERT INTO b VALUES ({number}, {number})"


def rolled_back(first: int) -> list[str]:
    """Statements of a rolled-back transaction that exceeds the decoding memory, with two nested subtransactions."""
    return ["BEGIN", one(-1), "SAVEPOINT s", one(-2), "SAVEPOINT t", one(-3), "RELEASE t", "RELEASE s",
            many(first), "ROLLBACK"]  # fmt: skip


def little_memory(source: Source) -> None:
    """Reduces the decoding memory of this connection and of later connections, including walsenders."""
    setting = "SET logical_decoding_work_mem = '64kB'"
    source.run(setting, f"ALTER DATABASE {source.database.name} {setting}")


def stream_aborts(source: Source) -> int:
    """The number of Stream Aborts that the server sends for these transactions, read through a slot at their start."""
    query = """
        SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,
          'proto_version', '1', 'publication_names', 'p') WHERE get_byte(data, 0) = ascii('A')"""
    row = source.conn.execute(query, [source.slot("peeked")]).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_stream_aborts_are_skipped_by_every_way_of_receiving(source: Source, way: str) -> None:
    """Trees of savepoints are rolled back completely and in part: alone, in a row, and among other large
    transactions."""
    little_memory(source)
    log, start = source.log(), source.log("peeked").position()
    source.run(*rolled_back(1), one(1), *rolled_back(1), *rolled_back(1))
    source.run("BEGIN", one(2), "SAVEPOINT s", one(3), "SAVEPOINT t", one(4), "RELEASE t", many(1), "ROLLBACK TO s",
               one(5), "SAVEPOINT u", many(5000), "COMMIT")  # fmt: skip
    with source.database.connect() as other:
        for statement in ("BEGIN", many(10_000), "SAVEPOINT s", one(6), "RELEASE s"):
            other.execute(statement.encode())
        source.run(*rolled_back(1), "BEGIN", "SAVEPOINT s", one(-1), "ROLLBACK TO s", *rolled_back(1)[1:])
        other.execute(one(7).encode())
        other.execute("COMMIT")
    end = source.run(*rolled_back(1), one(8))
    sent = stream_aborts(source)
    assert (sent > 0) == (source.database.server.version >= SENDS_STREAM_ABORTS)

    receiver = source.receiver(log, drain_bytes=1 if way == "drain" else 1 << 40, streaming=False)
    receiver.until(end)
    events = until_event(receiver, "arrived")
    receiver.join(SECONDS)
    assert max(event.stream_aborts for event in events) == sent
    assert events[-1].lsn == log.position() == source.confirmed(log)
    ((b, in_a, in_b),) = source.conn.execute(
        "SELECT 'b'::regclass::oid::int8, (SELECT count(*) FROM a), (SELECT count(*) FROM b)"
    ).fetchall()
    assert {row["kind"] for row in rows(log)} == {"I", "C"}
    inserted = rows(log, "kind = 'I'")
    assert len(inserted) == in_a + in_b
    messages = [decode(row["payload"]) for row in inserted if row["relation_id"] == b]
    assert [message.new[0] for message in messages if isinstance(message, Insert)] == ["1", "2", "5", "6", "7", "8"]
    assert sum(batch.transactions for batch in log.verify(LsnRange(start, log.position()))) == 4
