"""The receive loop: turns frames from the slot into durable batches. One thread receives frames, and processes many
frames at once with numpy. Another thread writes segments and makes Delta commits, and mostly does not hold the
interpreter lock. The writing thread has at most one job while the next segment fills, so memory is bounded for
transactions of any size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import psycopg

from pgcdc_assets.core.lsn import Endpos, Lsn, ReportedPositions
from pgcdc_assets.log.batch import BatchWriter
from pgcdc_assets.log.extent import Extent
from pgcdc_assets.log.framerun import HEADER, FrameRun
from pgcdc_assets.log.receive.batches import Batches, Limits
from pgcdc_assets.log.receive.intake import Intake
from pgcdc_assets.log.receive.messagefilter import MessageFilter
from pgcdc_assets.log.receive.messages import Event, EventName
from pgcdc_assets.log.receive.relationfacts import CatalogFacts, WaitEnded, knows_origins
from pgcdc_assets.log.receive.wholetransactions import ResendCheck
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.transactions import PreparedTransactions, TransactionsInProgress
from pgcdc_assets.protocol.frames import FrameBlock, keepalive
from pgcdc_assets.source.connect.silence import FOR_STREAMS, Patience, Silence
from pgcdc_assets.source.slot.slot import SourceClock
from pgcdc_assets.source.stream.subscribe import FrameStream

_RUN_BYTES = 1 << 20
"""Bytes of frames in one :class:`FrameRun`. With this many bytes, numpy's cost per call is negligible."""
_GATHER_SECONDS = 0.0003
"""Seconds to wait before the socket is read again. The walsender sends each message separately, and to wake up for each
message would cost more than to read it. In this time, the buffer of a Unix socket (some 300 small messages) does not
become full."""
_IDLE_SECONDS = 0.1
PROGRESS_SECONDS = 1.0
"""Seconds between status updates while positions move. So the positions in pg_stat_replication are at most this old."""
_REST_SECONDS = 1.0
"""Seconds between two attempts of a catalog query while another session locks a table. Each attempt waits up to half a
second for the lock."""
_ASK_SECONDS = 0.1
"""Seconds between two requests for a keepalive, if no frames arrive and the LSN of an order UNTIL or MARK is not
reached."""


class Receiver:
    """Receives over one connection. :meth:`run` returns when the goal (the LSN of an UNTIL order) is reached, at a
    boundary after :meth:`stop`, or at a boundary for which ``leave`` returns true."""

    def __init__(
        self,
        stream: FrameStream,
        conn: psycopg.Connection[Any],
        writer: BatchWriter,
        relations: Relations,
        *,
        publications: Sequence[str],
        floor: Lsn,
        resend_check: ResendCheck | None = None,
        wanted: MessageFilter | None = None,
        limits: Limits,
        report: Callable[[Event], None],
        orders: Callable[[Receiver], None] = lambda receiver: None,
        patience: Patience = FOR_STREAMS,
        leave: Callable[[Lsn], bool] = lambda boundary: False,
        announce: Callable[[TransactionsInProgress], None] = lambda in_progress: None,
        extent: Extent | None = None,
        prepared: PreparedTransactions | None = None,
    ) -> None:
        self._stream = stream
        self._writer = writer
        self._limits = limits
        self._report = report
        self._orders = orders
        self._leave = leave
        self._announce = announce
        self._extent = extent
        self._clock = SourceClock(conn)
        self._floor = floor
        self._reported = ReportedPositions(floor)
        facts = CatalogFacts(conn, publications, limits.relations_at_once, self._send_due_status, self._rest)
        self._intake = Intake(
            facts, relations, writer.position, resend_check, wanted, partial(knows_origins, conn), prepared,
        )  # fmt: skip
        self._positions = self._intake.positions
        self._batches = Batches(writer, self._intake, self._reported, limits, report, self._send_status)
        self._writing = self._batches.writing
        self._goal: Endpos | None = None
        self._marks: list[Lsn] = []
        self._stopping = False
        self._arrived = False
        self.left = False
        """Whether :meth:`run` returned because ``leave`` asked for a new connection."""
        self._status_at = self._asked_at = 0.0
        self._withheld = False
        """Whether the last status update contained the slot's position, and not the log's."""
        self._silence = Silence(patience, stream.endpoint, stream.at_work, lambda: self._send_status(ask=True))
        self._reported.durable(writer.position)

    # Orders of the parent (:class:`OrderName`), called between two rounds of the loop -----------------

    def until(self, lsn: Lsn) -> None:
        self._goal = self._positions.goal = Endpos(lsn, wal_writer_delay=self._clock.wal_writer_delay)
        if max(self._positions.boundary, self._positions.seen) >= lsn:
            self._arrived = True

    def follow(self) -> None:
        self._goal = self._positions.goal = None

    def mark(self, lsn: Lsn) -> None:
        """Make the log complete up to ``lsn`` as soon as all transactions below it have arrived, and report COMPLETE.
        ``lsn`` must be a boundary, such as a slot's consistent point. If ``lsn`` is above the goal, no COMPLETE is
        sent for it."""
        self._marks.append(lsn)

    def report_apply(self, lsn: Lsn) -> None:
        self._reported.applied(lsn)

    def stop(self) -> None:
        """End at the last boundary. The next connection receives an open transaction again."""
        self._stopping = True

    # The loop ---------------------------------------------------------------------------------------

    def run(self) -> Lsn:
        """Receive until the goal is reached, or a stop is ordered. Returns the boundary that the log has reached."""
        try:
            self._send_status(ask=True)
            # Read orders before the first frame, because frames past the LSN of an UNTIL order may already have
            # arrived.
            self._orders(self)
            with suppress(WaitEnded):
                while not self._over:
                    idle = self._receive()
                    self._round(idle)
            self._finish()
            return self._reported.flush
        finally:
            self._writing.close()
            with suppress(OSError):
                # Segments of open transactions are not needed, because the server sends these transactions again. To
                # delete them frees space on a full disk.
                self._writer.drop_spill()

    def _receive(self) -> bool:
        """Read and process the frames that have arrived, up to about ``_RUN_BYTES``. Returns whether the stream is
        quiet."""
        frames, came = self._stream.frames, False
        deadline = time.monotonic() + self._limits.run_seconds
        while time.monotonic() < deadline:
            if frames.pull():
                came = True
                if frames.held >= _RUN_BYTES:
                    # There are enough frames, or a large frame has begun, which will arrive in thousands of pieces.
                    break
                continue
            if not frames.held:
                self._stream.wait(self._quiet_seconds())
                self._silence.listened()
                return True
            time.sleep(_GATHER_SECONDS)
            if not self._stream.wait(self._limits.linger_seconds):
                break
        taken = frames.take()
        # Without new bytes the connection counts as silent, even if the beginning of a frame is in the buffer: the rest
        # of the frame may never arrive.
        if came or len(taken):
            self._silence.heard()
        else:
            self._silence.listened()
        self._take(taken)
        return False

    def _quiet_seconds(self) -> float:
        """How many seconds to wait for the next frame: at most until the next batch is due."""
        if self._writing.busy:
            return self._limits.linger_seconds
        due_in = self._batches.due_in(time.monotonic())
        return _IDLE_SECONDS if due_in is None else min(due_in, _IDLE_SECONDS)

    def _take(self, frames: FrameBlock) -> None:
        """Process the messages in these frames, and the keepalives between the messages."""
        first = 0
        for place in [*np.flatnonzero(frames.lengths <= HEADER).tolist(), len(frames)]:
            if first < place and not self._arrived:
                self._index(frames.part(first, place))
            if place < len(frames) and not self._arrived:
                self._keepalive(frames.frame(place))
            first = place + 1

    def _index(self, frames: FrameBlock) -> None:
        run = FrameRun.of(frames, self._intake.sequence)
        for part in self._intake.take(run, parallel=self._stream.parallel):
            self._batches.add(part)
        self._arrived |= self._positions.arrived
        if self._batches.full:
            self._batches.write_ahead()

    def _keepalive(self, frame: bytes) -> None:
        """Process a keepalive. Its ``wal_end`` is a boundary: the server has sent everything that commits below it,
        even if a transaction is open."""
        message = keepalive(frame)
        self._intake.sent(message.wal_end)
        if self._goal is None or self._goal.allows(message.wal_end):
            self._positions.reached(message.wal_end)
        if self._goal is not None and self._goal.arrived_at_wal_end(message.wal_end):
            self._arrived = True
        if message.reply_requested:
            # Answer at once, and make all transactions durable. A source that shuts down asks for a reply, and waits
            # until all its WAL is confirmed.
            self._batches.flush()
            self._send_status()

    def _round(self, idle: bool) -> None:
        """Do all work of the loop that is due, except for reading frames."""
        self._orders(self)
        self._announce(self._intake.in_progress)
        self._writing.collect()
        now = time.monotonic()
        self._reach_marks()
        if not self._writing.busy:
            self._batches.cut_if_due(now)
        self._tell_marks()
        if idle and self._extent is not None and self._batches.settled:
            self._extent.note(self._reported.flush, self._complete())
        moved = self._positions.boundary > self._reported.write
        due = now - self._status_at > (PROGRESS_SECONDS if moved else self._limits.status_seconds)
        if due or (self._withheld and self._intake.resend_checked):
            self._send_status()
        if not self._stopping and self._intake.transaction is None and self._leave(self._complete()):
            self._stopping = self.left = True
        if idle and (self._goal or self._marks) and now - self._asked_at > _ASK_SECONDS:
            # The LSN of an order UNTIL or MARK is not reached, and the stream is quiet: ask the server where it is.
            if self._goal is not None and self._goal.flush_wanted:
                self._goal.saw_source(*self._clock.positions(), now)
            self._send_status(ask=True)

    @property
    def _over(self) -> bool:
        return self._stopping or self._arrived

    def _rest(self) -> None:
        """Wait because another session's lock blocks the catalog query. Does all work except for reading frames."""
        end = time.monotonic() + _REST_SECONDS
        while time.monotonic() < end:
            self._round(idle=False)
            if self._over:
                raise WaitEnded
            # The server may have asked for a status in a frame that this process has not read yet.
            self._send_status()
            time.sleep(_IDLE_SECONDS)

    def _complete(self) -> Lsn:
        """The boundary below which every commit has been received."""
        return min(self._positions.seen, self._positions.boundary)

    # Ends and marks ---------------------------------------------------------------------------------

    def _reach_marks(self) -> None:
        """For each MARK order: once all commits below its LSN have arrived, move the boundary to this LSN, and cut a
        batch there at once."""
        for mark in self._marks:
            # ``seen`` may be past the goal, but frames past the goal are not in the log.
            if self._positions.seen >= mark and (self._goal is None or self._goal.allows(mark)):
                self._positions.reached(mark)
            if self._positions.boundary >= mark > self._batches.planned:
                self._batches.flush()

    def _tell_marks(self) -> None:
        for mark in [mark for mark in self._marks if mark <= self._reported.flush]:
            self._marks.remove(mark)
            self._report(Event(EventName.COMPLETE, mark))

    def _finish(self) -> None:
        """Make all complete transactions durable, confirm them to the server, and report to the parent."""
        self._reach_marks()
        self._batches.cut()
        self._writing.finish()
        self._tell_marks()
        self._send_status()
        if self._extent is not None:
            # If the goal is reached, the log contains every transaction that ends at or below the goal, although the
            # boundary may be below the goal.
            complete = self._goal.lsn if self._arrived and self._goal is not None else self._complete()
            self._extent.note(self._reported.flush, complete, last=True)
        if self._arrived:
            self._report(Event(EventName.ARRIVED, self._reported.flush))
        self._stream.end_stream()

    def _send_due_status(self) -> None:
        """Send a status update if it is due. Called during work that may last longer than the server waits."""
        if time.monotonic() - self._status_at > self._limits.status_seconds:
            self._send_status()

    def _send_status(self, *, ask: bool = False) -> None:
        self._reported.received(self._positions.boundary)
        # That the slot is behind the log may be the only sign that the source was restored. So the slot is not moved
        # before the transactions that the server sends again were compared with the log. Otherwise the next run would
        # find no difference.
        self._withheld = not self._intake.resend_checked
        reported = ReportedPositions(self._floor) if self._withheld else self._reported
        self._stream.send_status(reported.write, reported.flush, reported.apply, reply=ask)
        self._status_at = time.monotonic()
        if ask:
            self._asked_at = self._status_at
