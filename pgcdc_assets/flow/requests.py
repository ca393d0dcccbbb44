"""Requests to the syncs of a lake, as files in the lake. A sync reads these files between its turns.

**The operator's requests**: the LSN at which follow mode ends, and whether changes are applied. The idea comes from
pgcopydb's sentinel. Each request is a separate file, so that no command overwrites the other request. A request applies
to all syncs, also to those that the sensor starts, until it is withdrawn.

**The request of ``verify``**: ``verify`` needs a consistent point at the LSN C of its snapshot, and asks a running sync
to make it. PostgreSQL reports C only after the snapshot is taken, and the mirrors could pass C before ``verify`` knows
it. So ``verify`` first places a request without an LSN. The sync then starts no turn. ``verify`` takes its snapshot and
writes C into the request. The sync's next turn ends exactly at C, and publishes a point there. The request is a locked
file, so it ends with the process of ``verify``. The sync ignores a request that lasts too long, because ``verify`` may
hang, or another program may have locked the file. But as long as the request names C, the point at C is not deleted,
because ``verify`` may read its mirrors for hours.
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
from pgcdc_assets.errors import LakeError
from pgcdc_assets.flow.lock import sole
from pgcdc_assets.store import lease, storage
from pgcdc_assets.store.base import Lease
from pgcdc_assets.store.lease import ProcessName


@dataclass(frozen=True)
class OperatorRequests:
    endpos: Lsn | None = None
    """A sync in follow mode ends at the last boundary at or below this LSN or, if it has passed the LSN already, at its
    present position. None: follow mode has no end LSN."""
    paused: bool = False
    """Whether applying is paused. Changes are then only stored in the change log, so that the slot still advances."""

    def reached(self, position: Lsn) -> bool:
        """Whether a log at ``position`` has reached the LSN at which follow mode ends."""
        return self.endpos is not None and position >= self.endpos


def operator_requests(layout: Layout) -> OperatorRequests:
    """The operator's present requests. LakeError if the file of ``endpos`` does not contain an LSN."""
    try:
        text = storage.read(layout.endpos).decode(errors="replace").strip()
    except FileNotFoundError:
        text = ""
    try:
        endpos = Lsn.parse(text) if text else None
    except ValueError:
        raise LakeError(
            "does not contain an LSN", thing=str(layout.endpos), do="set the LSN again with `pgcdc until`"
        ) from None
    return OperatorRequests(endpos, storage.exists(layout.apply_paused))


def apply_paused(layout: Layout) -> LakeError:
    """The error for operations that would change mirrors although applying is paused."""
    return LakeError(
        "applying is paused, so mirrors cannot be changed",
        thing=f"lake {layout.root}",
        do="run `pgcdc resume apply`",
    )


def follow_until(layout: Layout, lsn: Lsn | None) -> None:
    """Make every sync in follow mode end at ``lsn``. None withdraws the request."""
    if lsn is None:
        storage.delete([layout.endpos])
    else:
        storage.replace(layout.endpos, f"{lsn}\n".encode())


def pause_apply(layout: Layout, *, paused: bool) -> bool:
    """Pause applying, or resume it; returns whether this changed anything."""
    before = storage.exists(layout.apply_paused)
    if paused and not before:
        storage.replace(layout.apply_paused, b"")
    elif before and not paused:
        storage.delete([layout.apply_paused])
    return before is not paused


UNNAMED_SECONDS: Final = 60.0
"""Seconds for which a request without an LSN prevents new turns of the sync."""
NAMING_SECONDS: Final = UNNAMED_SECONDS / 2
"""``verify`` must name its LSN within this many seconds. Otherwise it takes a new snapshot, because the sync may
already ignore the request, and pass the LSN."""
NAMED_SECONDS: Final = 900.0
"""Seconds for which a sync obeys a request that names an LSN: longer than the ten minutes that ``verify`` waits."""
_NO_LSN: Final = "-"


@dataclass(frozen=True)
class VerifyRequest:
    """The request of a running ``verify``. ``lsn`` is None while the snapshot has not been taken."""

    lsn: Lsn | None
    by: ProcessName | None = field(default=None, compare=False)
    """The process that placed the request; None if the request does not name it."""
    tenure: str = field(default="", compare=False)
    """A text that distinguishes two requests of the same process."""

    def __str__(self) -> str:
        who = f"`pgcdc verify` ({self.by.told})" if self.by else "an unknown process"
        return who if self.lsn is None else f"{who}, at {self.lsn}"


class PlacedRequest:
    """The request that this process has placed for ``verify``."""

    def __init__(self, held: Lease) -> None:
        self._held = held
        self._placed = time.monotonic()
        self.at(None)

    def at(self, lsn: Lsn | None) -> None:
        """Ask for a consistent point at this LSN. None: its LSN is not known yet."""
        self._held.write(f"{ProcessName.own()} {self._placed} {lsn or _NO_LSN}\n")

    @property
    def is_late(self) -> bool:
        """Whether more than NAMING_SECONDS have passed. Then it is too late to name an LSN, and a new request is
        needed."""
        return time.monotonic() - self._placed > NAMING_SECONDS


@contextmanager
def place_verify_request(layout: Layout) -> Iterator[PlacedRequest]:
    """Place a request for the duration of the block. LockHeld if another ``verify`` has placed a request."""
    with sole(layout, layout.hold, lambda: f"{verify_request(layout) or 'another `pgcdc verify`'} is running") as held:
        yield PlacedRequest(held)


def verify_request(layout: Layout) -> VerifyRequest | None:
    """The request that is placed now; None if there is no request."""
    text = lease.text_of_holder(layout.hold)
    if text is None:
        return None
    # A text without its newline is still being written.
    if not text.endswith("\n"):
        return VerifyRequest(None)
    try:
        process, placed_at, lsn = text.split()
        return VerifyRequest(
            None if lsn == _NO_LSN else Lsn.parse(lsn), ProcessName.parse(process), f"{process} {placed_at}"
        )
    except MALFORMED:
        # Another program wrote the file, and holds its lock.
        return VerifyRequest(None)


class VerifyRequests:
    """Reads the request of ``verify`` for a sync. The sync obeys each request for a limited time."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: dict[str, float] = {}
        """By ``tenure``: when the request was first seen; minus infinity once the request has expired."""

    def current(self) -> VerifyRequest | None:
        """The request that the sync obeys now; None if there is no request, or if the request has expired. An expired
        request stays expired, even if ``verify`` then adds an LSN to it."""
        found = verify_request(self._layout)
        if found is None:
            self._seen.pop(VerifyRequest(None).tenure, None)
            return None
        now, limit = time.monotonic(), UNNAMED_SECONDS if found.lsn is None else NAMED_SECONDS
        if now - self._seen.setdefault(found.tenure, now) <= limit:
            return found
        self._seen[found.tenure] = float("-inf")
        return None
