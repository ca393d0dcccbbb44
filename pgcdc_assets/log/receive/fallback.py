"""Decides whether a connection asks for transactions in progress, or only for whole transactions.

Whole transactions are always right, but streamed transactions are not, in three cases:
- All versions of PostgreSQL from 14 to 18 fail to decode some transactions while they are in progress ("could not map
  filenode", after a TRUNCATE that was rolled back to a savepoint). They fail again at each connect, but succeed after
  the commit of the transaction.
- For a logical message in a streamed transaction, PostgreSQL does not say whether the message was rolled back with a
  savepoint.
- For a streamed transaction that begins with a change of the catalog, PostgreSQL does not say whether it has an origin.
"""

from __future__ import annotations

import time
from typing import Final

from pgcdc_assets.core.lsn import ZERO, Lsn

FALLBACK_SECONDS: Final = 60.0
_MOST_SECONDS: Final = 3600.0
"""The longest time for which whole transactions are requested after a server error. The time doubles with each error,
because at each new attempt the server reads all open transactions again."""


class Fallback:
    """``streaming``: whether the settings allow streaming. ``seconds``: how long whole transactions are requested after
    the server's first error."""

    def __init__(self, streaming: bool, seconds: float = FALLBACK_SECONDS) -> None:
        self._streaming = streaming
        self._until = ZERO
        self._again_at = 0.0
        self._seconds = seconds

    @property
    def whole(self) -> bool:
        """Whether to ask only for whole transactions now."""
        return not self._streaming or self._until > ZERO or time.monotonic() < self._again_at

    def until(self, lsn: Lsn) -> None:
        """Ask for whole transactions until a boundary at or above ``lsn`` is reached."""
        self._until = max(self._until, lsn)

    def failed(self) -> float:
        """The server could not decode a transaction in progress. Returns for how many seconds to ask for whole
        transactions."""
        seconds = self._seconds
        self._again_at = time.monotonic() + seconds
        self._seconds = min(2 * seconds, _MOST_SECONDS)
        return seconds

    def over(self, boundary: Lsn) -> bool:
        """Whether a connection that streams may replace a connection that asked for whole transactions. Everything that
        commits below ``boundary`` has been sent."""
        if boundary >= self._until:
            self._until = ZERO
        return not self.whole
