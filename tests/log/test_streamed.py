"""Tests ``located``, which finds the transaction of each frame of a FrameRun with numpy. The reference is
StreamDecoder, which reads one message after another. For each division of the stream into FrameRuns, ``located`` and
the reference must find the same transactions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.framerun import FrameRun
from pgcdc_assets.log.rows import ABSENT
from pgcdc_assets.log.streamed import Located, StreamPlace, located
from pgcdc_assets.protocol.layouts import BRACKETS, CARRY_XID, CONTENT, EPOCH
from pgcdc_assets.protocol.messages import (
    UNCHANGED,
    AnyMessage,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from tests.log.streams import Placed, StreamDecoder, frame, run_of
from tests.protocol import wire

LSN, OTHER = Lsn(0x16_B374_D848), Lsn(0x16_B374_D878)
FIRST = 1000
"""The LSN of the first frame. Each frame has its own LSN."""
LETTERS = st.sampled_from([b"S", b"E", b"BC", b"w\0\0\0I", b"", b"I" * 30])
XIDS = st.sampled_from([1, 7, 0x4945_5342, 0xFFFF_FFFE])
"""Some of these xids contain bytes that are also message letters."""
CHANGES: st.SearchStrategy[AnyMessage] = st.one_of(
    st.builds(lambda text: Insert(7, (text.decode(), None)), LETTERS),
    st.builds(lambda text: Update(7, None, None, (text.decode(), UNCHANGED)), LETTERS),
    st.builds(lambda text: Delete(8, "K", (text.decode(),)), LETTERS),
    st.just(Truncate((7, 8), False, True)),
    st.just(Relation(7, "public", "t", "d", (RelationColumn(True, "c", 25, -1),))),
    st.just(Type(16390, "public", "mood")),
    st.builds(lambda content: LogicalMessage(True, LSN, "p", content), LETTERS),
)
ORIGIN = Origin(Lsn(0), "elsewhere")
LOOSE = LogicalMessage(False, LSN, "p", b"loose")
CONTENTS = st.lists(st.tuples(CHANGES | st.just(ORIGIN), XIDS), max_size=5)
BETWEEN: st.SearchStrategy[AnyMessage] = st.one_of(
    st.just(LOOSE),
    st.builds(lambda xid: StreamCommit(xid, 0, LSN, OTHER, EPOCH), XIDS),
    st.builds(lambda xid, subxid: StreamAbort(xid, subxid, LSN, EPOCH), XIDS, XIDS),
    st.builds(lambda xid: StreamPrepare(0, LSN, OTHER, EPOCH, xid, "g"), XIDS),
    st.builds(lambda xid: CommitPrepared(0, LSN, OTHER, EPOCH, xid, "g"), XIDS),
    st.builds(lambda xid: RollbackPrepared(0, LSN, OTHER, EPOCH, EPOCH, xid, "g"), XIDS),
)
BEGIN, COMMIT = Begin(LSN, EPOCH, 5), Commit(0, LSN, OTHER, EPOCH)
BEGIN_PREPARE, PREPARE = BeginPrepare(LSN, OTHER, EPOCH, 5, "g"), Prepare(0, LSN, OTHER, EPOCH, 5, "g")

Frames = list[bytes]


@st.composite
def streams(draw: st.DrawFn, *, parallel: bool) -> Frames:
    """Generates the payloads of a stream: blocks of several transactions, unstreamed and prepared transactions, and
    messages between them."""
    payloads: list[bytes] = []
    for _ in range(draw(st.integers(0, 6))):
        sort = draw(st.sampled_from(["block", "whole", "prepared", "between"]))
        if sort == "between":
            payloads.append(wire.message(_of(draw(BETWEEN), parallel)))
            continue
        contents = draw(CONTENTS)
        if sort == "block":
            start = StreamStart(draw(XIDS), draw(st.booleans()))
            held = [_within(of, xid) for of, xid in contents]
            payloads += [wire.message(start), *held, wire.message(StreamStop())]
        else:
            begin, end = (BEGIN, COMMIT) if sort == "whole" else (BEGIN_PREPARE, PREPARE)
            payloads += [wire.message(of) for of in (begin, *(of for of, _ in contents), end)]
    return payloads


def _within(of: AnyMessage, xid: int) -> bytes:
    payload = wire.message(of)
    return wire.within(payload, xid) if payload[0] in CARRY_XID else payload


def _of(of: AnyMessage, parallel: bool) -> AnyMessage:
    return of if parallel or not isinstance(of, StreamAbort) else StreamAbort(of.xid, of.subxid)


def _reference(payloads: Frames, parallel: bool) -> list[Placed]:
    """The messages that the reference accepts, up to the first message that it refuses."""
    decoder, found = StreamDecoder(parallel=parallel), []
    for payload in payloads:
        try:
            found.append(decoder.take(payload))
        except ProtocolError:
            break
    return found


def _parts(payloads: Frames, cuts: Sequence[int], parallel: bool) -> list[Located]:
    """Divides the stream at ``cuts`` into FrameRuns, and returns the result of ``located`` for each. Each FrameRun
    starts in the state in which the previous FrameRun ended."""
    edges = sorted({0, len(payloads), *(cut % (len(payloads) + 1) for cut in cuts)})
    frames = [frame(payload, FIRST + number) for number, payload in enumerate(payloads)]
    found: list[Located] = []
    place = StreamPlace()
    for start, end in itertools.pairwise(edges):
        found.append(located(run_of(frames[start:end], start), place, parallel=parallel))
        place = found[-1].after
    return found


def _payloads(run: FrameRun) -> list[bytes]:
    return [run.payload(index) for index in range(len(run))]


CUTS = st.lists(st.integers(0, 100), max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.data(), CUTS, st.booleans())
def test_frames_are_assigned_to_transactions_as_by_the_reference(
    data: st.DataObject, cuts: list[int], parallel: bool
) -> None:
    payloads = data.draw(streams(parallel=parallel))
    expected = _reference(payloads, parallel)
    assert len(expected) == len(payloads)
    parts = _parts(payloads, cuts, parallel)
    told = [one for part in parts for one in _payloads(part.run)]
    assert told == [wire.message(one.message) for one in expected]
    top = [one for part in parts for one in part.top.tolist()]
    assert top == [ABSENT if one.top is None else one.top for one in expected]
    subxid = [one for part in parts for one in part.subxid.tolist()]
    assert subxid == [ABSENT if one.subxid is None else one.subxid for one in expected]
    lsns = [part.run.lsn(index) for part in parts for index in range(len(part.run))]
    assert lsns == list(range(FIRST, FIRST + len(payloads)))
    sequence = [one for part in parts for one in part.run.sequence.tolist()]
    assert sequence == list(range(len(payloads)))
    if parts:
        assert parts[-1].after == StreamPlace()


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.data(), CUTS, st.booleans())
def test_located_refuses_the_frames_that_the_reference_refuses(
    data: st.DataObject, cuts: list[int], parallel: bool
) -> None:
    """The messages are in any order. ``located`` and the reference must refuse the same frame."""
    anything: st.SearchStrategy[AnyMessage] = st.one_of(
        CHANGES, BETWEEN, st.sampled_from([ORIGIN, BEGIN, COMMIT, BEGIN_PREPARE, PREPARE, StreamStop()]),
        st.builds(StreamStart, XIDS, st.booleans()),
    )  # fmt: skip
    payloads: Frames = []
    opened = 0
    for of in data.draw(st.lists(anything, max_size=8)):
        payload = wire.message(_of(of, parallel))
        in_block = opened == ord("S") and payload[0] in CARRY_XID
        payloads.append(wire.within(payload, 7) if in_block else payload)
        if payload[0] in BRACKETS:
            opened = payload[0]
        elif payload[0] not in CONTENT:
            opened = 0
    expected = _reference(payloads, parallel)
    if len(expected) == len(payloads):
        assert len([one for part in _parts(payloads, cuts, parallel) for one in _payloads(part.run)]) == len(payloads)
        return
    with pytest.raises(ProtocolError) as caught:
        _parts(payloads, cuts, parallel)
    assert caught.value.lsn == FIRST + len(expected)


@settings(max_examples=100, deadline=None)
@given(st.data(), CUTS)
def test_each_frame_is_in_one_stretch_and_each_stretch_has_one_transaction(
    data: st.DataObject, cuts: list[int]
) -> None:
    """A stretch consists of consecutive frames of the same transaction."""
    for part in _parts(data.draw(streams(parallel=True)), cuts, True):
        stretches = list(part.stretches())
        edges = [stretch.start for stretch in stretches] + [len(part.run)] * bool(stretches)
        assert edges == sorted(set(edges))
        assert [stretch.end for stretch in stretches] == edges[1:]
        assert all(one.top != other.top for one, other in itertools.pairwise(stretches))
        assert all(set(part.top[stretch.start : stretch.end].tolist()) == {stretch.top} for stretch in stretches)


@pytest.mark.parametrize(
    ("payload", "parallel"),
    [
        (b"S\0\0\0\1", True),
        (b"S\0\0\0\1\1\0", True),
        (b"S\0\0\0\1\2", True),
        (b"E\0", True),
        (b"c" + bytes(28), True),
        (b"c" + bytes(30), True),
        (b"A" + bytes(8), True),
        (b"A" + bytes(24), False),
        (b"B" + bytes(19), True),
        (b"\0", True),
        (b"x", True),
    ],
)
def test_message_of_a_wrong_length_or_kind_is_refused(payload: bytes, parallel: bool) -> None:
    with pytest.raises(ProtocolError, match="wrong length, at LSN 0/5"):
        located(run_of([frame(payload, 5)], 0), StreamPlace(), parallel=parallel)


@pytest.mark.parametrize("payload", [b"I", b"I\0\0\0", b"M\0\0\0\1", b"M\0\0\0\1\0" + bytes(14)])
def test_message_without_an_xid_inside_a_stream_block_is_refused(payload: bytes) -> None:
    run = run_of([frame(b"S\0\0\0\7\1"), frame(payload, 5), frame(b"E")], 0)
    with pytest.raises(ProtocolError, match="at LSN 0/5"):
        located(run, StreamPlace(), parallel=True)


def test_frame_run_without_blocks_is_returned_without_a_copy_of_its_bytes() -> None:
    run = run_of([frame(wire.message(of)) for of in (BEGIN, Insert(7, ("a",)), COMMIT)], 0)
    assert located(run, StreamPlace(), parallel=True).run is run


def test_part_of_a_frame_run_keeps_only_its_own_bytes() -> None:
    """Keepalives divide the bytes of one read into many FrameRuns. Each FrameRun must keep only its own bytes in
    memory."""
    block = [wire.message(StreamStart(7, True)), wire.within(wire.message(Insert(7, ("a",))), 8), b"E"]
    run = run_of([frame(payload) for payload in block * 100], 0)
    found = located(run.part(3, 6), StreamPlace(), parallel=True)
    assert len(found.run.raw) == run.part(3, 6).size
    assert found.run.relation_ids(np.array([1])).tolist() == [7]
