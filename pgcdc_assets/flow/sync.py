"""One run of the sync. In a loop, it takes in what the receiver, the copies and the changes of mirrors have done, and
carries out the next turn."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import SourceUnavailable
from pgcdc_assets.flow import lock
from pgcdc_assets.flow.catalogwatch import CatalogWatch
from pgcdc_assets.flow.copies import Copies
from pgcdc_assets.flow.decide import Bounds, Situation, finished
from pgcdc_assets.flow.ranges import RunRanges
from pgcdc_assets.flow.reports import Phase, RunState, SyncReport
from pgcdc_assets.flow.requests import OperatorRequests, operator_requests
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.structurechanges import StructureChanges
from pgcdc_assets.flow.turns import Turns
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.store import storage
from pgcdc_assets.structure.record import TableState


class Sync:
    """One run of the sync. ``run()`` returns when the bounds end the run. In follow mode, it also returns if the
    connection to the source is lost, with the error as ``SyncReport.lost``. All other errors are raised."""

    def __init__(self, work: Work, conninfo: str, stream: LogStream, bounds: Bounds) -> None:
        self._work = work
        self._stream = stream
        self._bounds = bounds
        self._copies = Copies(work, conninfo, follow=bounds.follow)
        self._structure = StructureChanges(work)
        self._catalog = CatalogWatch(work, stream, self._structure)
        self._ranges = RunRanges(work, stream)
        self._turns = Turns(work, stream, self._catalog, self._copies, self._ranges, self._succeed,
                            follow=bounds.follow)  # fmt: skip
        self._started = self._moved = time.monotonic()
        self._start = work.progress.replay_lsn
        self._operator = OperatorRequests()
        self._gave_way = False
        self._lost: SourceUnavailable | None = None

    def run(self) -> SyncReport:
        try:
            self._stream.start()
            # A run that died may have left copies and points at LSNs above the log's position. The log's position must
            # reach these LSNs, because a point can be made there only then.
            self._stream.mark(self._work.progress.highest)
            self._stream.mark(self._work.progress.listed.shown_from)
            self._read_operator()
            self._turns.begin()
            self._check_catalog()
            self._turns.report_foreign_changes()
            if not self._copies.under_way:
                self._set_goal()
            while not self._finished():
                self._work.observer.moving(self.state)
                if not self._step():
                    # The wait ends at once when a new batch arrives.
                    self._stream.wait(storage.pace(self._work.layout.root))
        except SourceUnavailable as error:
            if not self._bounds.follow:
                raise
            self._lost = error
        finally:
            try:
                self._copies.cancel()
                self._structure.cancel()
            finally:
                self._stream.stop()
                self._turns.close()
                self._work.meter.close()
        self._take_committed()
        if self._lost is None:
            self._ranges.close()
        failure = self._copies.failure
        if isinstance(failure, SourceUnavailable) and self._bounds.follow:
            self._lost = self._lost or failure
        elif failure is not None:
            raise failure
        if self._lost is None and not self._paused:
            self._work.operation.applied_to = self._turns.applied_to
        return self.summary()

    def _step(self) -> bool:
        """One pass of the run's loop. Returns whether anything has changed, so that the next pass follows at once."""
        before, arrived = self._stream.complete_to, self._stream.arrived
        self._stream.take_events()
        self._work.meter.write_if_due(self._stream.receiver_bytes)
        moved = self._stream.complete_to > before
        self._read_operator()
        complete = self._stream.complete_to
        if self._stream.arrived and not arrived:
            what = f"the change log contains every transaction up to LSN {complete}"
            self._work.say("receive", what, lsn=complete)
        moved |= self._take_structure_changes()
        moved |= self._take_copies()
        moved |= self._turns.turn(paused=self._paused, gathers=not (self.following or self.copying))
        due = self._ranges.due
        if due:
            self._ranges.close()
        due |= self._catalog.due
        if due and not self._stream.arrived:
            self._check_catalog()
        if due and self._turns.level:
            self._succeed()
        if moved:
            self._moved = time.monotonic()
        return moved

    def _check_catalog(self) -> None:
        """Check the catalog, and begin to copy the tables that wait for a copy."""
        self._copies.allow_again()
        self._turns.check_catalog()
        self._copies.begin()

    def _take_copies(self) -> bool:
        """Record the copies that were committed since the last pass; returns whether there were any. If the round of
        copies has ended, begins the next round. If no table is left to copy, sets the LSN at which the receiver
        ends."""
        # `ended` is read before the committed copies: once a round has ended, all its copies are committed.
        ended = self._copies.ended
        moved = self._take_committed()
        if ended:
            again = self._copies.close()
            if again:
                self._turns.check_catalog()
            self._copies.begin_next(again)
            if not self._copies.under_way:
                self._set_goal()
        return moved

    def _take_structure_changes(self) -> bool:
        """Record the changes of mirrors that have ended; returns whether any change has ended."""
        moved = False
        for change in self._structure.ended():
            moved = True
            if self._structure.take_in(change, self._catalog.seen_at):
                self._catalog.compare(change.after)
                self._turns.point.mark_due()
        if moved:
            # A table whose change of structure is complete may now wait for a copy.
            self._turns.begin_copies()
        return moved

    def _take_committed(self) -> bool:
        moved = False
        for copied in self._copies.take_committed():
            self._catalog.compare(copied.table)
            self._work.progress.copied(copied.table, copied.report.consistent_point, copied.report.version)
            self._work.observer.copied(copied.report)
            self._work.feeds.restart_if_unreadable(copied.table)
            self._turns.point.mark_due()
            moved = True
        return moved

    # Where the receiver ends ------------------------------------------------------------------

    def _set_goal(self) -> None:
        """Set the LSN at which the receiver ends. Called when no copy is in progress. A table that was copied at LSN C
        can be read together with other tables only at or above C. So the run receives at least up to C."""
        copied = self._copies.highest
        self._stream.mark(copied)
        request = self._turns.requests.current()
        if request is not None and request.lsn is not None:
            # This mark is sent before the end LSN. Both LSNs may be the same, and at the end LSN the receiver ends.
            self._stream.mark(request.lsn)
        if not self.following:
            shown = max(self._catalog.seen_at, self._work.progress.listed.shown_from)
            goal = self._bounds.until or max(self._stream.source_position(), shown)
            self._stream.until(max(goal, copied))

    # The operator's requests ----------------------------------------------------------------------

    def _read_operator(self) -> None:
        """Carry out the operator's requests that have changed: the LSN at which follow mode ends, and whether applying
        is paused."""
        before, now = self._operator, operator_requests(self._work.layout)
        self._operator = now
        self._copies.paused = self._catalog.paused = self._paused
        if self.following and now.endpos != before.endpos:
            if now.endpos is None:
                self._stream.follow()
            else:
                self._stream.until(max(now.endpos, self._copies.highest))
        if now.paused is not before.paused:
            what = "paused: changes go to the change log, but not to mirrors" if now.paused else "resumed"
            self._work.say("apply", what)
            if before.paused:
                self._copies.begin()

    @property
    def _paused(self) -> bool:
        return self._bounds.receive_only or self._operator.paused

    @property
    def following(self) -> bool:
        return self._bounds.follow and self._copies.failure is None

    # The end ------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        now = time.monotonic()
        self._gave_way = self._awaited()
        situation = Situation(
            running_seconds=now - self._started,
            idle_seconds=now - self._moved,
            following=self.following and self._operator.endpos is None,
            copying=self.copying,
            awaited=self._gave_way or self._bounds.give_way.is_set(),
            arrived=self._stream.arrived,
            level=self._turns.level or self._paused,
        )
        return finished(self._bounds, situation)

    def _awaited(self) -> bool:
        """Whether a command waits for the lake, and this run can end now. If ``verify`` has asked for a point, the run
        first makes the point."""
        if not self.following or self.copying or lock.waiting(self._work.layout) is None:
            return False
        held = self._turns.requests.current()
        return held is None or (held.lsn is not None and self._work.progress.points.has(held.lsn))

    @property
    def copying(self) -> bool:
        """Whether copies, or changes of mirrors, are in progress."""
        return self._copies.under_way or self._structure.in_progress

    def _succeed(self) -> None:
        """In follow mode, record a success before the run has ended, because the run may last for days."""
        if self.following and not self.copying:
            self._work.operation.succeed()
            self._work.meter.succeeded()

    def state(self) -> RunState:
        """The run's present progress."""
        complete, replay_lsn = self._stream.complete_to, self._work.progress.replay_lsn
        waiting = LogSpan(self._work.log, LsnRange(min(replay_lsn, complete), complete)).batches
        oldest = next((batch.first_commit_ts for batch in waiting if batch.first_commit_ts is not None), None)
        return RunState(
            phase=self._phase,
            replay_lsn=replay_lsn,
            lag_bytes=max(0, self._stream.source_position() - replay_lsn) if replay_lsn else None,
            lag_seconds=max(0.0, (datetime.now(UTC) - oldest).total_seconds()) if oldest else 0.0,
            rows=self._ranges.rows,
            copies=self._copies.count if self._copies.under_way else None,
        )

    @property
    def _phase(self) -> Phase:
        if self.copying:
            return Phase.COPYING
        if self._paused:
            return Phase.PAUSED
        return Phase.FOLLOWING if self._turns.level and self.following else Phase.CATCHING_UP

    def summary(self) -> SyncReport:
        progress = self._work.progress
        return SyncReport(
            start=self._start,
            end=progress.replay_lsn,
            transform_lsn=self._work.log.position(),
            copied=[copied.report for copied in self._copies.made],
            turns=self._ranges.turns,
            transactions=self._ranges.transactions,
            rows=self._ranges.rows,
            stream_aborts=self._stream.stream_aborts,
            seconds=time.monotonic() - self._started,
            set_aside=[(entry.table.name, entry.reason or "") for entry in progress.set_aside()],
            changed=sorted(progress.changed.items()),
            paused=self._paused,
            gave_way=self._gave_way,
            refused=frozenset(entry.table.name for entry in progress.set_aside() if entry.refused),
            lost=self._lost,
            left=[] if self._bounds.follow or self._paused else self._left(),
        )

    def _left(self) -> list[tuple[TableName, str]]:
        """The tables that are not set aside, and that the newest point does not list, or that no point may list at
        their mirrors' position. Each with the reason."""
        progress = self._work.progress
        newest = progress.points.newest()
        listed = {} if newest is None else newest.tables
        behind = [entry for entry in progress if entry.state is not TableState.SET_ASIDE
                  and not (entry.state.readable and entry.table.name in listed
                           and entry.shown(entry.replay_lsn))]  # fmt: skip
        waits = "its copy has not ended, or no consistent point lists it yet"
        return [(entry.table.name, entry.reason or waits) for entry in behind]
