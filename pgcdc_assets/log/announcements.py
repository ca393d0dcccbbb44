"""What the receiver announces to ``pgcdc status`` in a small file of the lake: the transactions in progress.

The receiver holds a lease of the file while such transactions exist, and readers ignore a file without a lease. So
nobody reads the announcement of a dead receiver. The file may be lost without harm.
"""

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
"""Seconds between two announcements. Only people read the announcements, so once a second is enough."""
_READS: Final = 20
_PAUSE_SECONDS: Final = 0.01
"""The pause between two reads of the file while its text is incomplete. The writer completes the text within
microseconds, unless the machine suspends the writer."""


@dataclass(frozen=True)
class Announcement:
    """The transactions in progress of a receiver: their number and size, and the oldest of them, which is the
    transaction whose first block arrived first."""

    number: int
    bytes: int
    """Bytes received for all transactions in progress, as PostgreSQL sent them. Includes content that was rolled back
    to a savepoint."""
    xid: int
    """The xid of the oldest transaction."""
    lsn: Lsn
    """The LSN of the oldest transaction's first block."""
    since: datetime
    """When the oldest transaction's first block arrived."""

    @classmethod
    def of(cls, open_: TransactionsInProgress) -> Self | None:
        """The announcement of these transactions; None if there is no transaction."""
        oldest = open_.oldest
        if oldest is None:
            return None
        since = datetime.now(UTC) - timedelta(seconds=time.monotonic() - oldest.since)
        return cls(len(open_), open_.bytes, oldest.xid, oldest.lsn, since)

    @property
    def age(self) -> timedelta:
        """How long ago the oldest transaction's first block arrived."""
        return max(timedelta(0), datetime.now(UTC) - self.since)

    def to_line(self) -> str:
        """The announcement as one line. A text that does not end with a newline is incomplete."""
        return json.dumps({**vars(self), "since": self.since.isoformat()}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Self | None:
        """Parses a line. None if the line is incomplete, or was written by another version of the package."""
        if not line.endswith("\n"):
            return None
        try:
            given: dict[str, Any] = json.loads(line)
            lsn, since = Lsn(given.pop("lsn")), datetime.fromisoformat(given.pop("since"))
            return cls(lsn=lsn, since=since, **given)
        except MALFORMED:
            return None


class Announcer:
    """Writes the announcements for one connection of the receiver. Ignores errors of the disk or of the object store,
    so that they do not stop the receiver."""

    def __init__(self, layout: Layout) -> None:
        self._place = layout.in_progress
        self._files = ExitStack()
        self._held: Lease | None = None
        self._due = 0.0

    def announce(self, open_: TransactionsInProgress) -> None:
        """Announce the transactions, at most once a second. Without a transaction, withdraw the announcement."""
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
                # Do not wait for the lease, because no frames are received during a wait.
                self._held = self._files.enter_context(lease.held(self._place, at_once=True))
            if self._held is not None and what is not None:
                self._held.write(what.to_line())
                return
        # The text was not written, for example because another receiver holds the lease: a receiver may run for a
        # second after its parent was killed.
        self.close()


def announced(layout: Layout) -> Announcement | None:
    """The announcement of this lake's receiver. None if no receiver runs, or if no transaction is in progress."""
    for _ in range(_READS):
        text = lease.text_of_holder(layout.in_progress)
        if text is None:
            return None
        if text.endswith("\n"):
            return Announcement.from_line(text)
        time.sleep(_PAUSE_SECONDS)
    return None
