"""Early files are files that were written before their transaction's commit. Their tags contain the facts of the
commit. These tests check the tags, and that every reader of the log reads early files like all other files."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.layout import commit_name
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.errors import LogCorrupt
from pgcdc_assets.log.commitfacts import CommitFacts
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.wholetransactions import ResendCheck
from pgcdc_assets.log.segment import FILLED_SCHEMA, read_rows, read_slices
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.log.upkeep import compact, forget
from pgcdc_assets.store.local import path_of
from tests.log.twins import BATCHES, START, STEP, Change, Transaction, Twin, rows_in, spans, twins, whole

XIDS = st.integers(3, 2**32 - 1)
TABLE = pa.table(
    {
        "commit_lsn": pa.nulls(4, pa.int64()),
        "commit_ts": pa.nulls(4, pa.timestamp("us", tz="UTC")),
        "schema_id": pa.array([1, 2, None, 3], pa.int64()),
        "kind": pa.array(["I", "I", "M", "I"]),
        "subxid": pa.array([700, 701, 700, 703], pa.int64()),
    }
)
HISTORY = (
    (Transaction((Change("I", 1, 0, 0, b"a"), Change("I", 2, 0, 1, b"b"), Change("I", 1, 1, 2, b"c")), (1,)),),
    (
        Transaction((Change("I", 3, 0, 0, b"d"),), files=0),
        Transaction((Change("M", 1, 0, 0, b"e"), Change("I", 2, 0, 3, b"f"), Change("T", 1, 0, 0, b"")), (4,), "o", 2),
    ),
    (Transaction((Change("I", 2, 1, 0, b"g"), Change("I", 2, 0, 2, b"h"), Change("I", 2, 0, 3, b"i")), (2, 3)),),
)
"""Three batches with four transactions. For one transaction, no file is written before its commit."""


@given(
    st.integers(0, 2**63 - 1), st.integers(-(2**62), 2**62), st.sets(XIDS), st.dictionaries(XIDS, st.integers(-9, 9))
)
def test_commit_facts_round_trip_through_the_tags_of_a_file(
    lsn: int, ts: int, aborted: set[int], schema_ids: dict[int, int]
) -> None:
    late = CommitFacts(lsn, ts, tuple(sorted(aborted)), schema_ids)
    tags = late.to_tags()
    assert all(isinstance(text, str) for text in tags.values())
    assert CommitFacts.of_tags({"pgcdc.batch_end": "7", **tags}) == late
    assert pickle.loads(pickle.dumps(late)) == late
    assert hash(late) == hash(CommitFacts.of_tags(tags))


def test_tags_list_aborted_xids_as_ranges_and_leave_out_empty_facts() -> None:
    late = CommitFacts(Lsn(16), 5, (7, *range(700, 901), 1000), {1: -5, 2: 6})
    assert late.to_tags() == {
        "pgcdc.commit_lsn": "16", "pgcdc.commit_ts": "5", "pgcdc.aborted": "7,700-900,1000",
        "pgcdc.schema_ids": "1:-5,2:6",
    }  # fmt: skip
    assert CommitFacts(1, 2).to_tags() == {"pgcdc.commit_lsn": "1", "pgcdc.commit_ts": "2"}
    assert CommitFacts.of_tags({"pgcdc.batch_end": "7"}) is None


@pytest.mark.parametrize(
    "tags",
    [
        {"pgcdc.commit_lsn": "1"},
        {"pgcdc.commit_lsn": "1", "pgcdc.commit_ts": "x"},
        {"pgcdc.commit_lsn": "", "pgcdc.commit_ts": "1"},
        {"pgcdc.commit_lsn": "1", "pgcdc.commit_ts": "1", "pgcdc.aborted": "1-"},
        {"pgcdc.commit_lsn": "1", "pgcdc.commit_ts": "1", "pgcdc.aborted": "5,,6"},
        {"pgcdc.commit_lsn": "1", "pgcdc.commit_ts": "1", "pgcdc.schema_ids": "1"},
    ],
)
def test_invalid_tags_of_a_log_file_are_refused(tags: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        CommitFacts.of_tags(tags)


@given(st.lists(XIDS, max_size=20, unique=True).map(sorted), XIDS, XIDS)
def test_file_lists_only_the_aborted_subtransactions_in_its_range_of_xids(
    aborted: list[int], one: int, other: int
) -> None:
    low, high = min(one, other), max(one, other)
    found = CommitFacts(1, 2, tuple(aborted), {3: 4}).within(low, high)
    assert found == CommitFacts(1, 2, tuple(xid for xid in aborted if low <= xid <= high), {3: 4})


def test_rows_of_an_early_file_get_the_commit_facts_of_its_tags() -> None:
    """Readers fill the columns of an early file from its tags, and leave out the rows of subtransactions that were
    rolled back."""
    late = CommitFacts(Lsn(9), 1_000_000, (701, 702), {1: 11, 3: 1})
    filled = late.fill(TABLE)
    assert filled.schema.equals(TABLE.schema.remove(4))
    assert filled["commit_lsn"].to_pylist() == [9, 9, 9]
    assert filled["commit_ts"].cast(pa.int64()).to_pylist() == [1_000_000] * 3
    assert filled["schema_id"].to_pylist() == [11, None, 1]
    assert filled["kind"].to_pylist() == ["I", "M", "I"]
    assert CommitFacts(9, 1).fill(TABLE)["schema_id"].to_pylist() == [1, 2, None, 3]
    assert late.fill(TABLE.select(["kind", "subxid"])).to_pydict() == {"kind": ["I", "M", "I"]}
    assert CommitFacts(9, 1).fill(TABLE.select(["kind"])).num_rows == 4
    assert CommitFacts(9, 1, (700, 701, 703), {1: 2}).fill(TABLE).to_pylist() == []
    assert late.fill(TABLE.slice(0, 0)).schema.equals(filled.schema)


# The log as a whole --------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=15)
@given(BATCHES)
@example([list(batch) for batch in HISTORY])
def test_early_files_have_the_same_rows_as_files_written_at_commit(batches: list[list[Transaction]]) -> None:
    """The rows are also the same after the log is compacted, and whenever the oldest batch of the log is deleted."""
    with TemporaryDirectory() as folder:
        plain, early = twins(Path(folder) / "compacted", batches)
        _same(plain, early)
        _slices_are_the_rows(early)
        _same_when_compacted(plain, early)
        _same_when_cut_off(*twins(Path(folder) / "cut off", batches))


def _same(plain: ChangeLog, early: ChangeLog) -> None:
    assert rows_in(early) == rows_in(plain)
    assert early.batches(ZERO) == plain.batches(ZERO)
    assert early.verify(whole(early)) == plain.verify(whole(plain))
    for span in spans(plain):
        assert early.shapes(span) == plain.shapes(span)
        assert LogSpan(early, span).rows == LogSpan(plain, span).rows
        assert _pruned(early, span) == _pruned(plain, span)
    for batch in plain.batches(ZERO):
        assert early.verify(LsnRange(batch.start, batch.end)) == [batch]
    for confirmed in range(START, plain.position() + 1, STEP):
        for origins in (True, False):
            found = [ResendCheck.of(log, Lsn(confirmed), origins=origins) for log in (plain, early)]
            assert found[0] == found[1]


def _pruned(log: ChangeLog, span: LsnRange) -> list[Any]:
    """The rows of an LSN range, for each relation. Reads only the files that may have such rows according to their
    statistics."""
    at = pc.field("commit_lsn")
    found = []
    for relation in (1, 2, 3, None):
        asked = (at >= int(span.start)) & (at < int(span.end))
        if relation is not None:
            asked = asked & (pc.field("relation_id") == relation) & (pc.field("schema_id") != 0)
        segments = log.segments(span, None if relation is None else [relation])
        tables = [read_rows(segment.file, ["tx_ordinal", "payload"], asked) for segment in segments]
        found.append(sorted(tuple(row.values()) for table in tables for row in table.to_pylist()))
    return found


def _slices_are_the_rows(log: ChangeLog) -> None:
    columns = ["kind", "commit_lsn", "commit_ts", "schema_id", "payload"]
    for segment in log.all_segments():
        file = pickle.loads(pickle.dumps(segment.file))
        slices = list(read_slices(file, columns, 1))
        assert all("subxid" not in part.column_names for part in slices)
        whole_rows = read_rows(segment.file, columns)
        assert [row for part in slices for row in part.select(columns).to_pylist()] == whole_rows.to_pylist()


def _same_when_compacted(plain: ChangeLog, early: ChangeLog) -> None:
    saved = compact(early, whole(early))
    fresh = ChangeLog(early.layout)
    assert rows_in(fresh) == rows_in(plain)
    assert fresh.verify(whole(fresh)) == plain.verify(whole(plain))
    if saved:
        (merged,) = fresh.all_segments()
        assert (merged.commit_facts, merged.rows) == (None, len(rows_in(plain)))
        assert pq.read_schema(path_of(merged.path)).names == FILLED_SCHEMA.names
    for span in spans(plain):
        assert LogSpan(fresh, span).rows == LogSpan(plain, span).rows


def _same_when_cut_off(plain: ChangeLog, early: ChangeLog) -> None:
    for batch in plain.batches(ZERO):
        forget(plain, batch.end)
        forget(early, batch.end)
        assert early.start == plain.start
        assert rows_in(early) == rows_in(plain)
        assert early.verify(whole(early)) == plain.verify(whole(plain))


def test_early_files_are_found_by_the_commit_lsn_of_their_transaction(tmp_path: Path) -> None:
    _, log = twins(tmp_path, HISTORY)
    late = [segment for segment in log.all_segments() if segment.commit_facts is not None]
    assert len(late) == 4
    for segment in late:
        assert segment.commit_facts is not None
        assert segment.commit_min == segment.commit_max == segment.commit_facts.commit_lsn
    first = LsnRange(START, Lsn(START + STEP))
    assert {segment.file for segment in log.segments(first) if segment.commit_facts} == {late[0].file}
    assert not any(segment.commit_facts for segment in log.segments(LsnRange(Lsn(START + STEP), Lsn(START + 2 * STEP))))
    assert not any(segment.commit_facts for segment in log.segments(first, [3]))
    assert sum(segment.rows for segment in late) == 9, "rows of aborted subtransactions are included"


def test_tags_of_a_file_list_only_aborted_subtransactions_with_rows_in_the_file(tmp_path: Path) -> None:
    changes = tuple(Change("I", 1, 0, sub, b"x") for sub in (0, 1, 2, 3))
    _, log = twins(tmp_path, [[Transaction(changes, (1, 2, 4), files=2)]])
    told = [segment.commit_facts.aborted for segment in log.all_segments() if segment.commit_facts is not None]
    assert sorted(told) == [(101,), (102,)]
    log.verify(whole(log))


# Damage ------------------------------------------------------------------------------------------


def _retag(log: ChangeLog, old: str, new: str) -> None:
    """Replaces a tag in the newest Delta commit."""
    path = path_of(log.path / "_delta_log" / commit_name(log.version().number))
    text = path.read_text()
    changed = re.sub(old, new, text)
    assert changed != text
    path.write_text(changed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r'"pgcdc.commit_lsn": "(\d)', r'"pgcdc.commit_lsn": "9\1'),
        (r'"pgcdc.commit_lsn": "(\d+)\d"', r'"pgcdc.commit_lsn": "\g<1>1"'),
        (r'"pgcdc.commit_lsn": "\d+"', r'"pgcdc.commit_lsn": "x"'),
        (r'"pgcdc.commit_lsn"', r'"pgcdc.commit_lsx"'),
        (r'"pgcdc.commit_ts": "(\d+)\d"', r'"pgcdc.commit_ts": "\g<1>9"'),
        (r'"pgcdc.commit_ts"', r'"pgcdc.commit_tx"'),
        (r'"pgcdc.aborted": "\d+-', r'"pgcdc.aborted": "'),
        (r'"pgcdc.aborted"', r'"pgcdc.aborten"'),
        (r'"pgcdc.aborted": "(\d)', r'"pgcdc.aborted": "9\1'),
        (r':-?\d+,', r':7,'),
        (r'"pgcdc.schema_ids"', r'"pgcdc.schema_idx"'),
    ],
    ids=[
        "commit elsewhere", "commit nearby", "no number", "no commit", "another time", "no time", "fewer rollbacks",
        "no rollbacks", "other rollbacks", "other shapes", "no shapes",
    ],
)  # fmt: skip
def test_wrong_tag_of_an_early_file_is_detected(tmp_path: Path, old: str, new: str) -> None:
    _, log = twins(tmp_path, HISTORY)
    log.verify(whole(log))
    span = whole(log)
    _retag(log, old, new)
    with pytest.raises(LogCorrupt):
        ChangeLog(log.layout).verify(span)


def test_missing_row_in_an_early_file_is_detected(tmp_path: Path) -> None:
    """The file and its checksum are valid. Only the count in the batch's summary shows that a row is missing."""
    twin = Twin(tmp_path, early=True)
    put, lost = twin._put, []

    def loses(groups: list[pa.Table], end: Lsn, late: Any = None) -> Any:
        if late is not None:
            lost.append(groups[0].num_rows)
            groups = [groups[0].slice(1)]
        return put(groups, end, late)

    twin._put = loses  # type: ignore[method-assign]
    twin.add(HISTORY[0])
    assert lost == [3]
    with pytest.raises(LogCorrupt, match="has 2 rows, and the summary counts 3"):
        twin.log.verify(whole(twin.log))
