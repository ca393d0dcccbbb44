"""Lets ``verify`` get a boundary at its own LSN from a running sync.

A snapshot of the source has an exact LSN C only as a slot's consistent point, and a running sync would pass C by. So
verify first places a request without an LSN: the sync then starts no further turn. Verify takes its snapshot, writes C
into the request, and the sync's next turn ends exactly at C and is published. A request is a locked file, so the
request of a verify that died does not hold up anything. Neither does one that is there for too long, whoever placed it:
a verify that stands still, or another program that locks the file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.lock import sole
from pgcdc_assets.store import lease
from pgcdc_assets.store.base import Lease
from pgcdc_assets.store.processname import ProcessName

UNNAMED_SECONDS: Final = 60.0
"""For so long a sync starts no turn for a request that names no LSN."""
NAMING_SECONDS: Final = UNNAMED_SECONDS / 2
"""Within this time verify names its LSN, or takes another snapshot: a sync that has gone on may have passed the LSN."""
NAMED_SECONDS: Final = 900.0
"""For so long a sync heeds a request that names its LSN. Verify waits for its point for ten minutes."""
_NO_LSN: Final = "-"


@dataclass(frozen=True)
class Hold:
    """A request in force. ``lsn`` is None until the snapshot is taken."""

    lsn: Lsn | None
    by: ProcessName | None = field(default=None, compare=False)
    """None if the request does not say who placed it."""
    tenure: str = field(default="", compare=False)
    """Tells one request from the next of the same process."""

    def __str__(self) -> str:
        who = f"`pgcdc verify` ({self.by.told})" if self.by else "a process that does not say who it is"
        return who if self.lsn is None else f"{who}, at {self.lsn}"


class HoldRequest:
    """Verify's side of the request."""

    def __init__(self, held: Lease) -> None:
        self._held = held
        self._placed = time.monotonic()
        self._say(None)

    def at(self, lsn: Lsn) -> None:
        """Ask for the boundary itself, once its LSN is known."""
        self._say(lsn)

    @property
    def is_late(self) -> bool:
        """Whether it is too late to name an LSN: place another request."""
        return time.monotonic() - self._placed > NAMING_SECONDS

    def _say(self, lsn: Lsn | None) -> None:
        self._held.say(f"{ProcessName.own()} {self._placed} {lsn or _NO_LSN}\n")


@contextmanager
def placed(layout: Layout) -> Iterator[HoldRequest]:
    """Place a request for the time of the block; LockHeld when another verify has one."""
    with sole(layout, layout.hold, lambda: f"{current(layout) or 'another `pgcdc verify`'} is at work") as held:
        yield HoldRequest(held)


def current(layout: Layout) -> Hold | None:
    """The request in force, if any."""
    text = lease.text_of_holder(layout.hold)
    if text is None:
        return None
    # A text without its newline is still being written.
    if not text.endswith("\n"):
        return Hold(None)
    try:
        process, placed_at, lsn = text.split()
        return Hold(None if lsn == _NO_LSN else Lsn.parse(lsn), ProcessName.parse(process), f"{process} {placed_at}")
    except MALFORMED:
        # Another program holds the file.
        return Hold(None)


class Requests:
    """A run's side: the requests that it heeds, each for a limited time."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: dict[str, float] = {}
        """When the request of each tenure was first seen; long ago if it is not heeded any more."""

    def current(self) -> Hold | None:
        """The request in force. One whose time is over is not heeded again, even if it names an LSN then."""
        found = current(self._layout)
        if found is None:
            self._seen.pop(Hold(None).tenure, None)
            return None
        now, limit = time.monotonic(), UNNAMED_SECONDS if found.lsn is None else NAMED_SECONDS
        if now - self._seen.setdefault(found.tenure, now) <= limit:
            return found
        self._seen[found.tenure] = float("-inf")
        return None
