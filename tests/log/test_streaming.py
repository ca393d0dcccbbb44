"""Transactions that are received while they are in progress leave the log that whole ones leave."""

from __future__ import annotations

from typing import Any

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import read_rows
from tests.log.conftest import SECONDS, Source, until_event
from tests.log.test_stream_abort import little_memory

MANY = "INSERT INTO a SELECT n, repeat('x', 200) FROM generate_series({first}, {last}) n"


def content(log: ChangeLog) -> list[tuple[Any, ...]]:
    """The rows that count, transaction by transaction; places within one may have holes."""
    found = []
    for segment in log.all_segments():
        rows = read_rows(segment.file).to_pylist()
        found += [row for row in rows if row["kind"] not in "#=RY"]
    found.sort(key=lambda row: (row["commit_lsn"] or row["lsn"], row["tx_ordinal"] or 0, row["relation_id"] or 0))
    names = ("commit_lsn", "xid", "commit_ts", "origin", "lsn", "kind", "relation_id", "schema_id", "payload")
    return [tuple(row[name] for name in names) for row in found]


def streamed(log: ChangeLog) -> int:
    """Files that were written before their transaction ended."""
    return sum(segment.late is not None for segment in log.all_segments())


def received(source: Source, log: ChangeLog, end: Lsn, *, streaming: bool = True) -> None:
    receiver = source.receiver(log, drain_bytes=1 << 40, streaming=streaming)
    receiver.until(end)
    until_event(receiver, "arrived")
    receiver.join(SECONDS)


@pytest.mark.timeout(120)
def test_blocks_leave_what_whole_transactions_leave(source: Source) -> None:
    little_memory(source)
    log, whole = source.log(), source.log("whole")
    receiver = source.receiver(log, drain_bytes=1 << 40, segment_bytes=1 << 16)
    until_event(receiver, "started")
    with source.database.connect() as other:
        for statement in ("BEGIN", MANY.format(first=1, last=5000), "SAVEPOINT s", MANY.format(first=6000, last=9000)):
            other.execute(statement.encode())
        source.run("INSERT INTO a VALUES (-1, 'between')")
        for statement in ("ROLLBACK TO s", MANY.format(first=10000, last=12000), "TRUNCATE b", "COMMIT"):
            other.execute(statement.encode())
    end = source.run("INSERT INTO a VALUES (-2, 'after')")
    receiver.until(end)
    until_event(receiver, "arrived")
    receiver.join(SECONDS)
    received(source, whole, end, streaming=False)
    assert streamed(log) > 0
    assert streamed(whole) == 0
    assert content(log) == content(whole)
    log.verify(LsnRange(log.start, log.position()))
