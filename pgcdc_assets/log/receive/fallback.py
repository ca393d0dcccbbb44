"""Decides whether a connection asks for transactions in progress, or for whole ones alone.

Whole transactions come right where a stream does not. All versions of PostgreSQL from 14 to 18 fail to decode some
transactions while they are in progress ("could not map filenode", after a TRUNCATE that was rolled back to a
savepoint), at each connect anew, while they decode them after their commit. And of a logical message that was emitted
in such a transaction, PostgreSQL does not say whether it was rolled back with a savepoint; nor of a transaction that
begins with a change of the catalog, whether it has an origin.
"""

from __future__ import annotations

import time
from typing import Final

from pgcdc_assets.core.lsn import ZERO, Lsn

FALLBACK_SECONDS: Final = 60.0
_MOST_SECONDS: Final = 3600.0
"""How long whole transactions are asked for after the server's error, doubled from each to the next: at a new attempt
the server reads all of the open transactions again."""


class Fallback:
    """``streaming``: whether the settings allow it at all. ``seconds``: of whole transactions after the
    server's first error."""

    def __init__(self, streaming: bool, seconds: float = FALLBACK_SECONDS) -> None:
        self._streaming = streaming
        self._until = ZERO
        self._again_at = 0.0
        self._seconds = seconds

    @property
    def whole(self) -> bool:
        """Whether whole transactions alone are to be asked for now."""
        return not self._streaming or self._until > ZERO or time.monotonic() < self._again_at

    def until(self, lsn: Lsn) -> None:
        """Whole ones until a boundary at or above ``lsn`` is reached."""
        self._until = max(self._until, lsn)

    def failed(self) -> float:
        """The server could not decode what is in progress: whole ones for so many seconds."""
        seconds = self._seconds
        self._again_at = time.monotonic() + seconds
        self._seconds = min(2 * seconds, _MOST_SECONDS)
        return seconds

    def over(self, boundary: Lsn) -> bool:
        """Whether a connection that asked for whole ones may give way to one that streams: all that commits below this
        boundary has been sent."""
        if boundary >= self._until:
            self._until = ZERO
        return not self.whole
