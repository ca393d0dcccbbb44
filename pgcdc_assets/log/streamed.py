"""Runs of frames that carry transactions in progress: which frame belongs to which, with numpy.

The rules are those that :mod:`pgcdc_assets.protocol.streamed` tells. What stands in a block comes out as protocol
version 1 would have sent it: all that follows knows but one form of a message, and the log holds that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Bools, Ints
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.framerun import HEADER, FrameRun, anywhere
from pgcdc_assets.log.rows import ABSENT
from pgcdc_assets.protocol import layouts
from pgcdc_assets.protocol.layouts import BETWEEN, BRACKETS, CARRY_XID, CONTENT, XLOG_DATA, MessageKind, WireLayout

_NOTHING: Final = 0
"""In the place of a letter, where neither a transaction nor a block is open."""
_XID_BYTES: Final = layouts.XID.size - 1


@dataclass(frozen=True)
class StreamPlace:
    """Where a stream stands between two frames."""

    opened: int = _NOTHING
    """The letter that began the transaction or the block which is open."""
    top: int = ABSENT
    """The xid of that block, or of the transaction that is to be prepared."""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring frames that belong to the blocks of one transaction, or to none.

    What comes from Begin Prepare to Prepare is one block: it, too, counts only once its transaction has committed.
    """

    start: int
    end: int
    top: int
    """ABSENT for those of no block."""


@dataclass(frozen=True)
class Located:
    """A run of frames, and one entry per frame of where it belongs."""

    run: FrameRun
    """In the form of protocol version 1, but for the beginnings and ends of blocks, and what stands between them."""
    top: Ints
    """The xid of the top transaction in whose block it stands, as a block's beginning and end do; ABSENT elsewhere."""
    subxid: Ints
    """The xid that the message carried, which its payload no longer has; ABSENT where it carried none. That of the
    transaction, where it comes whole at its PREPARE."""
    after: StreamPlace

    def stretches(self) -> Iterator[Stretch]:
        """All frames, in order. Blocks of one transaction that follow each other are one stretch."""
        edges = np.flatnonzero(np.diff(self.top)) + 1
        starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(self.run)]
        for start, end in zip(starts, ends, strict=True):
            if start < end:
                yield Stretch(start, end, int(self.top[start]))


def located(run: FrameRun, before: StreamPlace, *, parallel: bool) -> Located:
    """Where the frames of a run belong, given where the stream stood in front of it.

    ``parallel`` is whether streaming is: it decides the length of a Stream Abort. Raises ProtocolError for the first
    frame that stands where none of its kind can, or has a wrong length.
    """
    opened, wrong = _opened(run, before)
    starts, prepares = run.at(MessageKind.STREAM_START), run.at(MessageKind.BEGIN_PREPARE)
    if before.top == ABSENT and not len(starts) and not len(prepares):
        # Nothing of a block: by far the most runs of a stream of small transactions.
        _check(run, wrong | _misplaced(run, opened) | _wrong_lengths(run, parallel))
        nowhere: Ints = np.full(len(run), ABSENT, dtype=np.int64)
        return Located(run, nowhere, nowhere, _after(run, before, opened, ABSENT))
    streamed, whole = opened == MessageKind.STREAM_START, opened == MessageKind.BEGIN_PREPARE
    carrying = np.flatnonzero(streamed & _CARRIES[run.kinds])
    wrong |= _misplaced(run, opened) | _wrong_lengths(run, parallel)
    wrong[carrying] |= run.lengths[carrying] < HEADER + layouts.XID.size
    _check(run, wrong)
    begun = np.full(len(run), ABSENT, dtype=np.int64)
    begun[starts] = run.field(starts, layouts.STREAM_START, "xid")
    begun[prepares] = run.field(prepares, layouts.BEGIN_PREPARE, "xid")
    xids = np.concatenate(([before.top], begun[begun != ABSENT]))
    top: Ints = np.where(streamed | whole, xids[np.cumsum(begun != ABSENT)], ABSENT)
    subxid: Ints = np.where(whole & _CARRIES[run.kinds], top, ABSENT)
    subxid[carrying] = run.field(carrying, layouts.XID, "xid")
    after = _after(run, before, opened, int(xids[-1]))
    return Located(_without_xids(run, carrying), top, subxid, after)


def commit_frame(run: FrameRun, index: int) -> FrameRun:
    """A Stream Commit, or a Commit Prepared, as the Commit that protocol version 1 would have sent."""
    found = replace(run.part(index, index + 1), kinds=np.array([MessageKind.COMMIT], dtype=np.uint8))
    if run.kinds[index] == MessageKind.STREAM_COMMIT:
        return _without_xids(found, np.zeros(1, np.int64))
    # Its fields are the first ones of a Commit Prepared, in the same order.
    first, size = int(found.offsets[0]), HEADER + layouts.COMMIT.size
    raw = bytearray(memoryview(found.raw)[first : first + size])
    raw[HEADER] = MessageKind.COMMIT
    return replace(found, raw=raw, offsets=found.offsets - first, lengths=np.array([size], dtype=np.int64))


def _opened(run: FrameRun, before: StreamPlace) -> tuple[NDArray[np.uint8], Bools]:
    """For each frame, the letter of what is open around it (its own, where it begins or ends that); and which are
    beginnings within something open, or ends of something else.
    """
    places = np.flatnonzero(_IS_BRACKET[run.kinds])
    carried = before.opened != _NOTHING
    # What is open in front of the run is a beginning, too: then beginnings and ends take turns from the first on.
    front = np.array([before.opened] if carried else [], dtype=np.uint8)
    letters = np.concatenate((front, run.kinds[places]))
    wrong = np.zeros(len(run), dtype=bool)
    odd = np.zeros(len(letters), dtype=bool)
    odd[0::2] = ~_BEGINS[letters[0::2]]
    odd[1::2] = _END_OF[letters[: len(letters) - 1 : 2]] != letters[1::2]
    wrong[places] = odd[int(carried) :]
    # How many of them there are up to each frame. Behind an odd one something is open, behind an even one nothing; what
    # ends still belongs to what it ends.
    number = np.cumsum(_IS_BRACKET[run.kinds]) + int(carried)
    number[places] -= number[places] % 2 == 0
    state = np.zeros(len(letters) + 1, dtype=np.uint8)
    state[1::2] = letters[0::2]
    return state[number], wrong


def _misplaced(run: FrameRun, opened: NDArray[np.uint8]) -> Bools:
    """Frames that cannot stand within what is open around them."""
    wrong: Bools = ~_ALLOWED[_ROW_OF[opened], run.kinds]
    messages = run.at(MessageKind.MESSAGE)
    if len(messages):
        around = opened[messages]
        # Behind the xid, which only those of a block carry.
        at = HEADER + layouts.MESSAGE.at("flags") + _XID_BYTES * (around == MessageKind.STREAM_START)
        known = run.lengths[messages] > at
        flags = anywhere(run.raw, np.uint8)[run.offsets[messages] + np.where(known, at, 0)]
        transactional = known & (flags == 1)
        wrong[messages] |= (around == MessageKind.STREAM_START) & ~transactional
        wrong[messages] |= (around == _NOTHING) & transactional
    return wrong


def _wrong_lengths(run: FrameRun, parallel: bool) -> Bools:
    fixed = _LENGTHS_PARALLEL if parallel else _LENGTHS
    expected = fixed[run.kinds]
    wrong: Bools = (expected != 0) & (run.lengths != HEADER + expected)
    starts = run.at(MessageKind.STREAM_START)
    if len(starts):
        flag = np.where(wrong[starts], 0, HEADER + layouts.STREAM_START.at("first"))
        wrong[starts] |= (flag > 0) & (anywhere(run.raw, np.uint8)[run.offsets[starts] + flag] > 1)
    # The gid stands behind its fields.
    wrong |= (run.kinds == MessageKind.BEGIN_PREPARE) & (run.lengths <= HEADER + layouts.BEGIN_PREPARE.size)
    return wrong


def _check(run: FrameRun, wrong: Bools) -> None:
    found = np.flatnonzero(wrong)
    if len(found):
        first = int(found[0])
        raise ProtocolError(
            f"message {chr(run.kinds[first])} stands outside of its place or has a wrong length", lsn=run.lsn(first)
        )


def _after(run: FrameRun, before: StreamPlace, opened: NDArray[np.uint8], top: int) -> StreamPlace:
    if not len(run):
        return before
    if opened[-1] == _NOTHING or run.kinds[-1] == _END_OF[opened[-1]]:
        return StreamPlace()
    last = int(opened[-1])
    return StreamPlace(last, ABSENT if last == MessageKind.BEGIN else top)


def _without_xids(run: FrameRun, carrying: Ints) -> FrameRun:
    """The run with its own bytes, in which the xids are cut out of these frames.

    A frame begins four bytes later: its letter and what we read of its header (kind and LSN) move over the xid, and
    all that follows stays where it is. Of the header nothing else counts any more.
    """
    if not len(carrying):
        return run
    first, last = int(run.offsets[0]), int(run.offsets[-1] + run.lengths[-1])
    raw = bytearray(memoryview(run.raw)[first:last])
    offsets, lengths = run.offsets - first, run.lengths.copy()
    at = offsets[carrying]
    octets, lsns = anywhere(raw, np.uint8), anywhere(raw, XLOG_DATA.dtype["start"])
    lsn_at = XLOG_DATA.at("start")
    frame_kinds, starts = octets[at], lsns[at + lsn_at]
    octets[at + _XID_BYTES] = frame_kinds
    lsns[at + _XID_BYTES + lsn_at] = starts
    octets[at + _XID_BYTES + HEADER] = run.kinds[carrying]
    offsets[carrying] += _XID_BYTES
    lengths[carrying] -= _XID_BYTES
    return replace(run, raw=raw, offsets=offsets, lengths=lengths)


def _table(kinds: Iterable[int]) -> Bools:
    table = np.zeros(256, dtype=bool)
    table[list(kinds)] = True
    return table


def _lengths(*layouts_of: tuple[MessageKind, WireLayout]) -> Ints:
    """Bytes of each kind of message; 0 where they vary."""
    table: Ints = np.zeros(256, dtype=np.int64)
    for kind, layout in layouts_of:
        table[kind] = layout.size
    return table


_BEGINS: Final = _table(BRACKETS)
_IS_BRACKET: Final = _table([*BRACKETS, *BRACKETS.values()])
_CARRIES: Final = _table(CARRY_XID)
_END_OF: Final = np.zeros(256, dtype=np.uint8)
_END_OF[list(BRACKETS)] = list(BRACKETS.values())
_OPEN: Final = (_NOTHING, *BRACKETS)
_ROW_OF: Final = np.zeros(256, dtype=np.int64)
"""By what is open: the row of _ALLOWED."""
_ROW_OF[list(_OPEN)] = range(len(_OPEN))
_ALLOWED: Final = np.array([_table(BETWEEN), *(_table([*CONTENT, begin, end]) for begin, end in BRACKETS.items())])
_LENGTHS: Final = _lengths(
    (MessageKind.BEGIN, layouts.BEGIN),
    (MessageKind.COMMIT, layouts.COMMIT),
    (MessageKind.STREAM_START, layouts.STREAM_START),
    (MessageKind.STREAM_STOP, WireLayout()),
    (MessageKind.STREAM_COMMIT, layouts.STREAM_COMMIT),
    (MessageKind.STREAM_ABORT, layouts.STREAM_ABORT),
)
_LENGTHS_PARALLEL: Final = np.where(
    np.arange(256) == MessageKind.STREAM_ABORT, layouts.PARALLEL_STREAM_ABORT.size, _LENGTHS
)
