"""Frames of the streaming replication protocol, inside CopyData.

Layouts (big-endian) of "Streaming Replication Protocol":

    w  XLogData                 i64 start, i64 wal_end, i64 sent_at, then the message
    k  keepalive                i64 wal_end, i64 sent_at, u8 reply_requested
    r  standby status update    i64 write, i64 flush, i64 apply, i64 now, u8 reply_requested

Times here are the protocol's own clock: microseconds since 2000-01-01 UTC (:data:`EPOCH` since 1970).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.decode import EPOCH

__all__ = ["EPOCH", "KEEPALIVE", "ROW", "XLOG_DATA", "XLOG_HEADER", "FrameBlock", "Keepalive", "XLogData", "keepalive",
           "keepalive_frame", "status_update", "xlog_data"]  # fmt: skip

XLOG_DATA: Final = ord("w")
"""First byte of a frame that carries a message."""
ROW: Final = 8
"""First byte of a row of the SQL functions that is read as such a frame: there stands the length of its LSN."""
KEEPALIVE: Final = ord("k")
"""First byte of a keepalive."""
XLOG_HEADER: Final = Struct("!cQQq")
"""25 bytes before the message. ``start`` is never progress: 0/0 for R and Y, first_lsn for B."""

_KEEPALIVE = Struct("!cQqB")
_STATUS = Struct("!cQQQqB")


@dataclass(frozen=True)
class FrameBlock:
    """Consecutive frames in one piece of memory, and where in it each one lies."""

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


class XLogData(NamedTuple):
    start: Lsn
    """WAL position of the message."""
    wal_end: Lsn
    sent_at: int
    message: bytes


class Keepalive(NamedTuple):
    wal_end: Lsn
    """All that lies before it has been sent."""
    sent_at: int
    reply_requested: bool


def xlog_data(frame: bytes) -> XLogData:
    """Read a ``w`` frame; ProtocolError if it is none or too short."""
    if frame[:1] != b"w" or len(frame) < XLOG_HEADER.size:
        raise ProtocolError(f"replication frame of kind {frame[:1]!r} and {len(frame)} bytes is no XLogData")
    _, start, wal_end, sent_at = XLOG_HEADER.unpack_from(frame)
    return XLogData(Lsn(start), Lsn(wal_end), sent_at, frame[XLOG_HEADER.size :])


def keepalive(frame: bytes) -> Keepalive:
    """Read a ``k`` frame; ProtocolError if it is none or of another length."""
    if frame[:1] != b"k" or len(frame) != _KEEPALIVE.size:
        raise ProtocolError(f"replication frame of kind {frame[:1]!r} and {len(frame)} bytes is no keepalive")
    _, wal_end, sent_at, reply = _KEEPALIVE.unpack(frame)
    return Keepalive(Lsn(wal_end), sent_at, bool(reply))


def keepalive_frame(wal_end: int) -> bytes:
    """A ``k`` frame that asks for no reply."""
    return _KEEPALIVE.pack(b"k", wal_end, 0, 0)


def status_update(write: int, flush: int, apply: int, now: int, reply: bool) -> bytes:
    """An ``r`` frame. ``now`` is the protocol's clock (since 2000); ``reply`` asks for a keepalive at once."""
    return _STATUS.pack(b"r", write, flush, apply, now, reply)
