"""Frames of the streaming replication protocol: finds frames in received bytes, reads keepalives, and makes status
updates. :mod:`pgcdc_assets.protocol.layouts` defines the layouts. Times are microseconds since 2000-01-01 UTC.

Each frame is in a CopyData message: the byte ``d``, a big-endian length that includes its own four bytes, and the frame
(PostgreSQL's "Message Formats"). A Python loop over the messages would be too slow. So :func:`data_messages` first
finds, with numpy, all places that look like the beginning of a message. Of these it keeps the chain that starts at the
first byte, and in which each message ends where the next message begins. Bytes of a value may look like the beginning
of a message, but they are not in this chain.
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
"""Number of bytes of a CopyData message before its content: the kind and the length."""
_DATA: Final = ord("d")
_ALONE: Final = 1 << 20
"""If the first message has at least this many bytes, :func:`data_messages` returns only this message."""
_PAIR: Final = _DATA
"""The byte ``d`` followed by a zero byte, as a little-endian 16-bit number."""


@dataclass(frozen=True)
class FrameBlock:
    """Consecutive frames in one piece of memory, with the offset and length of each frame."""

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
        """The frames from ``start`` up to but not including ``end``. The bytes are shared, not copied."""
        return replace(self, offsets=self.offsets[start:end], lengths=self.lengths[start:end])

    def frame(self, index: int) -> bytes:
        offset = int(self.offsets[index])
        return self.raw[offset : offset + int(self.lengths[index])]


class Keepalive(NamedTuple):
    wal_end: Lsn
    """The server has sent all transactions that commit below this LSN."""
    reply_requested: bool


def keepalive(frame: bytes) -> Keepalive:
    """Parses a keepalive frame (``k``). Raises ProtocolError if the frame has another kind or length."""
    if len(frame) != KEEPALIVE.size or frame[0] != FrameKind.KEEPALIVE:
        raise ProtocolError(f"replication frame of kind {frame[:1]!r} and {len(frame)} bytes is not a keepalive")
    wal_end, _, reply = KEEPALIVE.struct.unpack_from(frame, 1)
    return Keepalive(Lsn(wal_end), bool(reply))


def keepalive_frame(wal_end: int) -> bytes:
    """Makes a keepalive frame (``k``) that does not ask for a reply."""
    return bytes([FrameKind.KEEPALIVE]) + KEEPALIVE.struct.pack(wal_end, 0, 0)


def status_update(write: int, flush: int, apply: int, now: int, reply: bool) -> bytes:
    """Makes a standby status update (``r``). ``now``: microseconds since 2000. ``reply``: whether to ask the server for
    a keepalive at once."""
    return bytes([FrameKind.STATUS]) + STATUS.struct.pack(write, flush, apply, now, reply)


def data_messages(octets: Octets) -> tuple[Ints, Ints]:
    """Finds the complete CopyData messages at the beginning of the bytes. Stops before an incomplete message, and
    before a message of another kind. Returns the start and the end of each message. If the first message has 1 MiB or
    more, returns only this message."""
    end = _end(octets, 0)
    if end is None:
        # The first message is incomplete. We do not search the bytes, because a large message arrives in thousands of
        # parts, and all its bytes would be searched again after each part.
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if end >= _ALONE:
        return np.array([0]), np.array([end])
    places = _look_alikes(octets)
    ends = _ends(octets, places)
    known = (ends - places >= HEADER) & (ends <= len(octets))
    places, ends = places[known], ends[known]
    # The indexes of candidates that do not end where the next candidate begins, and of the last candidate. There are
    # two causes: the next candidate is a false match inside this one, or a message between them is too long for the
    # search.
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
    """Places where the byte ``d`` is followed by two zero bytes, as at the beginning of a message of less than 64 KiB.
    Nearly all messages are that short, and few other places match."""
    last = len(octets) - HEADER
    # We search for pairs of bytes, at even and at odd places, because the byte ``d`` alone occurs in every text.
    even, odd = octets[: 2 * (last // 2 + 1)].view("<u2"), octets[1 : 1 + 2 * ((last + 1) // 2)].view("<u2")
    places = np.concatenate((2 * np.flatnonzero(even == _PAIR), 2 * np.flatnonzero(odd == _PAIR) + 1))
    places.sort(kind="stable")
    found: Ints = places[octets[places + 2] == 0]
    return found


def _end(octets: Octets, at: int) -> int | None:
    """The end of the CopyData message that begins at ``at``; None if no complete CopyData message begins there."""
    if at + HEADER > len(octets) or octets[at] != _DATA:
        return None
    end = int(_ends(octets, np.array([at]))[0])
    return end if at + HEADER <= end <= len(octets) else None


def _ends(octets: Octets, places: Ints) -> Ints:
    length = np.zeros(len(places), dtype=np.int64)
    for byte in range(1, HEADER):
        length = (length << 8) | octets[places + byte]
    return places + 1 + length
