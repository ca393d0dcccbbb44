"""The run's view of its receiver: how far the log is complete, and how far it is to go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import psycopg

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.newtables import publish_new
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.client import ReceiverProcess
from pgcdc_assets.log.receive.messages import Event, EventName
from pgcdc_assets.source.catalog.look import CatalogLook
from pgcdc_assets.source.catalog.pgclass import without_rows
from pgcdc_assets.source.positions import boundary, flush_lsn


class LogStream:
    """Owns the receiver process for one run. Every method runs in the run's own thread."""

    def __init__(self, receiver: ReceiverProcess, log: ChangeLog, conn: psycopg.Connection[Any]) -> None:
        self._receiver = receiver
        self._conn = conn
        self._marks: set[Lsn] = set()
        self._reported = Lsn(0)
        self.complete_to = log.position()
        """The log's recorded position, as far as it is known: every transaction with ``commit_lsn`` below is in it."""
        self.arrived = False
        """The goal set by :meth:`until` is reached; the receiver has ended or is about to."""
        self.stream_aborts = 0
        """Stream Aborts that were passed over: PostgreSQL 18 reports rollbacks of transactions that it never sent."""

    def start(self) -> None:
        self._receiver.start()

    def until(self, lsn: Lsn) -> None:
        """Receive up to here, then end."""
        self._receiver.until(lsn)

    def follow(self) -> None:
        """Take back a goal that is not reached yet: receive until told otherwise."""
        self._receiver.follow()

    def mark(self, lsn: Lsn) -> None:
        """Have the log recorded at ``lsn``, a known boundary, as soon as it is complete to there; go on receiving."""
        if lsn > self.complete_to and lsn not in self._marks:
            self._marks.add(lsn)
            self._receiver.mark(lsn)

    def take_events(self) -> None:
        """Take in what the receiver said; raises its error, or ReceiverDied."""
        for event in self._receiver.events(0):
            self._take(event)

    def _take(self, event: Event) -> None:
        if event.name == EventName.ARRIVED:
            self.arrived = True
        self.complete_to = max(self.complete_to, event.lsn)
        self.stream_aborts = max(self.stream_aborts, event.stream_aborts)

    def wait(self, seconds: float) -> None:
        """Sleep until the receiver says something, at most this long."""
        if self.arrived:
            # The receiver has ended, so no event of it can wake us.
            time.sleep(seconds)
        else:
            self._receiver.wait(seconds)

    def report_apply(self, lsn: Lsn) -> None:
        if lsn > self._reported:
            self._reported = lsn
            self._receiver.report_apply(lsn)

    def source_position(self) -> Lsn:
        """The source's flush position now: all that is durable there ends at or before it."""
        return flush_lsn(self._conn)

    def mark_now(self) -> Lsn:
        """Mark the position at which the source stands now, and return it."""
        now = boundary(self._conn)
        self.mark(now)
        return now

    def look(self, catalog: Catalog, patterns: Sequence[str]) -> CatalogLook:
        """The catalog's tables as the source has them now."""
        return CatalogLook.now(self._conn, catalog.publications, patterns, catalog.tables)

    def publish_new(self, work: Work) -> None:
        """Publish the tables and partitions that came since."""
        publish_new(self._conn, work.settings, work.catalog, work.progress.states, work.observer)

    def without_rows(self, relation: int) -> bool:
        """Whether a relation certainly has no row now."""
        return without_rows(self._conn, relation)

    def stands(self, look: CatalogLook) -> bool:
        """Whether the source's catalog is still as this look saw it."""
        return look.stands(self._conn)

    def stop(self) -> None:
        """End the receiver at a boundary and wait for it."""
        self._receiver.stop()
