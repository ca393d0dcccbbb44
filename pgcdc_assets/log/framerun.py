"""Received replication frames in memory: unchanged bytes, and numpy arrays with the offset and kind of each frame. The
byte layouts are in :mod:`pgcdc_assets.protocol.layouts`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pgcdc_assets.core.arrays import Ints
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.frames import FrameBlock
from pgcdc_assets.protocol.layouts import (
    BEGIN,
    CHANGE,
    CHANGES,
    COMMIT,
    CONTENT,
    EPOCH,
    ROWS,
    TABLE_CHANGES,
    XLOG_DATA,
    FrameKind,
    MessageKind,
    WireLayout,
)
from pgcdc_assets.protocol.messages import Message

Raw = bytes | bytearray
"""The bytes of frames. They never change once they are part of a :class:`FrameRun`."""
Records = NDArray[Any]

HEADER = XLOG_DATA.size
"""Bytes of an XLogData frame before its message. A frame that is not longer than this is a keepalive."""


def table_of_kinds(kinds: Iterable[int]) -> NDArray[np.bool_]:
    """A lookup table with an entry per byte value: whether this value is in ``kinds``."""
    table = np.zeros(256, dtype=bool)
    table[list(kinds)] = True
    return table


IS_ROW = table_of_kinds(ROWS)
IS_TABLE_CHANGE = table_of_kinds(TABLE_CHANGES)
IS_MESSAGE = table_of_kinds([MessageKind.MESSAGE])
IS_CHANGE = table_of_kinds(CHANGES)
"""Kinds of messages that are changes. The log's column ``tx_ordinal`` numbers the changes of a transaction."""
IS_CONTROL = table_of_kinds(kind for kind in CONTENT if kind not in ROWS)
"""Kinds of messages that are rare enough to be decoded one by one."""
_FRAME_BYTES = 64
"""Bytes per frame that :attr:`FrameRun.footprint` adds to the frame's length. If rows are short, the columns of a
segment take more memory than its messages."""


@dataclass(frozen=True)
class Brackets:
    """The Begin and Commit messages of a :class:`FrameRun`, in order: their frame numbers and fields."""

    begins: Ints
    """The frame number of each Begin. ``final_lsn``, ``commit_ts`` and ``xid`` have the fields of each Begin."""
    final_lsn: Ints
    commit_ts: Ints
    """Microseconds since 1970."""
    xid: Ints
    commits: Ints
    """The frame number of each Commit. ``end_lsn`` has the field of this name of each Commit."""
    end_lsn: Ints

    def part(self, start: int, end: int) -> Brackets:
        """The messages in the frames from ``start`` up to but not including ``end``. Their new frame numbers count from
        ``start``."""
        begun, ended = (slice(*np.searchsorted(at, (start, end))) for at in (self.begins, self.commits))
        return Brackets(
            self.begins[begun] - start,
            self.final_lsn[begun],
            self.commit_ts[begun],
            self.xid[begun],
            self.commits[ended] - start,
            self.end_lsn[ended],
        )


@dataclass(frozen=True)
class FrameRun:
    """Consecutive frames of the stream: their bytes, and arrays with one entry per frame."""

    raw: Raw
    offsets: Ints
    lengths: Ints
    kinds: NDArray[np.uint8]
    sequence: Ints
    """Each frame's number in the stream. It decides which Relation message applies to the frame."""

    @classmethod
    def of(cls, frames: FrameBlock, first: int) -> FrameRun:
        """Index XLogData frames, or rows of pg_logical_slot_get_binary_changes that have the layout of XLogData.
        ``first``: the number of the first frame in the stream. Raises ProtocolError for frames of any other kind."""
        raw, offsets, lengths = frames.raw, frames.offsets, frames.lengths
        octets = np.frombuffer(raw, np.uint8)
        begins = octets[offsets]
        if (lengths <= HEADER).any() or ((begins != FrameKind.XLOG_DATA) & (begins != FrameKind.ROW)).any():
            raise ProtocolError("a replication frame is neither XLogData nor a keepalive")
        return cls(raw, offsets, lengths, octets[offsets + HEADER], np.arange(first, first + len(frames)))

    def __len__(self) -> int:
        return len(self.kinds)

    def part(self, start: int, end: int) -> FrameRun:
        """The frames from ``start`` up to but not including ``end``. The bytes are shared, not copied."""
        part = replace(
            self,
            offsets=self.offsets[start:end],
            lengths=self.lengths[start:end],
            kinds=self.kinds[start:end],
            sequence=self.sequence[start:end],
        )
        # cached_property keeps its value in __dict__.
        part.__dict__["brackets"] = self.brackets.part(start, end)
        return part

    def without(self, gone: NDArray[np.bool_]) -> FrameRun:
        """The frames that are not marked in ``gone``. Copies their bytes, to free the memory of the marked frames."""
        left = np.flatnonzero(~gone)
        first = np.flatnonzero(np.diff(left, prepend=-2) != 1)
        ends = np.append(first, len(left))[1:]
        pieces: list[memoryview] = []
        offsets = self.offsets[left].copy()
        base = 0
        for begin, end in zip(first.tolist(), ends.tolist(), strict=True):
            start = int(offsets[begin])
            stop = int(offsets[end - 1] + self.lengths[left[end - 1]])
            pieces.append(memoryview(self.raw)[start:stop])
            offsets[begin:end] += base - start
            base += stop - start
        return FrameRun(b"".join(pieces), offsets, self.lengths[left], self.kinds[left], self.sequence[left])

    @cached_property
    def brackets(self) -> Brackets:
        """The Begin and Commit messages, found once and shared with :meth:`part`. Raises ProtocolError if the length of
        a message is wrong."""
        begins, commits = self.at(MessageKind.BEGIN), self.at(MessageKind.COMMIT)
        check_lengths(self, begins, BEGIN)
        check_lengths(self, commits, COMMIT)
        begun, ended = self._records(begins, BEGIN), self._records(commits, COMMIT)
        return Brackets(
            begins,
            begun["final_lsn"].astype(np.int64),
            begun["commit_ts"].astype(np.int64) + EPOCH,
            begun["xid"].astype(np.int64),
            commits,
            ended["end_lsn"].astype(np.int64),
        )

    @property
    def size(self) -> int:
        return int(self.lengths.sum())

    @property
    def footprint(self) -> int:
        """An estimate of memory in bytes: for the frames, and later for the rows that are made from them."""
        return self.size + _FRAME_BYTES * len(self)

    def at(self, kind: MessageKind) -> Ints:
        """The numbers of the frames that contain a message of this kind."""
        # Compare with a plain int: for an enum member, numpy's overhead costs as much as the search.
        return np.flatnonzero(self.kinds == int(kind))

    def payload(self, index: int) -> bytes:
        offset = int(self.offsets[index])
        return bytes(self.raw[offset + HEADER : offset + int(self.lengths[index])])

    def lsn(self, index: int) -> Lsn:
        offset = int(self.offsets[index])
        return Lsn(XLOG_DATA.struct.unpack_from(self.raw, offset + 1)[0])

    def message(self, index: int) -> Message:
        return decode(self.payload(index), self.lsn(index))

    def starts(self, index: Ints) -> Ints:
        """The start LSN in the header of each of these frames."""
        return self._numbers(index, XLOG_DATA.at("start"), XLOG_DATA.dtype["start"])

    def relation_ids(self, index: Ints) -> Ints:
        """The relation id at the beginning of the message in each of these frames."""
        return self.field(index, CHANGE, "relation_id")

    def field(self, index: Ints, layout: WireLayout, name: str) -> Ints:
        """The field ``name`` of the message in each of these frames. All these messages must have this layout."""
        return self._numbers(index, HEADER + layout.at(name), layout.dtype[name])

    def _numbers(self, index: Ints, at: int, dtype: np.dtype[Any]) -> Ints:
        return anywhere(self.raw, dtype)[self.offsets[index] + at].astype(np.int64, copy=False)

    def _records(self, index: Ints, layout: WireLayout) -> Records:
        return anywhere(self.raw, layout.dtype)[self.offsets[index] + HEADER]


def anywhere(raw: Raw, kind: DTypeLike) -> Records:
    """A view of ``raw`` as an array of overlapping values: value i begins at byte i. It reads many values in one step,
    or writes them if ``raw`` is writable."""
    dtype = np.dtype(kind)
    return np.ndarray((max(len(raw) - dtype.itemsize + 1, 0),), dtype, raw, strides=(1,))


def joined(runs: Sequence[FrameRun]) -> FrameRun:
    """Joins consecutive frame runs into one. Copies only the bytes of their frames."""
    held = [run for run in runs if len(run)]
    if not held:
        empty = np.zeros(0, dtype=np.int64)
        return FrameRun(b"", empty, empty, np.zeros(0, dtype=np.uint8), empty)
    pieces: list[memoryview] = []
    offsets: list[Ints] = []
    base = 0
    for run in held:
        start, end = int(run.offsets[0]), int(run.offsets[-1] + run.lengths[-1])
        pieces.append(memoryview(run.raw)[start:end])
        offsets.append(run.offsets + (base - start))
        base += end - start
    return FrameRun(
        b"".join(pieces),
        np.concatenate(offsets),
        np.concatenate([run.lengths for run in held]),
        np.concatenate([run.kinds for run in held]),
        np.concatenate([run.sequence for run in held]),
    )


def check_lengths(run: FrameRun, index: Ints, layout: WireLayout) -> None:
    """Raises ProtocolError if the message in one of these frames is not exactly as long as the layout."""
    wrong = np.flatnonzero(run.lengths[index] != HEADER + layout.size)
    if len(wrong):
        first = int(index[wrong[0]])
        raise ProtocolError(f"message {chr(run.kinds[first])} has a wrong length", lsn=run.lsn(first))
