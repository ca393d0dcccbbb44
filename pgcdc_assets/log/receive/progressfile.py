"""Announces transactions in progress to other processes, in a file of the lake. The receiver keeps the file locked
while there are such transactions, which only the receiver knows. The kernel releases the lock when the receiver's
process ends in any way, so the announcement of a dead receiver is never read."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LeaseLost, StoreFailed
from pgcdc_assets.log.transactions import TransactionsInProgress
from pgcdc_assets.store import lease
from pgcdc_assets.store.base import Lease

ANNOUNCE_SECONDS: Final = 1.0
"""Seconds between two announcements. Only people read the received bytes, which grow all the time."""
_READS: Final = 20
_PAUSE_SECONDS: Final = 0.01
"""The pause between two reads. A writer replaces the text within microseconds, unless the machine suspends it."""


@dataclass(frozen=True)
class Announcement:
    """The transactions in progress of a receiver: totals, and the oldest transaction (its first block came first)."""

    number: int
    bytes: int
    """Bytes received of all transactions in progress, as PostgreSQL sent them, including content that was rolled back
    to a savepoint."""
    xid: int
    lsn: Lsn
    """LSN at which the oldest transaction's first block began."""
    since: datetime
    """When the oldest transaction's first block came."""

    @classmethod
    def of(cls, open_: TransactionsInProgress) -> Self | None:
        """The announcement to make; None if nothing is in progress."""
        oldest = open_.oldest
        if oldest is None:
            return None
        since = datetime.now(UTC) - timedelta(seconds=time.monotonic() - oldest.since)
        return cls(len(open_), open_.bytes, oldest.xid, oldest.lsn, since)

    @property
    def age(self) -> timedelta:
        """How long ago the oldest transaction's first block came."""
        return max(timedelta(0), datetime.now(UTC) - self.since)

    def to_line(self) -> str:
        """The announcement as one line. A text without its newline is not complete."""
        return json.dumps({**vars(self), "since": self.since.isoformat()}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Self | None:
        """The announcement in a line; None if the line is not complete, or was written by another version."""
        if not line.endswith("\n"):
            return None
        try:
            given: dict[str, Any] = json.loads(line)
            lsn, since = Lsn(given.pop("lsn")), datetime.fromisoformat(given.pop("since"))
            return cls(lsn=lsn, since=since, **given)
        except MALFORMED:
            return None


class Announcer:
    """The receiver's side, for one connection. Errors of the disk or store do not stop the receiver."""

    def __init__(self, layout: Layout) -> None:
        self._place = layout.in_progress
        self._files = ExitStack()
        self._held: Lease | None = None
        self._due = 0.0

    def announce(self, open_: TransactionsInProgress) -> None:
        """Announce the transactions, at most once a second. Withdraw the announcement once nothing is in progress."""
        if not len(open_):
            self.close()
        elif time.monotonic() >= self._due:
            self._write(Announcement.of(open_))
            pause = 0.0 if self._held is None else self._held.pause
            self._due = time.monotonic() + max(ANNOUNCE_SECONDS, pause)

    def close(self) -> None:
        """Withdraw the announcement."""
        self._held = None
        with suppress(OSError, StoreFailed):
            self._files.close()

    def _write(self, what: Announcement | None) -> None:
        with suppress(OSError, StoreFailed, LeaseLost):
            if self._held is None:
                # Nothing is received while this waits.
                self._held = self._files.enter_context(lease.held(self._place, at_once=True))
            if self._held is not None and what is not None:
                self._held.write(what.to_line())
                return
        # Another receiver may hold the lock: after its run was killed, a receiver may live for another second.
        self.close()


def announced(layout: Layout) -> Announcement | None:
    """The announcement of a lake's running receiver; None without a receiver or without a transaction in progress."""
    for _ in range(_READS):
        text = lease.text_of_holder(layout.in_progress)
        if text is None:
            return None
        if text.endswith("\n"):
            return Announcement.from_line(text)
        time.sleep(_PAUSE_SECONDS)
    return None
