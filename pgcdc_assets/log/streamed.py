"""Finds the frames that belong to transactions in progress, with numpy. The server sends these transactions in blocks,
from Stream Start to Stream Stop (rules: :mod:`pgcdc_assets.protocol.decode`). Converts the messages of blocks to the
form of protocol version 1, which is the only form that the log and all later steps use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Bools, Ints
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.framerun import HEADER, FrameRun, anywhere, table_of_kinds
from pgcdc_assets.log.rows import ABSENT
from pgcdc_assets.protocol import layouts
from pgcdc_assets.protocol.layouts import BETWEEN, BRACKETS, CARRY_XID, CONTENT, XLOG_DATA, MessageKind, WireLayout

_NOTHING: Final = 0
"""Used instead of a message letter if neither a transaction nor a block is open."""
_XID_BYTES: Final = layouts.XID.size - 1


@dataclass(frozen=True)
class StreamPlace:
    """The state of a stream between two frames."""

    opened: int = _NOTHING
    """The letter of the message that began the open transaction or block."""
    top: int = ABSENT
    """The xid of the open block's top transaction, or of the transaction between Begin Prepare and Prepare; otherwise
    ABSENT."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive frames (``start`` up to but not including ``end``) that belong to blocks of one transaction, or to no
    block. The frames from Begin Prepare to Prepare also form a block, because their transaction has not committed."""

    start: int
    end: int
    top: int
    """The xid of the top transaction; ABSENT for frames that belong to no block."""


@dataclass(frozen=True)
class Located:
    """Frames, and the transaction to which each frame belongs."""

    run: FrameRun
    """The frames. Messages inside blocks have the form of protocol version 1; the other messages are unchanged."""
    top: Ints
    """For frames of a block, including its start and end, the xid of the top transaction; otherwise ABSENT."""
    subxid: Ints
    """For each frame, the xid that was removed from its message; ABSENT if the message had no xid. For messages between
    Begin Prepare and Prepare, the transaction's xid."""
    after: StreamPlace
    """The state of the stream after these frames."""

    def stretches(self) -> Iterator[Stretch]:
        """All frames, in order. Consecutive blocks of one transaction are one stretch."""
        edges = np.flatnonzero(np.diff(self.top)) + 1
        starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(self.run)]
        for start, end in zip(starts, ends, strict=True):
            if start < end:
                yield Stretch(start, end, int(self.top[start]))


def located(run: FrameRun, before: StreamPlace, *, parallel: bool) -> Located:
    """Finds the transaction to which each frame belongs. ``before`` is the state of the stream before these frames.
    ``parallel``: whether the stream has the option streaming = parallel, which makes a Stream Abort longer. Raises
    ProtocolError for the first frame that is not allowed where it is, or has a wrong length."""
    opened, wrong = _opened(run, before)
    starts, prepares = run.at(MessageKind.STREAM_START), run.at(MessageKind.BEGIN_PREPARE)
    if before.top == ABSENT and not len(starts) and not len(prepares):
        # There is no block. With small transactions this is the usual case.
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
    """Converts a Stream Commit or a Commit Prepared to the Commit of protocol version 1."""
    found = replace(run.part(index, index + 1), kinds=np.array([MessageKind.COMMIT], dtype=np.uint8))
    if run.kinds[index] == MessageKind.STREAM_COMMIT:
        return _without_xids(found, np.zeros(1, np.int64))
    # A Commit Prepared begins with the fields of a Commit, in the same order.
    first, size = int(found.offsets[0]), HEADER + layouts.COMMIT.size
    raw = bytearray(memoryview(found.raw)[first : first + size])
    raw[HEADER] = MessageKind.COMMIT
    return replace(found, raw=raw, offsets=found.offsets - first, lengths=np.array([size], dtype=np.int64))


def _opened(run: FrameRun, before: StreamPlace) -> tuple[NDArray[np.uint8], Bools]:
    """For each frame, the letter of the message that opened the transaction or block around the frame. A start or end
    message belongs to the transaction or block that it starts or ends. Also returns which frames are wrong: start
    messages inside an open transaction or block, and end messages that do not match the start message before them."""
    places = np.flatnonzero(_IS_BRACKET[run.kinds])
    carried = before.opened != _NOTHING
    # Prepend the letter of the transaction or block that is already open. Then starts and ends must alternate.
    front = np.array([before.opened] if carried else [], dtype=np.uint8)
    letters = np.concatenate((front, run.kinds[places]))
    wrong = np.zeros(len(run), dtype=bool)
    odd = np.zeros(len(letters), dtype=bool)
    odd[0::2] = ~_BEGINS[letters[0::2]]
    odd[1::2] = _END_OF[letters[: len(letters) - 1 : 2]] != letters[1::2]
    wrong[places] = odd[int(carried) :]
    # Count the starts and ends up to and including each frame. An odd number means that a transaction or block is open.
    # The end itself gets the odd number before it, because it belongs to the transaction or block that it ends.
    number = np.cumsum(_IS_BRACKET[run.kinds]) + int(carried)
    number[places] -= number[places] % 2 == 0
    state = np.zeros(len(letters) + 1, dtype=np.uint8)
    state[1::2] = letters[0::2]
    return state[number], wrong


def _misplaced(run: FrameRun, opened: NDArray[np.uint8]) -> Bools:
    """Marks the frames that are not allowed inside the transaction or block around them."""
    wrong: Bools = ~_ALLOWED[_ROW_OF[opened], run.kinds]
    messages = run.at(MessageKind.MESSAGE)
    if len(messages):
        around = opened[messages]
        # The flags follow the xid, which only messages inside a block contain.
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
    # A Begin Prepare must be longer than its fixed fields, because a gid follows them.
    wrong |= (run.kinds == MessageKind.BEGIN_PREPARE) & (run.lengths <= HEADER + layouts.BEGIN_PREPARE.size)
    return wrong


def _check(run: FrameRun, wrong: Bools) -> None:
    found = np.flatnonzero(wrong)
    if len(found):
        first = int(found[0])
        raise ProtocolError(
            f"message {chr(run.kinds[first])} is not allowed here or has a wrong length", lsn=run.lsn(first)
        )


def _after(run: FrameRun, before: StreamPlace, opened: NDArray[np.uint8], top: int) -> StreamPlace:
    if not len(run):
        return before
    if opened[-1] == _NOTHING or run.kinds[-1] == _END_OF[opened[-1]]:
        return StreamPlace()
    last = int(opened[-1])
    return StreamPlace(last, ABSENT if last == MessageKind.BEGIN else top)


def _without_xids(run: FrameRun, carrying: Ints) -> FrameRun:
    """Copies the frames, and cuts the xid out of each message in ``carrying``. Such a frame then begins four bytes
    later. The message letter, and the header fields that we read (frame kind and LSN), are moved by four bytes, so that
    the letter overwrites the xid's last byte. The other header fields become invalid."""
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


def _lengths(*layouts_of: tuple[MessageKind, WireLayout]) -> Ints:
    """A table with the length in bytes of each kind of message; 0 if the length varies or is not checked."""
    table: Ints = np.zeros(256, dtype=np.int64)
    for kind, layout in layouts_of:
        table[kind] = layout.size
    return table


_BEGINS: Final = table_of_kinds(BRACKETS)
_IS_BRACKET: Final = table_of_kinds([*BRACKETS, *BRACKETS.values()])
_CARRIES: Final = table_of_kinds(CARRY_XID)
_END_OF: Final = np.zeros(256, dtype=np.uint8)
_END_OF[list(BRACKETS)] = list(BRACKETS.values())
_OPEN: Final = (_NOTHING, *BRACKETS)
_ROW_OF: Final = np.zeros(256, dtype=np.int64)
"""Maps the letter that opened the transaction or block (or _NOTHING) to its row in _ALLOWED."""
_ROW_OF[list(_OPEN)] = range(len(_OPEN))
_ALLOWED: Final = np.array(
    [table_of_kinds(BETWEEN), *(table_of_kinds([*CONTENT, begin, end]) for begin, end in BRACKETS.items())]
)
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
