"""Reads all WAL of a run through the SQL functions, for sources that take no replication connections."""

from __future__ import annotations

import time
from typing import Any, Final

import psycopg

from pgcdc_assets.protocol.frames import FrameBlock
from pgcdc_assets.source.stream.drain import RangeLimits, Ranges, SlotCopy

SLOWEST_AGAIN: Final = 16 << 20
"""Bytes of WAL a second that a call decodes again at least, if an open transaction makes it do so."""


class Polling(Ranges):
    """Calls the functions as the source writes. Each call reads from the oldest open transaction on. So after a call
    that caught up, rest as long as it took: a transaction open for hours then costs the source at most half a core."""

    def __init__(self, copy: SlotCopy, beside: psycopg.Connection[Any], limits: RangeLimits) -> None:
        super().__init__(copy, beside, limits)
        self._asked = False
        self._answered = False
        self._began = self._rested = self._due = 0.0
        self._again = 0
        """Bytes of WAL that the current call reads again."""
        self._end = copy.position
        """The end of the source's WAL when the current range began."""
        self._advance_due = time.monotonic() + limits.advance_seconds

    @property
    def held(self) -> int:
        return self._wire.held + self._answered

    def take(self) -> FrameBlock:
        if self._answered:
            self._answered = False
            return self._boundary()
        return super().take()

    def ask(self) -> None:
        """Look at once, and report the source's position even if nothing has come."""
        self._asked = True

    def _next_range(self) -> None:
        now = time.monotonic()
        due = now >= (self._rested if self._asked else self._due)
        # Input between two calls, when nothing was asked for, is the end of the connection: the next command says so.
        if not due and not self._connection.wait(0):
            return
        late = now >= self._advance_due
        # Even if nothing has moved: a slot that is not touched counts as forgotten (idle_replication_slot_timeout).
        self._advance(0 if late else self._limits.release_bytes)
        if late:
            self._advance_due = now + self._limits.advance_seconds
        flushed, whole, restart = self._where()
        # Nothing durable is left out for good: once all else has come, the rest of a record is waited for.
        self._end = whole if whole > self.position else flushed
        if self._end > self.position:
            self._began, self._again = now, self.position - restart
            self._begin(restart, self._end)
        else:
            self._due = now + self._limits.poll_seconds
            self._answered |= self._asked
        self._asked = False

    def _ended(self) -> FrameBlock:
        boundary, now = super()._ended(), time.monotonic()
        behind = self.position < self._end
        # A call may also have waited, for us or for the source to write the rest of a record.
        work = min(now - self._began, self._again / SLOWEST_AGAIN)
        self._rested = now if behind else now + work
        self._due = now if behind else max(self._rested, now + self._limits.poll_seconds)
        return boundary
