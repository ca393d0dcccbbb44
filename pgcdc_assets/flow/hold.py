"""Lets ``verify`` get a boundary at its own LSN from a running sync.

A snapshot of the source has an exact LSN C only as a slot's consistent point, and a running sync would pass C by. So
verify first places a request without an LSN: the sync then starts no further turn. Verify takes its snapshot, writes C
into the request, and the sync's next turn ends exactly at C and is published. A request is a locked file, so the
request of a verify that died does not hold up anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.lock import sole
from pgcdc_assets.store import lease
from pgcdc_assets.store.base import Lease


@dataclass(frozen=True)
class Hold:
    """A request in force. ``lsn`` is None until the snapshot is taken."""

    lsn: Lsn | None


class HoldRequest:
    """Verify's side of the request."""

    def __init__(self, held: Lease) -> None:
        self._held = held

    def at(self, lsn: Lsn) -> None:
        """Ask for the boundary itself, once its LSN is known."""
        self._held.say(f"{lsn}\n")


@contextmanager
def placed(layout: Layout) -> Iterator[HoldRequest]:
    """Place a request for the time of the block; LockHeld when another verify has one."""
    with sole(layout, layout.hold, lambda: "another `pgcdc verify` is running") as held:
        yield HoldRequest(held)


def current(layout: Layout) -> Hold | None:
    """The sync's side: the request in force, if any."""
    text = lease.text_of_holder(layout.hold)
    if text is None:
        return None
    # A text without its newline is still being written.
    return Hold(Lsn.parse(text) if text.endswith("\n") else None)
