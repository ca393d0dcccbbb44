"""Frames of the streaming replication protocol, inside CopyData.

:mod:`pgcdc_assets.protocol.layouts` defines the layouts. Times here are in the protocol's own clock: microseconds since
2000-01-01 UTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.layouts import KEEPALIVE, STATUS, FrameKind


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
