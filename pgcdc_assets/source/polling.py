"""All WAL through the SQL functions, for as long as a run lasts: where no replication connection can be had."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.protocol.frames import FrameBlock
from pgcdc_assets.source.drain import RELEASE_BYTES, Ranges
from pgcdc_assets.source.libpq import LibpqConnection

POLL_SECONDS: Final = 0.3
"""Between two looks at a source that has written nothing, and between two calls once all is read."""
ADVANCE_SECONDS: Final = 10.0
"""The slot moves this often at least: to advance decodes again what lies between (see RELEASE_BYTES)."""


class Polling(Ranges):
    """Calls as the source writes. Each reads from the oldest open transaction on, so behind one that brought all there
    was comes a rest of its own length: a transaction open for hours costs the source half a core at most."""

    def __init__(
        self, connection: LibpqConnection, slot: str, copy: str, position: Lsn, publications: Sequence[str],
        options: Mapping[str, str],
    ) -> None:  # fmt: skip
        super().__init__(connection, slot, copy, position, publications, options)
        self._asked = False
        self._answered = False
        self._began = self._rested = self._due = 0.0
        self._end = position
        """The source's flush position when the range under way began."""
        self._advance_due = time.monotonic() + ADVANCE_SECONDS

    @property
    def held(self) -> int:
        return self._wire.held + self._answered

    def take(self) -> FrameBlock:
        if self._answered:
            self._answered = False
            return self._boundary()
        return super().take()

    def ask(self) -> None:
        """Look at once, and say where the source stands, though nothing may have come."""
        self._asked = True

    def _next_range(self) -> None:
        now = time.monotonic()
        if now < (self._rested if self._asked else self._due):
            return
        late = now >= self._advance_due
        self._advance(1 if late else RELEASE_BYTES)
        if late:
            self._advance_due = now + ADVANCE_SECONDS
        self._end, restart = self._where()
        if self._end > self.position:
            self._began = now
            self._begin(restart, self._end)
        else:
            self._due = now + POLL_SECONDS
            self._answered |= self._asked
        self._asked = False

    def _ended(self) -> FrameBlock:
        boundary, now = super()._ended(), time.monotonic()
        behind = self.position < self._end
        self._rested = now if behind else now + (now - self._began)
        self._due = now if behind else max(self._rested, now + POLL_SECONDS)
        return boundary
