"""Frames of the streaming replication protocol: finds frames in received bytes, and reads and makes small frames.

:mod:`pgcdc_assets.protocol.layouts` defines the layouts. Times here are microseconds since 2000-01-01 UTC.

Each frame is a data message of the connection (CopyData): a byte of kind, and a big-endian length that counts itself
("Message Formats"). Following the messages from length to length costs one Python step per message. So
:func:`data_messages` finds all places that look like the beginning of a message at once. It keeps the places that form
a chain from the first byte: each message ends where the next message begins. The bytes of a value can look like a
beginning, but no message ends right in front of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Ints, Octets
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.layouts import KEEPALIVE, STATUS, FrameKind

HEADER: Final = 5
"""Bytes of kind and length."""
_DATA: Final = ord("d")
_ALONE: Final = 1 << 20
"""A message of at least this many bytes is returned alone."""
_PAIR: Final = _DATA
"""The kind and the zero byte after it, as a little-endian number."""


@dataclass(frozen=True)
class FrameBlock:
    """Consecutive frames in one piece of memory, with the place of each frame."""

    raw: bytes
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, frames: Sequence[bytes | memoryview]) -> Self:
        lengths = np.fromiter(map(len, frames), np.int64, len(frames))
        return cls(b"".join(frames), np.cumsum(lengths) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, start: int, end: int) -> Self:
        """The frames from ``start`` to ``end``; shares the bytes."""
        return replace(self, offsets=self.offsets[start:end], lengths=self.lengths[start:end])

    def frame(self, index: int) -> bytes:
        offset = int(self.offsets[index])
        return self.raw[offset : offset + int(self.lengths[index])]


class Keepalive(NamedTuple):
    wal_end: Lsn
    """Everything below this LSN has been sent."""
    sent_at: int
    reply_requested: bool


def keepalive(frame: bytes) -> Keepalive:
    """Read a ``k`` frame. Raises ProtocolError for a frame of another kind or length."""
    if _kind(frame) != FrameKind.KEEPALIVE or len(frame) != KEEPALIVE.size:
        raise ProtocolError(f"replication frame of kind {frame[:1]!r} and {len(frame)} bytes is no keepalive")
    wal_end, sent_at, reply = KEEPALIVE.struct.unpack_from(frame, 1)
    return Keepalive(Lsn(wal_end), sent_at, bool(reply))


def keepalive_frame(wal_end: int) -> bytes:
    """A ``k`` frame that asks for no reply."""
    return bytes([FrameKind.KEEPALIVE]) + KEEPALIVE.struct.pack(wal_end, 0, 0)


def status_update(write: int, flush: int, apply: int, now: int, reply: bool) -> bytes:
    """An ``r`` frame. ``now`` is in the protocol's clock (since 2000); ``reply`` asks for an immediate keepalive."""
    return bytes([FrameKind.STATUS]) + STATUS.struct.pack(write, flush, apply, now, reply)


def _kind(frame: bytes) -> int:
    return frame[0] if frame else -1


def data_messages(octets: Octets) -> tuple[Ints, Ints]:
    """Starts and ends of whole data messages before any other message. A message of 1 MiB or more is returned alone."""
    end = _end(octets, 0)
    if end is None:
        # Do not search the bytes: the message may be large, and arrive in thousands of pieces.
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if end >= _ALONE:
        return np.array([0]), np.array([end])
    places = _look_alikes(octets)
    ends = _ends(octets, places)
    known = (ends - places >= HEADER) & (ends <= len(octets))
    places, ends = places[known], ends[known]
    # Messages whose end is not the next place: either that place is not a message, or no message follows.
    breaks = np.append(np.flatnonzero(ends[:-1] != places[1:]), len(places) - 1)
    starts: list[Ints] = []
    at = 0
    while True:
        first = places.searchsorted(at)
        if first < len(places) and places[first] == at:
            last = breaks[breaks.searchsorted(first)]
            starts.append(places[first : last + 1])
            at = int(ends[last])
        elif (end := _end(octets, at)) is not None:
            starts.append(np.array([at]))
            at = end
        else:
            break
    found = np.concatenate(starts)
    return found, np.append(found[1:], at)


def _look_alikes(octets: Octets) -> Ints:
    """Places of a data message's kind before two zero bytes. Few messages exceed 64 KiB, and few other bytes match."""
    last = len(octets) - HEADER
    # Search for pairs of bytes, at even and at odd places, because the kind's byte alone occurs in every text.
    even, odd = octets[: 2 * (last // 2 + 1)].view("<u2"), octets[1 : 1 + 2 * ((last + 1) // 2)].view("<u2")
    places = np.concatenate((2 * np.flatnonzero(even == _PAIR), 2 * np.flatnonzero(odd == _PAIR) + 1))
    places.sort(kind="stable")
    found: Ints = places[octets[places + 2] == 0]
    return found


def _end(octets: Octets, at: int) -> int | None:
    """The end of the data message that begins at ``at``; None if no whole data message begins there."""
    if at + HEADER > len(octets) or octets[at] != _DATA:
        return None
    end = int(_ends(octets, np.array([at]))[0])
    return end if at + HEADER <= end <= len(octets) else None


def _ends(octets: Octets, places: Ints) -> Ints:
    length = np.zeros(len(places), dtype=np.int64)
    for byte in range(1, HEADER):
        length = (length << 8) | octets[places + byte]
    return places + 1 + length
