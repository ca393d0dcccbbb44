"""Turns what is received into batches: holds what is pending, decides when to cut a batch, and reports to the
parent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.reported import ReportedPositions
from pgcdc_assets.log.batch import BatchWriter, Committed, PendingBatch
from pgcdc_assets.log.receive.blocks import Block, Dropped
from pgcdc_assets.log.receive.intake import Intake
from pgcdc_assets.log.receive.messages import SEGMENT_BYTES, Event, EventName
from pgcdc_assets.log.receive.parts import Part, Prepared, PreparedDropped, PreparedEnded, StreamEnded, Taken
from pgcdc_assets.log.receive.writing import WritingThread
from pgcdc_assets.log.spool import PendingStream


@dataclass(frozen=True)
class Limits:
    """Limits of size and time for what is held in memory or skipped before the log moves. Sizes are in bytes."""

    batch_bytes: int
    batch_seconds: float
    segment_bytes: int = SEGMENT_BYTES
    foreign_wal_bytes: int = 16 << 20
    """The position moves past WAL that holds nothing for us each time this much has passed: one WAL segment file."""
    run_seconds: float = 0.05
    """A run that is not full waits this long for more frames, counted from its start."""
    linger_seconds: float = 0.002
    """A run that is not full waits this long for its next frame."""
    status_seconds: float = 5.0
    """Seconds between status updates: a twelfth of the walsender's timeout, so that the walsender never has to ask."""
    relations_at_once: int = 500
    """How many relations one catalog query asks for. This many take a busy server a second or two, and some
    megabytes."""


class Batches:
    """The batches of one connection. ``confirm`` sends a status update."""

    def __init__(
        self, writer: BatchWriter, intake: Intake, reported: ReportedPositions, limits: Limits,
        report: Callable[[Event], None], confirm: Callable[[], None],
    ) -> None:  # fmt: skip
        self._writer = writer
        self._intake = intake
        self._positions = intake.positions
        self._reported = reported
        self._limits = limits
        self._report = report
        self._confirm = confirm
        self._pending = PendingBatch()
        self.writing = WritingThread(self._land, confirm)
        self._flush_now = False
        self._cut_at = time.monotonic()
        """When transactions were last cut. Initially the time when the connection began."""
        self.planned = writer.position
        """The log's position once everything that was cut is durable."""

    def flush(self) -> None:
        """Cut a batch as soon as the writing thread is free."""
        self._flush_now = True

    def add(self, part: Part) -> None:
        match part:
            case Taken(run, whole, after):
                self._pending.receive(run, whole, after, time.monotonic())
            case Block(xid, overlay, frames, origin):
                self._pending.streams.add(xid, overlay, frames, origin)
            case StreamEnded(xid, end, commit):
                self._pending.end(xid, end, commit, time.monotonic())
            case Dropped(xid):
                self._drop(self._pending.streams.pop(xid))
            case Prepared(transaction):
                self._pending.prepare(transaction, time.monotonic())
            case PreparedEnded(transaction, end, commit):
                self._pending.end_prepared(transaction, end, commit, time.monotonic())
            case PreparedDropped(key):
                stream = self._pending.streams.pop_prepared(key)
                self._drop(stream)
                if stream is None:
                    self.writing.submit(partial(self._writer.forget, key))

    def _drop(self, stream: PendingStream | None) -> None:
        if stream is not None and stream.spooled_size:
            self.writing.submit(partial(self._writer.drop, stream))

    @property
    def full(self) -> bool:
        """Memory is full."""
        return self._pending.in_memory >= self._limits.segment_bytes

    def due_in(self, now: float) -> float | None:
        """Seconds until the pending transactions are cut; None if no transaction is pending.

        The seconds count from the last cut. So a commit after a quiet time is cut at once, and there is at most one
        batch per ``batch_seconds``, unless batches are full.
        """
        return None if self._pending.since is None else max(0.0, self._cut_at + self._limits.batch_seconds - now)

    def cut_if_due(self, now: float) -> None:
        if (due_in := self.due_in(now)) is not None:
            if due_in == 0 or self._flush_now or self._pending.closed_size >= self._limits.batch_bytes:
                self.cut()
        elif self._positions.boundary - self.planned >= (1 if self._flush_now else self._limits.foreign_wal_bytes):
            self.cut()
        self._flush_now = False

    def cut(self) -> None:
        """Commit everything up to the last boundary. Prepared transactions below the boundary are kept first."""
        end = self._positions.boundary
        for transaction, stream in self._pending.streams.take_prepared():
            self.writing.submit(partial(self._writer.keep, transaction, stream))
        if self._pending.since is not None:
            self._cut_at = time.monotonic()
            closed, ended, staged = self._pending.take_closed()
            self.writing.submit(lambda: self._writer.commit(closed, staged, end, ended))
        elif end > self.planned:
            self.writing.submit(lambda: self._writer.advance(end))
        self.planned = max(self.planned, end)

    def write_ahead(self) -> None:
        """Memory is full: write segments of the batch, and spill the open transaction if it takes half of the
        memory."""
        pending, state = self._pending, self._intake.transaction
        if pending.closed_in_memory:
            if pending.closed_size >= self._limits.batch_bytes:
                self.cut()
            else:
                frames, ended, staged = pending.stage_closed()
                self.writing.submit(partial(self._writer.stage, frames, staged, ended))
        if state is not None and pending.open.size >= self._limits.segment_bytes // 2:
            opened, spilled = pending.spill_open(state)
            self.writing.submit(partial(self._writer.stage, opened, spilled))
        while pending.streams.size >= self._limits.segment_bytes // 2:
            stream = pending.streams.largest
            blocks = stream.take()
            self.writing.submit(partial(self._writer.spool, blocks, stream))

    def _land(self, committed: Committed) -> None:
        self._reported.durable(committed.end)
        self._confirm()
        passed(FaultPoint.BATCH_CONFIRMED)
        self._report(self._landed(committed))

    def _landed(self, batch: Committed) -> Event:
        aborts = self._intake.stream_aborts
        if not batch.rows:
            return Event(EventName.POSITION, batch.end, stream_aborts=aborts)
        counts = (batch.transactions, batch.rows, batch.bytes, aborts)
        return Event(EventName.BATCH, batch.end, batch.start, *counts)
