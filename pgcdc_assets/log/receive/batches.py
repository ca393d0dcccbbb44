"""Turns received frames into batches: decides when to cut a batch, writes the batch in a thread, and reports it to the
parent process. To cut a batch means to end the batch at the last boundary, and to start the batch's Delta commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Final

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import ReportedPositions
from pgcdc_assets.log.batch import BatchWriter, Committed, PendingBatch
from pgcdc_assets.log.content import InProgressContent
from pgcdc_assets.log.receive.blocks import Block, Dropped
from pgcdc_assets.log.receive.intake import Intake, Part, Prepared, PreparedCommitted, PreparedDropped, StreamCommitted
from pgcdc_assets.log.receive.messages import SEGMENT_BYTES, Event, EventName
from pgcdc_assets.log.receive.wholetransactions import Taken

_BUSY_SECONDS: Final = 0.3
"""Seconds between status updates while the receiver waits for the writing thread, and reads no frames. The server asks
for a status after half of wal_sender_timeout, and its request may be in a frame that is not read yet."""


@dataclass(frozen=True)
class Limits:
    """Limits in bytes and seconds: how much is received before it is written, and how long frames are gathered."""

    batch_bytes: int
    batch_seconds: float
    segment_bytes: int = SEGMENT_BYTES
    foreign_wal_bytes: int = 16 << 20
    """After this much WAL without content for the log, a Delta commit moves the log's position. It is the size of a WAL
    segment file."""
    run_seconds: float = 0.05
    """The longest time for which frames are gathered before they are processed together."""
    linger_seconds: float = 0.002
    """How long to wait for the next frame before the gathered frames are processed."""
    status_seconds: float = 5.0
    """Seconds between status updates. This is a twelfth of the default wal_sender_timeout, so that the walsender never
    has to ask for a status."""
    relations_at_once: int = 500
    """The number of relations per catalog query. A busy server needs a second or two and some megabytes for it."""


class Batches:
    """The batches of one connection. ``report`` sends an event to the parent process. ``confirm`` sends a status update
    to the server."""

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
        """When the last batch was cut. Before the first batch: when the connection began."""
        self.planned = writer.position
        """The log's position once every batch that was cut is durable."""

    def flush(self) -> None:
        """Request a batch. It is cut as soon as the writing thread is free."""
        self._flush_now = True

    def add(self, part: Part) -> None:
        match part:
            case Taken(run, whole, after):
                self._pending.receive(run, whole, after, time.monotonic())
            case Block(xid, overlay, frames, origin):
                self._pending.in_progress.add(xid, overlay, frames, origin)
            case StreamCommitted(xid, facts, commit):
                self._pending.commit(xid, facts, commit, time.monotonic())
            case Dropped(xid):
                self._drop(self._pending.in_progress.pop(xid))
            case Prepared(transaction):
                self._pending.prepare(transaction, time.monotonic())
            case PreparedCommitted(transaction, facts, commit):
                self._pending.commit_prepared(transaction, facts, commit, time.monotonic())
            case PreparedDropped(key):
                content = self._pending.in_progress.pop_prepared(key)
                self._drop(content)
                if content is None:
                    self.writing.submit(partial(self._writer.forget, key))

    def _drop(self, content: InProgressContent | None) -> None:
        if content is not None and content.spilled_size:
            self.writing.submit(partial(self._writer.drop, content))

    @property
    def settled(self) -> bool:
        """Whether all complete transactions that were received are durable in the log."""
        return self._pending.since is None and not self.writing.busy

    @property
    def full(self) -> bool:
        """Whether the frames in memory have reached ``segment_bytes``, so that they must be written."""
        return self._pending.in_memory >= self._limits.segment_bytes

    def due_in(self, now: float) -> float | None:
        """Seconds until the next batch must be cut; None if no transaction is pending. A batch is due ``batch_seconds``
        after the last batch was cut. So the first transaction after a quiet time does not wait."""
        return None if self._pending.since is None else max(0.0, self._cut_at + self._limits.batch_seconds - now)

    def cut_if_due(self, now: float) -> None:
        if (due_in := self.due_in(now)) is not None:
            if due_in == 0 or self._flush_now or self._pending.closed_size >= self._limits.batch_bytes:
                self.cut()
        elif self._positions.boundary - self.planned >= (1 if self._flush_now else self._limits.foreign_wal_bytes):
            self.cut()
        self._flush_now = False

    def cut(self) -> None:
        """Commit everything up to the last boundary to the log. Before that, store the content of prepared transactions
        below this boundary on disk."""
        end = self._positions.boundary
        for transaction, content in self._pending.in_progress.take_prepared():
            self.writing.submit(partial(self._writer.keep, transaction, content))
        if self._pending.since is not None:
            self._cut_at = time.monotonic()
            closed, committed, staged = self._pending.take_closed()
            self.writing.submit(lambda: self._writer.commit(closed, staged, end, committed))
        elif end > self.planned:
            self.writing.submit(lambda: self._writer.advance(end))
        self.planned = max(self.planned, end)

    def write_ahead(self) -> None:
        """Free memory, because the frames have reached ``segment_bytes`` (:attr:`full`). Writes complete transactions
        to segments, and also open transactions if their frames fill half of ``segment_bytes``."""
        pending, state = self._pending, self._intake.transaction
        if pending.closed_in_memory:
            if pending.closed_size >= self._limits.batch_bytes:
                self.cut()
            else:
                frames, committed, staged = pending.stage_closed()
                self.writing.submit(partial(self._writer.stage, frames, staged, committed))
        if state is not None and pending.open.size >= self._limits.segment_bytes // 2:
            opened, spilled = pending.spill_open(state)
            self.writing.submit(partial(self._writer.stage, opened, spilled))
        while pending.in_progress.size >= self._limits.segment_bytes // 2:
            content = pending.in_progress.largest
            self.writing.submit(partial(self._writer.spill, content.take(), content))

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


class WritingThread:
    """Runs the jobs of a :class:`BatchWriter` in a thread, one at a time, so that memory is bounded even if the disk is
    slow. Calls ``landed`` after each Delta commit, and ``waiting`` repeatedly during a wait for a job. Both calls are
    made in the receiving thread."""

    def __init__(self, landed: Callable[[Committed], None], waiting: Callable[[], None]) -> None:
        self._landed = landed
        self._waiting = waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log-writer")
        self._job: Future[Committed | None] | None = None

    @property
    def busy(self) -> bool:
        return self._job is not None

    def submit(self, job: Callable[[], Committed | None]) -> None:
        """Wait until the previous job is done, then start this job."""
        self.finish()
        self._job = self._thread.submit(job)

    def finish(self) -> None:
        """Wait until the job is done. The server receives status updates during the wait."""
        while self.busy:
            self.collect(_BUSY_SECONDS)
            if self.busy:
                self._waiting()

    def collect(self, seconds: float = 0) -> None:
        """Wait at most ``seconds`` for the job. If the job is done, call ``landed`` for its commit, or raise its
        exception."""
        if self._job is None:
            return
        wait_for([self._job], timeout=seconds)
        if self._job.done():
            committed, self._job = self._job.result(), None
            if committed is not None:
                self._landed(committed)

    def close(self) -> None:
        """Wait until the job is done, and ignore its result."""
        self._thread.shutdown(wait=True, cancel_futures=True)
