"""Requests by which ``verify`` gets a consistent point at the LSN of its snapshot from a running sync.

The exact LSN C of a snapshot is known only once the snapshot has been taken, as the consistent point of a new slot. By
that time a running sync might have passed C. So verify first places a request without an LSN, and the sync then starts
no further turn. Verify takes its snapshot and writes C into the request. The sync's next turn ends exactly at C, and
its point is published.

A request is a locked file, so the request of a verify that died has no effect. A request that lasts too long has no
effect either, be it of a verify that hangs, or of another program that locks the file.
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
"""How long a sync starts no turn because of a request without an LSN."""
NAMING_SECONDS: Final = UNNAMED_SECONDS / 2
"""Within this time verify names its LSN. After this time it takes another snapshot, because a sync that has continued
may have passed the LSN."""
NAMED_SECONDS: Final = 900.0
"""How long a sync obeys a request that names an LSN. Verify waits for its point for ten minutes."""
_NO_LSN: Final = "-"


@dataclass(frozen=True)
class Hold:
    """A request in force. ``lsn`` is None while the snapshot has not been taken."""

    lsn: Lsn | None
    by: ProcessName | None = field(default=None, compare=False)
    """The process that placed the request; None if the request does not say it."""
    tenure: str = field(default="", compare=False)
    """Distinguishes two requests of the same process."""

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
        """Ask for a boundary at this LSN."""
        self._say(lsn)

    @property
    def is_late(self) -> bool:
        """Whether it is too late to name an LSN, so that another request is needed."""
        return time.monotonic() - self._placed > NAMING_SECONDS

    def _say(self, lsn: Lsn | None) -> None:
        self._held.say(f"{ProcessName.own()} {self._placed} {lsn or _NO_LSN}\n")


@contextmanager
def placed(layout: Layout) -> Iterator[HoldRequest]:
    """Place a request during the block. LockHeld if another verify has placed a request."""
    with sole(layout, layout.hold, lambda: f"{current(layout) or 'another `pgcdc verify`'} is at work") as held:
        yield HoldRequest(held)


def current(layout: Layout) -> Hold | None:
    """The request in force; None if there is no request."""
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
    """The run's side: the requests that the run obeys, each for a limited time."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: dict[str, float] = {}
        """When the request of each tenure was first seen; minus infinity if the request's time is over."""

    def current(self) -> Hold | None:
        """The request in force; None if there is no request, or if its time is over. A request whose time is over stays
        without effect, even if it then names an LSN."""
        found = current(self._layout)
        if found is None:
            self._seen.pop(Hold(None).tenure, None)
            return None
        now, limit = time.monotonic(), UNNAMED_SECONDS if found.lsn is None else NAMED_SECONDS
        if now - self._seen.setdefault(found.tenure, now) <= limit:
            return found
        self._seen[found.tenure] = float("-inf")
        return None
