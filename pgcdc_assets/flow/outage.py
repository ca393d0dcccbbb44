"""The pauses of a sync in follow mode while the source is unreachable. Each is twice the last, up to LONGEST_PAUSE."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow.decide import Bounds

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Seconds. A server restarts in a few seconds. A server that is unreachable for hours is tried once a minute."""
_LOOK_SECONDS: Final = 0.2


class Outage:
    """The pauses of one sync. ``say`` reports each pause to people."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pause = FIRST_PAUSE
        self._tried: float | None = None
        self._lost_at = 0.0

    def tries(self) -> None:
        """Note that a run of the sync begins, or tries to begin."""
        self._tried = time.monotonic()

    def waited(self, why: PgcdcError, bounds: Bounds) -> bool:
        """Pause before the next try. False if the bounds end the sync during the pause."""
        now = time.monotonic()
        if self._tried is None or now - self._tried > LONGEST_PAUSE:
            # The last try began long ago, so the sync was connected after it, and this is a new outage.
            self._pause, self._lost_at = FIRST_PAUSE, now
        self._say(f"{why}; next try in {self._pause:g} s")
        ends = [] if bounds.max_seconds is None else [now + bounds.max_seconds]
        ends += [] if bounds.idle_seconds is None else [self._lost_at + bounds.idle_seconds]
        next_try = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        while (now := time.monotonic()) < next_try:
            if bounds.stopped or any(now >= end for end in ends):
                return False
            bounds.stop.wait(min(_LOOK_SECONDS, next_try - now))
        return not bounds.stopped
