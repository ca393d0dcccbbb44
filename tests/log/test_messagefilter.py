"""Logical messages that the settings exclude. The result is compared with a sequential scan of the stream, for any
division of the stream into parts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import ZERO
from pgcdc_assets.core.settingvalues import PrefixPatterns
from pgcdc_assets.log.batch import PendingBatch
from pgcdc_assets.log.receive.intake import Intake
from pgcdc_assets.log.receive.messagefilter import MessageFilter
from pgcdc_assets.log.receive.relationfacts import described
from pgcdc_assets.log.receive.wholetransactions import Taken
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.segment import FILLED_SCHEMA, table_of
from pgcdc_assets.log.transactions import transaction_after
from pgcdc_assets.protocol.shape import RelationFacts
from tests.log.streams import TRANSACTIONS, begin, build, commit, frame, message, origin, relation, run_of


def _walked(frames: list[bytes], wanted: MessageFilter) -> list[bytes]:
    """The sequential scan, frame by frame."""
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
def test_kept_frames_equal_the_frames_of_a_sequential_scan(
    transactions: list[Any], cuts: list[int], messages: tuple[str, ...], origins: bool
) -> None:
    frames = build(transactions, Relations()).frames
    wanted = MessageFilter(messages, origins=origins)
    assert _in_parts(frames, cuts, wanted) == _walked(frames, wanted)


def test_kept_frames_hold_no_bytes_of_dropped_frames() -> None:
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


def test_chosen_messages_of_a_transaction_keep_their_order() -> None:
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
def test_invalid_pattern_is_refused(patterns: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"is not a pattern|excludes prefixes and includes none"):
        PrefixPatterns.parse(patterns)
