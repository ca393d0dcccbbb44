"""The rows computed with vectorised code are compared with a sequential scan of the same stream, for any division of
the stream into parts. Further tests check when a batch ends, and which logical messages the settings exclude."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import ZERO, Lsn, ReportedPositions
from pgcdc_assets.core.settingvalues import PrefixPatterns
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.batch import Committed, PendingBatch, PendingFrames
from pgcdc_assets.log.framerun import joined
from pgcdc_assets.log.receive import batches as batches_module
from pgcdc_assets.log.receive.batches import Batches, Limits
from pgcdc_assets.log.receive.intake import Intake
from pgcdc_assets.log.receive.messagefilter import MessageFilter
from pgcdc_assets.log.receive.receiver import Receiver
from pgcdc_assets.log.receive.relationfacts import described
from pgcdc_assets.log.receive.wholetransactions import Taken
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.rows import Rows, rows_of, tally_of
from pgcdc_assets.log.segment import FILLED_SCHEMA, check_content, clustered, table_of, write_segment
from pgcdc_assets.log.streamed import StreamPlace, located
from pgcdc_assets.log.transactions import OpenTransaction, transaction_after
from pgcdc_assets.protocol.messages import Type
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.store.scratch import DraftFile
from tests.log.streams import (
    TRANSACTIONS,
    Stream,
    begin,
    build,
    commit,
    describe,
    frame,
    insert,
    message,
    origin,
    relation,
    run_of,
    stream_abort,
    truncate,
)
from tests.protocol import wire


def _rows_in_parts(stream: Stream, cuts: list[int], relations: Relations) -> list[Rows]:
    """Divides the stream at the frames ``cuts``. Computes the rows of each part separately, from the state in which the
    previous part ended."""
    found: list[Rows] = []
    state: OpenTransaction | None = None
    edges = sorted({0, len(stream.frames), *(cut % (len(stream.frames) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        run = run_of(stream.frames[start:end], start)
        found.append(rows_of(run, state, relations))
        state = transaction_after(run, state)
    return found


def _tuples(rows: Rows) -> list[tuple[Any, ...]]:
    table = table_of(rows).cast(FILLED_SCHEMA)
    names = ("kind", "commit_lsn", "tx_ordinal", "xid", "relation_id", "schema_id", "origin", "payload", "lsn")
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(TRANSACTIONS, st.lists(st.integers(0, 100), max_size=4))
def test_rows_equal_the_rows_of_a_sequential_scan_for_any_division_of_the_stream(
    transactions: list[Any], cuts: list[int]
) -> None:
    relations = Relations()
    stream = build(transactions, relations)
    parts = _rows_in_parts(stream, cuts, relations)
    assert [row for part in parts for row in _tuples(part)] == stream.expected


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(TRANSACTIONS, st.lists(st.integers(0, 100), max_size=4))
def test_frame_runs_that_are_divided_and_joined_again_have_the_original_frames(
    transactions: list[Any], cuts: list[int]
) -> None:
    relations = Relations()
    stream = build(transactions, relations)
    edges = sorted({0, len(stream.frames), *(cut % (len(stream.frames) + 1) for cut in cuts)})
    whole = run_of(stream.frames, 0)
    runs = [whole.part(start, end) for start, end in itertools.pairwise(edges)]
    again = joined(runs)
    assert _tuples(rows_of(again, None, relations)) == stream.expected
    assert again.sequence.tolist() == list(range(len(stream.frames)))


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(TRANSACTIONS)
def test_clustering_by_relation_keeps_all_rows_and_their_order_in_each_relation(transactions: list[Any]) -> None:
    relations = Relations()
    stream = build(transactions, relations)
    rows = rows_of(run_of(stream.frames, 0), None, relations)
    alone, shared = clustered(rows)
    assert alone == []
    assert _tuples(shared) == sorted(stream.expected, key=lambda row: -1 if row[4] is None else row[4])
    tally = tally_of(rows)
    assert tally.rows == len(stream.expected)
    assert tally.transactions == sum(row[0] == "C" for row in stream.expected)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(TRANSACTIONS)
def test_rows_of_a_segment_are_read_as_they_were_written(transactions: list[Any]) -> None:
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
def test_message_that_is_not_allowed_at_its_place_in_the_stream_is_refused(payloads: list[bytes]) -> None:
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
def test_message_of_a_wrong_length_is_refused(payloads: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="wrong length"):
        located(run_of([frame(payload) for payload in payloads], 0), StreamPlace(), parallel=False)


def test_stream_abort_of_an_unknown_transaction_makes_no_row() -> None:
    """PostgreSQL 18 sends Stream Aborts of transactions of which it has sent no block. The test has such messages
    alone, and before a transaction that is still open."""
    pending, alone = PendingBatch(), run_of([frame(stream_abort(7, 8))] * 3, 0)
    pending.receive(alone, 0, transaction_after(alone, None), 1.0)
    assert pending.since is None
    assert pending.in_memory == 0
    opened = run_of([frame(stream_abort(7, 8)), frame(begin(10, 1)), frame(insert(1, b"x"))], 3)
    found = transaction_after(opened, None)
    assert found is not None
    assert (found.xid, found.ordinal) == (1, 1)


def test_rows_without_an_earlier_relation_message_are_refused() -> None:
    run = run_of([frame(begin(10, 1)), frame(insert(77, b"x")), frame(commit(10, 20))], 0)
    with pytest.raises(ProtocolError, match="77"):
        rows_of(run, None, Relations())


def test_frame_of_an_unknown_kind_is_refused() -> None:
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


# The rules that end a batch -------------------------------------------------------------------------

SECONDS, START = 10.0, 1000.0


@dataclass
class Rig:
    """Batches with a clock that moves only when the test moves it, and with a writer that only notes the size of each
    batch."""

    clock: list[float]
    cuts: list[int] = field(default_factory=list)
    """The size of each batch in bytes."""

    def __post_init__(self) -> None:
        self.positions = SimpleNamespace(boundary=ZERO)
        intake = SimpleNamespace(positions=self.positions, stream_aborts=0)
        writer = SimpleNamespace(position=ZERO, commit=self._commit)
        self.batches = Batches(
            cast("Any", writer), cast("Any", intake), ReportedPositions(ZERO), Limits(10_000, SECONDS),
            lambda event: None, lambda: None,
        )  # fmt: skip

    @property
    def now(self) -> float:
        return self.clock[0]

    def _commit(self, closed: Any, staged: Any, end: Lsn, ended: Any) -> Committed:
        self.cuts.append(closed.size)
        return Committed(ZERO, end, 1, 1, closed.size)

    def transaction(self, size: int = 1) -> None:
        at = int(self.positions.boundary)
        payloads = [begin(at, 5), insert(1, b"x" * size), commit(at, at + 50)]
        run = run_of([frame(payload, at) for payload in payloads], 0)
        self.batches.add(Taken(run, len(run), None))
        self.positions.boundary = Lsn(at + 50)

    def round(self, after: float = 0.0) -> int:
        """Moves the clock by ``after`` seconds, and ends the batch if it is due. Returns the number of all batches that
        have ended."""
        self.clock[0] += after
        self.batches.writing.finish()
        self.batches.cut_if_due(self.now)
        self.batches.writing.finish()
        return len(self.cuts)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    now = [START]
    monkeypatch.setattr(batches_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rig = Rig(now)
    yield rig
    rig.batches.writing.close()


def test_first_commit_after_a_quiet_time_makes_a_batch_at_once(rig: Rig) -> None:
    rig.clock[0] += SECONDS
    rig.transaction()
    assert rig.batches.due_in(rig.now) == 0
    assert rig.round() == 1
    assert rig.batches.due_in(rig.now) is None


def test_steady_commits_make_one_batch_in_each_interval_of_batch_seconds(rig: Rig) -> None:
    each, seconds = 2, int(SECONDS) * 10
    for _ in range(seconds * each):
        rig.transaction()
        rig.round(1 / each)
    assert len(rig.cuts) == seconds // SECONDS


def test_batch_ends_at_once_if_it_is_full_or_a_flush_is_requested(rig: Rig) -> None:
    rig.transaction()
    assert rig.round() == 0
    rig.batches.flush()
    assert rig.round() == 1
    rig.transaction(20_000)
    assert rig.round() == 2
    rig.transaction()
    assert rig.round(SECONDS - 1) == 2
    assert rig.round(1) == 3


def test_receiver_waits_for_frames_at_most_until_the_open_batch_must_end() -> None:
    def seconds(due_in: float | None, *, busy: bool = False) -> float:
        receiver = cast("Any", object.__new__(Receiver))
        receiver._writing, receiver._limits = SimpleNamespace(busy=busy), Limits(1, 1.0)
        receiver._batches = SimpleNamespace(due_in=lambda now: due_in)
        return float(receiver._quiet_seconds())

    usual = seconds(None)
    assert seconds(usual + 1) == usual
    assert seconds(usual / 2) == usual / 2
    assert seconds(0.0) == 0.0
    assert seconds(usual / 2, busy=True) == Limits(1, 1.0).linger_seconds < usual / 2


# Logical messages that the settings exclude ---------------------------------------------------------


def _walked(frames: list[bytes], wanted: MessageFilter) -> list[bytes]:
    """The frames that the filter must keep, found by a sequential scan."""
    kept: list[bytes] = []
    inside = of_origin = False
    for each in frames:
        kind = chr(each[25])
        if kind == "B":
            inside, of_origin = True, False
        gone = kind == "M" and not wanted.messages
        gone |= kind in "IUDTM" and inside and of_origin and not wanted.origins
        of_origin |= kind == "O"
        inside &= kind != "C"
        if not gone:
            kept.append(each)
    return kept


def _in_parts(frames: list[bytes], cuts: list[int], wanted: MessageFilter) -> list[bytes]:
    found: list[bytes] = []
    state = None
    edges = sorted({0, len(frames), *(cut % (len(frames) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        run = wanted.kept(run_of(frames[start:end], start), state)
        offsets, lengths = run.offsets.tolist(), run.lengths.tolist()
        found += [bytes(run.raw[at : at + length]) for at, length in zip(offsets, lengths, strict=True)]
        state = transaction_after(run, state)
    return found


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(TRANSACTIONS, st.lists(st.integers(0, 100), max_size=4), st.sampled_from([(), ("p",)]), st.booleans())
def test_frames_that_the_filter_keeps_equal_the_frames_of_a_sequential_scan(
    transactions: list[Any], cuts: list[int], messages: tuple[str, ...], origins: bool
) -> None:
    frames = build(transactions, Relations()).frames
    wanted = MessageFilter(messages, origins=origins)
    assert _in_parts(frames, cuts, wanted) == _walked(frames, wanted)


def test_kept_frames_hold_no_bytes_of_dropped_frames_in_memory() -> None:
    frames = [frame(message(number, b"x" * 1000, transactional=False), number) for number in range(1, 100)]
    kept = MessageFilter(()).kept(run_of([*frames, frame(begin(500, 1)), *frames], 0), None)
    assert (len(kept), len(kept.raw)) == (1, kept.size)
    assert kept.sequence.tolist() == [99]


@pytest.mark.parametrize("wanted", [MessageFilter(()), MessageFilter(("p",), origins=False)])
def test_transaction_with_only_excluded_messages_leaves_no_row(wanted: MessageFilter) -> None:
    """The transaction's end still moves the log's position."""
    frames = [begin(100, 7), origin("elsewhere"), message(50, b"x", transactional=True), commit(100, 148)]
    relations, pending = Relations(), PendingBatch()
    intake = Intake(lambda asked: {}, relations, ZERO, wanted=wanted)
    (taken,) = intake.take(run_of([frame(each, 50) for each in frames], 0))
    assert isinstance(taken, Taken)
    pending.receive(taken.run, taken.whole, taken.after, 0.0)
    assert (intake.positions.boundary, pending.since, pending.in_memory) == (148, None, 0)


def test_excluded_message_of_a_transaction_gets_no_ordinal() -> None:
    wanted = MessageFilter(("chosen",))
    frames = [begin(100, 7), relation(1, "t"), message(50, b"x", transactional=True)]
    frames += [message(60, b"y", transactional=True).replace(b"p\0", b"chosen\0", 1), commit(100, 148)]
    relations, pending = Relations(), PendingBatch()
    intake = Intake(
        lambda asked: {described(one): RelationFacts(None) for one in asked}, relations, ZERO, wanted=wanted
    )
    (taken,) = intake.take(run_of([frame(each, 60) for each in frames], 0))
    assert isinstance(taken, Taken)
    pending.receive(taken.run, taken.whole, taken.after, 0.0)
    rows = table_of(pending.closed.rows(relations)).cast(FILLED_SCHEMA)
    assert list(zip(rows["kind"].to_pylist(), rows["tx_ordinal"].to_pylist(), strict=True)) == [("M", 0), ("C", 1)]


# Partitions that are published via their root --------------------------------------------------------

A, B, ROOT, LEAF = 11, 22, 33, 44
ROW_OF_A, ROW_OF_B, TYPE = insert(A, b"x"), insert(B, b"x"), wire.message(Type(16390, "public", "mood"))
FIRST_ROW_OF_A, FIRST_ROW_OF_B = [relation(A, "a"), ROW_OF_A], [relation(B, "b"), ROW_OF_B]
FIRST_ROW_OF_LEAF = [relation(ROOT, "root"), TYPE, relation(LEAF, "leaf"), insert(ROOT, b"x")]
"""What the server sends for the first row of a leaf. The type belongs to a column of the leaf."""


def _transactions(*contents: list[bytes]) -> list[bytes]:
    """The frames of transactions with these contents. Each content begins after the transaction's Begin."""
    payloads: list[bytes] = []
    for number, content in enumerate(contents, 1):
        payloads += [begin(100 * number, number), *content, commit(100 * number, 100 * number + 48)]
    return [frame(payload) for payload in payloads]


def _partitions(frames: list[bytes], wanted: MessageFilter, *cuts: int) -> set[tuple[int, int]]:
    """The partitions that are found if the frames are divided at ``cuts``, and filtered by ``wanted``."""
    relations = Relations()
    for relation_id in (A, B, ROOT):
        describe(relations, relation(relation_id, f"t{relation_id}"), 0)
    found: set[tuple[int, int]] = set()
    state: OpenTransaction | None = None
    for start, end in itertools.pairwise([0, *cuts, len(frames)]):
        run = wanted.kept(run_of(frames[start:end], start), state)
        found |= rows_of(run, state, relations).partitions
        state = transaction_after(run, state)
    return found


@pytest.mark.parametrize(
    ("replicated", "own"),
    [
        (FIRST_ROW_OF_A, FIRST_ROW_OF_B),
        (FIRST_ROW_OF_A, [ROW_OF_B]),
        ([*FIRST_ROW_OF_B, *FIRST_ROW_OF_A], [ROW_OF_B]),
        ([*FIRST_ROW_OF_A, *FIRST_ROW_OF_B], []),
        (FIRST_ROW_OF_LEAF, [ROW_OF_B]),
    ],
)
def test_relation_message_of_an_excluded_row_makes_no_table_a_partition(
    replicated: list[bytes], own: list[bytes]
) -> None:
    frames = _transactions([origin("elsewhere"), *replicated], own)
    assert _partitions(frames, MessageFilter((), origins=False)) == set()


@pytest.mark.parametrize("before", [[], [message(50, b"x", transactional=True)], [ROW_OF_A]])
@pytest.mark.parametrize("wanted", [MessageFilter(("*",)), MessageFilter((), origins=False)])
def test_leaf_is_found_wherever_the_frames_are_divided(wanted: MessageFilter, before: list[bytes]) -> None:
    frames = _transactions([origin("elsewhere"), *FIRST_ROW_OF_B], [*before, *FIRST_ROW_OF_LEAF])
    assert _partitions(frames, wanted) == {(ROOT, LEAF)}
    for cut in range(1, len(frames)):
        assert _partitions(frames, wanted, cut) == {(ROOT, LEAF)}, cut


@pytest.mark.parametrize(
    "contents",
    [
        [[relation(A, "a")], FIRST_ROW_OF_B],
        [[relation(A, "a")], [ROW_OF_B]],
        [[relation(A, "a"), *FIRST_ROW_OF_B]],
        [[relation(A, "a"), relation(B, "b"), truncate([A, B]), ROW_OF_B]],
    ],
)
def test_relation_message_without_a_row_makes_no_table_a_partition(contents: list[list[bytes]]) -> None:
    assert _partitions(_transactions(*contents), MessageFilter()) == set()


@pytest.mark.parametrize(
    ("patterns", "chosen", "others"),
    [
        ((), (), ("app", "")),
        (("*",), ("app", "", "a.b", "zeile\nzwei"), ()),
        (("app",), ("app",), ("apps", "my.app", "App")),
        (("outbox.*",), ("outbox.", "outbox.a.b"), ("outbox", "xoutbox.a")),
        (("a?c",), ("abc", "a.c"), ("ac", "abbc")),
        (("*", "-debug.*"), ("app",), ("debug.x",)),
        (('"a*"', '"q""q"'), ("a*", 'q"q'), ("ab",)),
        (("a[b]",), ("a[b]",), ("ab",)),
    ],
)
def test_prefix_patterns_choose_messages(
    patterns: tuple[str, ...], chosen: tuple[str, ...], others: tuple[str, ...]
) -> None:
    found = PrefixPatterns.parse(patterns)
    assert [prefix for prefix in (*chosen, *others) if found.match(prefix)] == list(chosen)


@pytest.mark.parametrize("patterns", [("",), ("-",), (" app",), ("-app",), ('"app',), ('a"b"',), ("a\0b",)])
def test_invalid_prefix_pattern_is_refused(patterns: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"is not a pattern|excludes prefixes and includes none"):
        PrefixPatterns.parse(patterns)
