"""A run's interface to its receiver process and to the source: how far the log is complete, at which LSN the receiver
ends, and what the source's catalog shows. Also the pauses of a sync in follow mode while the source is unreachable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import psutil
import psycopg

from pgcdc_assets.core.catalog import Catalog, relations_of
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import Observer
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import EventName
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.pgclass import without_rows
from pgcdc_assets.source.catalog.tables import CatalogSnapshot
from pgcdc_assets.source.setup.publications import OwnPair
from pgcdc_assets.source.slot.slot import boundary, flush_lsn


def publish_new(
    conn: psycopg.Connection[Any], settings: Settings, catalog: Catalog, states: TableStates, observer: Observer
) -> None:  # fmt: skip
    """Publish new tables and partitions that match the setting ``tables``, and report them. A table in ``catalog`` or
    ``states`` is not new: if it is in no publication, somebody has removed it, and it is not added again."""

    def known() -> set[int]:
        return relations_of([*catalog.tables, *states.tables()])

    for name in OwnPair.of(conn, settings).add_new(known):
        observer.progress("watch", f"table {name}: was created, and is now published", table=str(name))


FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Seconds. A server that restarts is back after a few seconds. A server that is unreachable for hours is tried once a
minute."""
_LOOK_SECONDS: Final = 0.2


class Outage:
    """The pauses of one sync while the source is unreachable. Each pause is twice as long as the last, up to
    LONGEST_PAUSE. ``say`` reports each pause to people."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pause = FIRST_PAUSE
        self._tried: float | None = None
        self._lost_at = 0.0

    def tries(self) -> None:
        """Record the time: a run of the sync begins, or tries to begin."""
        self._tried = time.monotonic()

    def waited(self, why: PgcdcError, bounds: Bounds) -> bool:
        """Pause before the next try. False if the bounds end the sync during the pause."""
        now = time.monotonic()
        if self._tried is None or now - self._tried > LONGEST_PAUSE:
            # No pause is this long. So the sync was connected after the last try, and this is a new outage.
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


class LogStream:
    """Owns the receiver process for one run. Every method runs in the run's own thread."""

    def __init__(self, receiver: ReceiverProcess, log: ChangeLog, conn: psycopg.Connection[Any]) -> None:
        self._receiver = receiver
        self._conn = conn
        self._marks: set[Lsn] = set()
        self._reported = Lsn(0)
        self.complete_to = log.position()
        """The log's position, as the receiver last reported it. The log contains every transaction with a lower
        ``commit_lsn``."""
        self.arrived = False
        """Whether the receiver has reached the LSN set by :meth:`until`. It has then ended, or is about to end."""
        self.stream_aborts = 0
        """See :attr:`pgcdc_assets.flow.reports.SyncReport.stream_aborts`."""

    def start(self) -> None:
        self._receiver.start()

    def until(self, lsn: Lsn) -> None:
        """Make the receiver end at ``lsn``."""
        self._receiver.until(lsn)

    def follow(self) -> None:
        """Make the receiver continue without an end, if it has not reached the LSN set by :meth:`until` yet."""
        self._receiver.follow()

    def mark(self, lsn: Lsn) -> None:
        """Make the receiver record ``lsn`` as the log's position as soon as the log is complete to it, even if no batch
        ends there. So a point can be made at exactly ``lsn``, a boundary. The receiver then continues."""
        if lsn > self.complete_to and lsn not in self._marks:
            self._marks.add(lsn)
            self._receiver.mark(lsn)

    def take_events(self) -> None:
        """Process the receiver's events. Raises the receiver's error, or ReceiverDied."""
        for event in self._receiver.events(0):
            self.arrived |= event.name == EventName.ARRIVED
            self.complete_to = max(self.complete_to, event.lsn)
            self.stream_aborts = max(self.stream_aborts, event.stream_aborts)

    def wait(self, seconds: float) -> None:
        """Sleep until the receiver sends an event, at most this long."""
        if self.arrived:
            # The receiver has ended, so it sends no event that could end the wait.
            time.sleep(seconds)
        else:
            self._receiver.wait(seconds)

    def report_apply(self, lsn: Lsn) -> None:
        if lsn > self._reported:
            self._reported = lsn
            self._receiver.report_apply(lsn)

    def receiver_bytes(self) -> int | None:
        """The resident memory of the receiver process; None if the process has ended."""
        pid = self._receiver.pid
        with suppress(psutil.Error):
            return None if pid is None else int(psutil.Process(pid).memory_info().rss)
        return None

    def source_position(self) -> Lsn:
        """The source's flush LSN now. All WAL that is durable on the source ends at or below this LSN."""
        return flush_lsn(self._conn)

    def mark_now(self) -> Lsn:
        """Call :meth:`mark` with the source's present position, and return this position."""
        now = boundary(self._conn)
        self.mark(now)
        return now

    def read_catalog(self, catalog: Catalog, patterns: Sequence[str]) -> CatalogSnapshot:
        """Read the tables from the source's catalog."""
        return CatalogSnapshot.read(self._conn, catalog.publications, patterns, catalog.tables)

    def publish_new(self, work: Work) -> None:
        """See :func:`publish_new`."""
        publish_new(self._conn, work.settings, work.catalog, work.progress.states, work.observer)

    def without_rows(self, relation: int) -> bool:
        """Whether the relation with this OID certainly has no row now."""
        return without_rows(self._conn, relation)

    def is_current(self, snapshot: CatalogSnapshot) -> bool:
        """Whether the source's catalog is still as ``snapshot`` showed it."""
        return snapshot.is_current(self._conn)

    def stop(self) -> None:
        """End the receiver at a boundary, and wait until it has ended."""
        self._receiver.stop()
