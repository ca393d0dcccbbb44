"""The rows computed with vectorised code are compared with a sequential scan of the same stream, for any division of
the stream into parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.layout import Location
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.batch import PendingBatch, PendingFrames
from pgcdc_assets.log.framerun import joined
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.rows import Rows, rows_of, tally_of
from pgcdc_assets.log.segment import FILLED_SCHEMA, check_content, clustered, table_of, write_segment
from pgcdc_assets.log.streamed import StreamPlace, located
from pgcdc_assets.log.transactions import OpenTransaction, transaction_after
from pgcdc_assets.store.scratch import DraftFile
from tests.log.streams import TRANSACTIONS, Stream, begin, build, commit, frame, insert, origin, run_of, stream_abort


def _rows_in_parts(stream: Stream, cuts: list[int], relations: Relations) -> list[Rows]:
    """Cuts the stream at any frames. Each part is assembled alone, from the state at the start of the part."""
    found: list[Rows] = []
    state: OpenTransaction | None = None
    edges = sorted({0, len(stream.frames), *(cut % (len(stream.frames) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        run = run_of(stream.frames[start:end], start)
        found.append(rows_of(run, state, relations))
        state = transaction_after(run, state)
    return found


def _told(rows: Rows) -> list[tuple[Any, ...]]:
    table = table_of(rows).cast(FILLED_SCHEMA)
    names = ("kind", "commit_lsn", "tx_ordinal", "xid", "relation_id", "schema_id", "origin", "payload", "lsn")
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(TRANSACTIONS, st.lists(st.integers(0, 100), max_size=4))
def test_rows_equal_the_rows_of_a_sequential_scan_for_any_cuts(transactions: list[Any], cuts: list[int]) -> None:
    relations = Relations()
    stream = build(transactions, relations)
    parts = _rows_in_parts(stream, cuts, relations)
    assert [row for part in parts for row in _told(part)] == stream.expected


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(TRANSACTIONS, st.lists(st.integers(0, 100), max_size=4))
def test_joined_frames_equal_the_original_frames(transactions: list[Any], cuts: list[int]) -> None:
    relations = Relations()
    stream = build(transactions, relations)
    edges = sorted({0, len(stream.frames), *(cut % (len(stream.frames) + 1) for cut in cuts)})
    whole = run_of(stream.frames, 0)
    runs = [whole.part(start, end) for start, end in itertools.pairwise(edges)]
    again = joined(runs)
    assert _told(rows_of(again, None, relations)) == stream.expected
    assert again.sequence.tolist() == list(range(len(stream.frames)))


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(TRANSACTIONS)
def test_clustering_keeps_rows_and_order_within_a_relation(transactions: list[Any]) -> None:
    relations = Relations()
    stream = build(transactions, relations)
    rows = rows_of(run_of(stream.frames, 0), None, relations)
    alone, shared = clustered(rows)
    assert alone == []
    assert _told(shared) == sorted(stream.expected, key=lambda row: -1 if row[4] is None else row[4])
    tally = tally_of(rows)
    assert tally.rows == len(stream.expected)
    assert tally.transactions == sum(row[0] == "C" for row in stream.expected)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(TRANSACTIONS)
def test_segment_round_trip(transactions: list[Any]) -> None:
    relations = Relations()
    stream = build(transactions, relations)
    rows = rows_of(run_of(stream.frames, 0), None, relations)
    with TemporaryDirectory() as name:
        folder = Path(name)
        half = np.arange(len(rows) // 2)
        groups = [table_of(rows.take(half)), table_of(rows.take(np.arange(len(half), len(rows))))]
        file = write_segment(DraftFile(str(folder / "draft")), groups).put(Location.of(folder), 1, 1)
        table = pq.read_table(folder / file.path)
        assert file.size == (folder / file.path).stat().st_size
        check_content(Location.of(folder / file.path))
    assert table.schema.equals(FILLED_SCHEMA)
    assert table["payload"].to_pylist() == [row[7] for row in stream.expected]
    stats = json.loads(file.stats)
    assert stats["numRecords"] == file.rows == len(rows)
    commits = [row[1] for row in stream.expected if row[1] is not None]
    assert stats["minValues"].get("commit_lsn") == (min(commits) if commits else None)
    assert stats["maxValues"].get("commit_lsn") == (max(commits) if commits else None)


@pytest.mark.parametrize(
    "payloads",
    [
        [insert(1, b"no transaction")],
        [begin(10, 1), begin(20, 2)],
        [commit(10, 20)],
        [begin(10, 1), commit(10, 20), insert(1, b"after")],
        [begin(10, 1), stream_abort(2, 3), commit(10, 20)],
    ],
)
def test_frames_out_of_place_are_refused(payloads: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        located(run_of([frame(payload) for payload in payloads], 0), StreamPlace(), parallel=False)


@pytest.mark.parametrize(
    "payloads",
    [
        [begin(1, 1)[:-1]],
        [begin(1, 1), commit(1, 2) + b"x"],
        [stream_abort(1, 2)[:-1]],
        [stream_abort(1, 2) + bytes(16)],
    ],
)
def test_wrong_lengths_are_refused(payloads: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="wrong length"):
        located(run_of([frame(payload) for payload in payloads], 0), StreamPlace(), parallel=False)


def test_stream_aborts_leave_no_rows() -> None:
    """PostgreSQL 18 sends Stream Aborts between transactions: without a transaction after them, and before a
    transaction that is still open."""
    pending, alone = PendingBatch(), run_of([frame(stream_abort(7, 8))] * 3, 0)
    pending.receive(alone, 0, transaction_after(alone, None), 1.0)
    assert pending.since is None
    assert pending.in_memory == 0
    opened = run_of([frame(stream_abort(7, 8)), frame(begin(10, 1)), frame(insert(1, b"x"))], 3)
    found = transaction_after(opened, None)
    assert found is not None
    assert (found.xid, found.ordinal) == (1, 1)


def test_rows_of_an_undescribed_relation_are_refused() -> None:
    run = run_of([frame(begin(10, 1)), frame(insert(77, b"x")), frame(commit(10, 20))], 0)
    with pytest.raises(ProtocolError, match="77"):
        rows_of(run, None, Relations())


def test_unknown_frames_are_refused() -> None:
    with pytest.raises(ProtocolError):
        run_of([b"x" * 40], 0)


def test_transactions_without_changes_make_no_batch() -> None:
    """PostgreSQL 14 sends Begin and Commit for each decoded transaction without published changes."""
    pending = PendingBatch()
    empty = [frame(begin(10, 1)), frame(origin("o")), frame(commit(10, 20))] * 3
    run = run_of(empty, 0)
    pending.receive(run, len(run), None, 1.0)
    assert pending.since is None
    assert pending.in_memory == 0
    open_run = run_of(empty[:2], 0)
    pending.receive(open_run, 0, transaction_after(open_run, None), 2.0)
    pending.receive(run_of(empty[2:3], 2), 1, None, 3.0)
    assert pending.since is None
    assert pending.open == PendingFrames()
