"""Runs a sync: receives without pause, copies meanwhile, and applies all that has landed since the last turn."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.delta.failures import of_one_table
from pgcdc_assets.errors import CopyBlocked, CopyOutdated, PgcdcError
from pgcdc_assets.feed.table import begin_anew_if_unreadable
from pgcdc_assets.flow import hold
from pgcdc_assets.flow.accounting import untaken
from pgcdc_assets.flow.closing import closed_range, merge_files
from pgcdc_assets.flow.copying import Copied, CopyChannel, copy
from pgcdc_assets.flow.decide import (
    Bounds,
    PointDue,
    Situation,
    Standing,
    TakeLateTurn,
    TakeTurn,
    View,
    finished,
    next_step,
)
from pgcdc_assets.flow.drift import watch
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.messages import messages_at, take_messages
from pgcdc_assets.flow.progress import TableProgress
from pgcdc_assets.flow.ranges import OpenRange
from pgcdc_assets.flow.reports import SyncReport
from pgcdc_assets.flow.serving import Serving
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.thinning import Thinning
from pgcdc_assets.flow.turn import Turn, take_turn
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.reader import BatchSummary
from pgcdc_assets.mirror.delta.copy import Failures
from pgcdc_assets.savedcatalog import save_catalog
from pgcdc_assets.settings import CATALOG_FILE
from pgcdc_assets.source.catalog.look import CatalogLook
from pgcdc_assets.spark.session import cancel_jobs

WAIT_SECONDS = 0.2
"""Seconds that the loop sleeps at most when nothing lands; a batch wakes it at once."""
COPY_ROUNDS = 3
"""Snapshots that a table is copied under one after the other, where somebody alters it meanwhile or right after."""


class Sync:
    """One run. ``run()`` returns when its bounds say so; any failure of a part ends it with that error."""

    def __init__(self, work: Work, conninfo: str, stream: LogStream, bounds: Bounds) -> None:
        self._work = work
        self._conninfo = conninfo
        self._stream = stream
        self._bounds = bounds
        self._channel = CopyChannel()
        self._asked: Sequence[TableName] = ()
        self._copies: Future[Failures] | None = None
        self._rounds: Counter[TableName] = Counter()
        """How often the copy of each table was begun: in this run, or, if the run follows, since a copy of it landed or
        since the last regular look with no copy under way."""
        self._failure: PgcdcError | None = None
        """The failure of a copy: raised when the other tables have caught up."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._seen: CatalogLook | None = None
        """The last whole look at the catalog, which all followed tables have been compared with."""
        # What an earlier run copied, and did not come to publish, is published by this one, whatever else happens.
        self._point = PointDue(work.progress.unlisted)
        known = work.observer.known_ranges()
        start = known[-1].end if known else work.log.start
        self._named = ZERO
        """The position that the log has to reach before tables that were away are listed again."""
        self._range = OpenRange(start, work.settings.range_bytes, work.settings.range_seconds)
        self._counted = start
        self._thinning = Thinning(work)
        self._started = self._moved = self._watched = time.monotonic()
        self._start = work.progress.replay_lsn
        self._copied: list[Copied] = []
        self._turns = self._transactions = self._rows = 0
        self._told: set[tuple[int, str]] = set()
        """Relations of which it was said that no mirror takes their rows, and why."""
        self._serving = Serving(work, self, lambda max_seconds: Allowance(max_seconds, bounds.stop))

    def run(self) -> SyncReport:
        try:
            self._stream.start()
            # Points that an earlier version published above the log, and copies that died before it came so far.
            self._stream.mark(self._work.progress.highest)
            self._watch()
            self._tell_changed()
            if self._copies is None:
                self._aim()
            while not self._finished():
                if not self._step():
                    self._stream.wait(WAIT_SECONDS)
        finally:
            try:
                self._end_copies()
            finally:
                self._stream.stop()
        self._take_landed()
        self._close_range()
        if self._failure is not None:
            raise self._failure
        return self.summary()

    def _step(self) -> bool:
        """Whether anything moved."""
        before, arrived = self._stream.complete_to, self._stream.arrived
        self._stream.take_events()
        moved = self._stream.complete_to > before
        if self._stream.arrived and not arrived:
            self._work.observer.progress("receive", f"the log is complete to {self._stream.complete_to}")
        moved |= self._take_copies()
        moved |= self._turn()
        moved |= self._serving.serve()
        due = self._range.due
        if due:
            self._close_range()
        due |= time.monotonic() - self._watched >= self._work.settings.range_seconds
        if due and not self._stream.arrived:
            self._watch()
        if due and self._level:
            self._succeed()
        if moved:
            self._moved = time.monotonic()
        return moved

    def _watch(self) -> None:
        """Look at the catalog, save it, and begin the copies that it, or an earlier run, asks for."""
        if self._bounds.follow and self._copies is None:
            self._rounds.clear()
        self._look()
        self._begin_copies()

    def _look(self) -> None:
        work = self._work
        self._seen = self._stream.look(work.catalog, work.settings.tables)
        live = self._seen.tables
        watch(work, live)
        if work.progress.unnamed:
            self._named = self._stream.mark_now()
            work.progress.named(self._named)
        if live != work.catalog.tables:
            work.catalog = replace(work.catalog, tables=live)
            save_catalog(work.catalog, CATALOG_FILE)
        self._watched = time.monotonic()

    # Copies -----------------------------------------------------------------------------------

    def _begin_copies(self, but: Collection[TableName] = ()) -> None:
        """Copy what waits for it, unless copies are under way or have failed: the next run tries those again."""
        if self._copies is not None or self._failure is not None:
            return
        names = [table.name for table in self._work.progress.waiting() if table.name not in but]
        names = [name for name in names if self._worth_a_copy(name)]
        if names:
            self._rounds.update(names)
            self._work.observer.progress("snapshot", f"copying {len(names)} tables")
            self._asked = names
            self._copies = self._pool.submit(copy, self._work, self._conninfo, names, self._channel)

    def _worth_a_copy(self, name: TableName) -> bool:
        """Whether the table may stay as it is for the time of a copy: under a storm of DDL no run would ever end."""
        if self._rounds[name] < COPY_ROUNDS:
            return True
        if not self._bounds.follow:
            why = f"was altered after or during each of its {COPY_ROUNDS} copies in this run"
            self._fail(CopyOutdated(why, thing=f"table {name}", do="run `pgcdc sync` when its definition rests"))
        return False

    def _take_copies(self) -> bool:
        if self._copies is None:
            return False
        ended = self._copies if self._copies.done() else None
        moved = self._take_landed()
        if ended is not None:
            self._copies = None
            again = self._copies_ended(ended)
            if again:
                self._look()
            # Those that were found to need a copy meanwhile, too.
            self._begin_copies(but=set(self._asked) - again)
            if self._copies is None:
                self._aim()
        return moved

    def _copies_ended(self, ended: Future[Failures]) -> set[TableName]:
        """Which tables to try again at once. One that cannot be copied keeps no other from catching up.

        Somebody altered or locked those; a run that follows tries them again and again, with rests. Any other run
        fails in the end, as with any other failure.
        """
        try:
            failures = ended.result()
        except PgcdcError as error:
            self._fail(error)
            return set()
        again: set[TableName] = set()
        for name, failure in failures.items():
            if not isinstance(failure, CopyOutdated | CopyBlocked):
                self._not_copied(name, failure)
                continue
            self._work.progress.not_copied(name, failure.what)
            if self._rounds[name] < COPY_ROUNDS:
                self._work.observer.progress("snapshot", f"again, for {failure.thing} {failure.what}")
                again.add(name)
            elif self._bounds.follow:
                self._work.observer.progress("snapshot", f"left for later: {failure.thing} {failure.what}")
                self._serving.not_copied(name, failure)
            elif name in self._work.progress:
                self._fail(failure)
        return again

    def _not_copied(self, name: TableName, failure: PgcdcError) -> None:
        """A failure of this table's copy alone sets the table aside; a run that follows goes on with the others."""
        reason, progress = of_one_table(failure), self._work.progress
        if reason is None or name not in progress:
            self._fail(failure)
            return
        progress.put_aside(name, progress[name].replay_lsn, reason)
        self._work.observer.progress("snapshot", f"{name} is set aside: {reason}")

    def _fail(self, error: PgcdcError) -> None:
        self._failure = self._failure or error
        self._work.observer.progress("snapshot", f"failed: {error}")

    def _take_landed(self) -> bool:
        moved = False
        while not self._channel.notes.empty():
            self._work.observer.progress("snapshot", self._channel.notes.get())
        while not self._channel.landed.empty():
            copied = self._channel.landed.get()
            if self._bounds.follow:
                del self._rounds[copied.table.name]
            if self._seen is not None and not self._seen.shows(copied.table):
                # Altered between the last look and its snapshot, or since: no point lists it before another look.
                self._seen = None
            self._work.progress.copied(copied.table, copied.report.consistent_point, copied.report.version)
            self._work.observer.copied(copied.report)
            begin_anew_if_unreadable(self._work.layout, self._work.identity, copied.table)
            self._copied.append(copied)
            self._point.owe()
            moved = True
        return moved

    def _end_copies(self) -> None:
        """A copy under way is given up: it must not commit once the lock is free."""
        self._channel.given_up.set()
        while self._copies is not None and not self._copies.done():
            # Again and again: it may stand before its first job, or between two.
            if self._work.spark is not None:
                cancel_jobs(self._work.spark)
            wait_for([self._copies], timeout=1)
        self._pool.shutdown(wait=True, cancel_futures=True)

    # The stream's goal ------------------------------------------------------------------------

    def _aim(self) -> None:
        """Tell the receiver how far to go, once no copy is under way.

        A table copied at C can be read together with the others only from C on, so a run that copied
        goes at least to C.
        """
        copied = max((c.report.consistent_point for c in self._copied), default=ZERO)
        self._stream.mark(copied)
        request = hold.current(self._work.layout)
        if request is not None and request.lsn is not None:
            # Before the goal, which may be the same: the receiver ends once it has reached that.
            self._stream.mark(request.lsn)
        if not self.following:
            self._stream.until(max(self._bounds.until or max(self._stream.source_position(), self._named), copied))

    @property
    def following(self) -> bool:
        return self._bounds.follow and self._failure is None

    # Turns ------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Do what is to be done next; whether anything moved."""
        view = self._view()
        if view.exact is not None:
            self._stream.mark(view.exact)
        step = next_step(view)
        moved = isinstance(step, TakeLateTurn)
        if isinstance(step, TakeLateTurn):
            self._catch_up(step)
            step = next_step(replace(self._view(), exact=view.exact, held=view.held, caught_up=True))
        if isinstance(step, TakeTurn):
            moved |= self._take(step)
        return moved

    def _view(self) -> View:
        # The position first, then the request: a request seen too late has an LSN above this position.
        complete, progress = self._stream.complete_to, self._work.progress
        request = hold.current(self._work.layout)
        exact = request.lsn if request is not None else None
        late = {entry.table.name for entry in progress.late()}
        return View(
            complete=complete,
            standings=[
                Standing(entry.table.name, entry.replay_lsn, entry.table.name in late) for entry in progress.followed()
            ],
            batches=self._work.log.batches,
            point=self._point,
            share_bytes=self._work.settings.range_bytes,
            gathers=not (self.following or self._copies is not None or self._stream.arrived),
            held=request is not None and request.lsn is None,
            exact=None if exact is None or progress.points.has(exact) else exact,
        )

    def _catch_up(self, step: TakeLateTurn) -> None:
        """Bring tables that were copied while the others went on nearer to these."""
        turn = take_turn(self._work, step.upto, self._entries(step.tables))
        self._turns += bool(turn.tables)
        self._point.refused_at = None

    def _take(self, step: TakeTurn) -> bool:
        """Take a turn and publish; whether it brought anything, or the point that was asked for."""
        progress = self._work.progress
        turn = take_turn(self._work, step.upto, self._entries(step.tables))
        messages = take_messages(self._work, step.upto)
        self._account(turn)
        if turn.outdated and not self._stream.arrived:
            self._begin_copies()
        if step.exact:
            progress.reread_versions()
        if turn.tables or messages.count or step.exact or self._point.due:
            self._point.published(step.upto, whole=self._publish(step.upto))
            if not self._point.due:
                self._succeed()
        self._stream.report_apply(progress.replay_lsn)
        return bool(turn.tables or messages.count) or (step.exact and not self._point.due)

    def _entries(self, names: Sequence[TableName]) -> list[TableProgress]:
        return [self._work.progress[name] for name in names]

    def _publish(self, upto: Lsn) -> bool:
        """Publish a point of what the catalog still shows to be right there; whether it lists every followed table.

        The log was complete to ``upto`` before this look, so that DDL which made a table's mirror wrong there has
        been committed, and is seen: the table is set aside or waits for a copy before the point is made.
        """
        if self._seen is None or not self._stream.stands(self._seen):
            self._look()
            if not self._stream.arrived:
                # What is copied after the receiver's end could not catch up: the next run begins with it.
                self._begin_copies()
        whole = self._work.progress.publish(upto, self._work.log.position(), messages_at(self._work, upto))
        self._tell_changed()
        return whole

    def _account(self, turn: Turn) -> None:
        batches = [b for b in self._work.log.batches(self._counted, turn.upto) if b.end <= turn.upto]
        if batches:
            self._counted = batches[-1].end
            self._range.add(batches, turn.tables, turn.seconds)
            self._transactions += sum(batch.transactions for batch in batches)
            self._rows += sum(sum(kinds.values()) for batch in batches for kinds in batch.counts.values())
            self._tell_untaken(batches)
        if turn.tables:
            self._turns += 1

    def _tell_changed(self) -> None:
        """Say of each table once what another hand did to its mirror."""
        for name, what in self._work.progress.changed.items():
            if name not in self._work.changed_told:
                self._work.changed_told.add(name)
                self._work.observer.progress("watch", f"the mirror of {name} is not what the source has: {what}")

    def _tell_untaken(self, batches: Sequence[BatchSummary]) -> None:
        """Say of each relation once what becomes of rows that no mirror takes."""
        span = LsnRange(batches[0].start, batches[-1].end)
        for rows in untaken(self._work, span, batches):
            if (rows.relation_id, rows.why) not in self._told:
                self._told.add((rows.relation_id, rows.why))
                what = f"rows of {rows.name} go into no mirror: {rows.why}"
                self._work.observer.progress("transform", what, lsn=str(span.start))

    # Ranges and the end -----------------------------------------------------------------------

    def _close_range(self) -> None:
        if self._range.empty:
            return
        report = closed_range(self._work, self._range, self._stream.source_position())
        self._work.observer.range_closed(report)
        merge_files(self._work, report)
        self._thinning.after_range(report.tables)

    def _finished(self) -> bool:
        now = time.monotonic()
        situation = Situation(
            running_seconds=now - self._started,
            idle_seconds=now - self._moved,
            following=self.following,
            copying=self.copying,
            answering=self._serving.busy,
            arrived=self._stream.arrived,
            level=self._level,
        )
        return finished(self._bounds, situation)

    @property
    def _level(self) -> bool:
        complete = self._stream.complete_to
        level = all(entry.replay_lsn >= complete for entry in self._work.progress.followed())
        return level and not self._point.at(complete)

    # What other commands ask for -----------------------------------------------------------------

    @property
    def copying(self) -> bool:
        """Copies are under way."""
        return self._copies is not None

    def copy_anew(self, tables: Sequence[TableName]) -> None:
        """Begin copies of these, as the source has them now; UnknownTable for one that is not published."""
        self._look()
        self._work.progress.request_copy(tables)
        for name in tables:
            del self._rounds[name]
        self._begin_copies()

    def rest_on(self) -> None:
        """Go on from the mirrors and the log as they are now: they were worked on between two turns."""
        progress, start = self._work.progress, self._work.log.start
        progress.reread_versions()
        progress.log_cut(start)
        self._range.start, self._counted = max(self._range.start, start), max(self._counted, start)
        if progress.renewed:
            self._point.owe()

    def _succeed(self) -> None:
        """A run that follows may go on for days: it has done what an earlier one failed to do."""
        if self.following and self._copies is None:
            self._work.operation.succeed()

    def summary(self) -> SyncReport:
        progress = self._work.progress
        return SyncReport(
            start=self._start,
            end=progress.replay_lsn,
            transform_lsn=self._work.log.position(),
            copied=[copied.report for copied in self._copied],
            turns=self._turns,
            transactions=self._transactions,
            rows=self._rows,
            stream_aborts=self._stream.stream_aborts,
            seconds=time.monotonic() - self._started,
            set_aside=[(entry.table.name, entry.reason or "") for entry in progress.set_aside()],
            changed=sorted(progress.changed.items()),
            refused=frozenset(entry.table.name for entry in progress.set_aside() if entry.refused),
        )
