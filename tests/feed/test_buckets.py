"""How a table's changes are divided by key into buckets. The numbers of rows and bytes in the log's files decide how
many buckets there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.feed import transform
from pgcdc_assets.log.batch import BatchWriter, PendingFrames
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import OWN_FILE_BYTES
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.protocol.messages import Update
from tests.log.streams import START, WHO, begin, commit, frame, insert, run_of, writer_of
from tests.protocol import wire

LARGE, SMALL = 1, 2
VALUE = "x" * 100_000
"""This value is large in memory and tiny in compressed files. The number of buckets must depend on the size in
memory."""


@pytest.fixture
def log(tmp_path: Path) -> ChangeLog:
    log = ChangeLog(Layout.of(tmp_path))
    log.create(WHO, START, 1)
    return log


def update(relation: int, text: str) -> bytes:
    return wire.message(Update(relation, None, None, (text,)))


def write(writer: BatchWriter, changes: Sequence[bytes]) -> Lsn:
    at, frames = int(writer.position), PendingFrames()
    payloads = [begin(at, 5), *changes, commit(at, at + 50)]
    frames.append(run_of([frame(payload, at) for payload in payloads], 0))
    return writer.commit(frames, [], Lsn(at + 50)).end


def buckets(log: ChangeLog, end: Lsn, *relations: int, again: bool = False) -> int:
    span = LogSpan(log, LsnRange(START, end))
    return transform._buckets(span, frozenset(relations), transform._sizes(span, span.segments()), again=again)


def test_changes_with_large_values_are_divided_into_buckets_by_size_in_memory(
    log: ChangeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes of another table in the same log, which has small rows, are not divided."""
    monkeypatch.setattr(transform, "BUCKET_BYTES", OWN_FILE_BYTES)
    writer, _ = writer_of(log)
    for _ in range(4):
        end = write(writer, [*[update(LARGE, VALUE)] * 60, *[update(SMALL, "x")] * 60])
    values = 4 * 60 * len(VALUE)
    assert buckets(log, end, LARGE) == -(-values // OWN_FILE_BYTES) == 6
    assert buckets(log, end, SMALL) == 1
    assert buckets(log, end, 77) == 1, "a table without rows has one bucket"


def test_there_are_at_most_as_many_buckets_as_rows(log: ChangeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform, "BUCKET_BYTES", 1000)
    writer, _ = writer_of(log)
    end = write(writer, [update(LARGE, VALUE * 50)] * 2)
    assert buckets(log, end, LARGE) == 2


def test_small_turns_read_no_parquet_footers_and_inserts_are_not_divided(
    log: ChangeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = writer_of(log)
    end = write(writer, [insert(LARGE, VALUE.encode())] * 60)
    span = LogSpan(log, LsnRange(START, end))
    assert transform._sizes(span, span.segments()) == []
    monkeypatch.setattr(transform, "BUCKET_BYTES", 1000)
    assert buckets(log, end, LARGE) == 1
    assert buckets(log, end, LARGE, again=True) == 60, "a repair merges inserts, so they are divided"
