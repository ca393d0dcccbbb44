"""Carries out the turns of one run, as :mod:`pgcdc_assets.flow.decide` decides. A turn applies the log, up to one
boundary, to the followed mirrors. After a turn, a consistent point is published if mirrors have changed since the last
point. If the log has rows that do not fit a mirror, the catalog is checked, and the mirror is changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pgcdc_assets import logs
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked
from pgcdc_assets.feed.plan import Followed, Router, known_leaves
from pgcdc_assets.feed.transform import transform
from pgcdc_assets.flow.catalogwatch import CatalogWatch, carry_comments
from pgcdc_assets.flow.copies import Copies
from pgcdc_assets.flow.decide import PointDue, TablePosition, TakeLateTurn, TakeTurn, View, next_step
from pgcdc_assets.flow.messages import messages_at, take_messages
from pgcdc_assets.flow.meter import turn_spans
from pgcdc_assets.flow.ranges import RunRanges
from pgcdc_assets.flow.reports import TableTurn, Turn
from pgcdc_assets.flow.requests import VerifyRequests
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.mirror.target import Applied
from pgcdc_assets.structure.record import Strange, TableRecord, UnreadRows


class Turns:
    """The turns of one run. All methods are called in the run's own thread. ``succeed`` is called when a point lists
    every followed table."""

    def __init__(
        self, work: Work, stream: LogStream, catalog: CatalogWatch, copies: Copies, ranges: RunRanges,
        succeed: Callable[[], None], *, follow: bool,
    ) -> None:  # fmt: skip
        self._work = work
        self._stream = stream
        self._catalog = catalog
        self._copies = copies
        self._ranges = ranges
        self._succeed = succeed
        self.requests = VerifyRequests(work.layout)
        self._follow = follow
        self._spans = turn_spans(work.observer)
        self._reported: set[TableName] = set()
        """Tables for which this run has reported changes by another writer."""
        self._blocked: str | None = None
        """A description of the lock that prevented the last catalog check; None if no lock prevented it."""
        # A point is due at once if an earlier operation has changed mirrors, and ended before it made a point.
        self.point = PointDue(work.progress.listed.unlisted or work.progress.listed.shown_from > ZERO)

    @property
    def level(self) -> bool:
        """Whether the mirrors have applied the whole log, and a point lists them."""
        complete = self._stream.complete_to
        level = all(entry.replay_lsn >= complete for entry in self._work.progress.followed())
        return level and not self.point.at(complete)

    @property
    def applied_to(self) -> Lsn | None:
        """The LSN up to which a later run has nothing to apply; None if mirrors lack changes of the log, or if a point
        is due for followed tables."""
        if not self.level or (self.point.due and self._work.progress.followed()):
            return None
        # After a restore of the source, new transactions may commit above the log's recorded position.
        return min(self._stream.complete_to, self._work.log.position())

    def begin(self) -> None:
        """Look for rows of dropped partitions in the log, before the run's first catalog check. Their relations were
        dropped before this check, because the receiver of an earlier run did not find them in the catalog. So points
        list their tables again from the LSN of this check on. A run without a given end always reaches this LSN, but
        it may not reach the LSN of a catalog check that follows a turn."""
        complete, tables = self._stream.complete_to, self._work.progress.followed()
        span = LogSpan(self._work.log, LsnRange(min(self._work.progress.replay_lsn, complete), complete))
        _unlist_roots(self._work, span, tables)
        self._work.looked_to = complete

    def check_catalog(self) -> bool:
        """Publish new tables, check the catalog, and write comments to the mirrors. Returns False if a lock on a table
        prevents reading the catalog. In follow mode, the run then makes no points until the lock is released. Without
        follow mode, CopyBlocked ends the run.

        A point is due after the check if a mirror got comments, if tables may be listed again from this check's LSN on,
        or if the previous check was prevented by a lock."""
        self._stream.publish_new(self._work)
        before = self._catalog.seen_at
        try:
            self._catalog.check()
        except CopyBlocked as blocked:
            if not self._follow:
                raise
            if str(blocked) != self._blocked:
                self._blocked = str(blocked)
                self._work.say("watch", f"the check of the source's catalog waits for a lock: {blocked}")
            return False
        if self._blocked is not None:
            self._blocked = None
            self.point.mark_due()
        carried = not self._catalog.paused and carry_comments(self._work)
        if carried or self._catalog.seen_at != before:
            self.point.mark_due()
        return True

    def close(self) -> None:
        if self._spans is not None:
            self._spans.close()

    def begin_copies(self) -> None:
        """Begin to copy the tables that wait for a copy. Does nothing if the receiver has ended, because a new copy
        could then not catch up. The next run makes the copy."""
        if not self._stream.arrived:
            self._copies.begin()

    def turn(self, *, paused: bool, gathers: bool) -> bool:
        """Carry out the step that :func:`next_step` decides; returns whether anything has changed."""
        moved = False
        if not paused:
            # An earlier turn may have found rows that do not fit a mirror while a lock prevented the catalog check.
            self._check_unread_rows()
        log, view = self._view(paused=paused, gathers=gathers)
        if view.exact is not None:
            self._stream.mark(view.exact)
        step = next_step(view)
        if isinstance(step, TakeLateTurn):
            moved |= self._catch_up(log, step)
            log, again = self._view(paused=paused, gathers=gathers)
            step = next_step(replace(again, exact=view.exact, held=view.held, caught_up=True))
        if isinstance(step, TakeTurn):
            moved |= self._take(log, step)
        return moved

    def _view(self, *, paused: bool, gathers: bool) -> tuple[LogSpan, View]:
        """The facts that decide the next step, and the part of the log that is not applied yet."""
        # The log's position is read before the request of `verify`. If `verify` places its request between the two
        # reads, its LSN is above this position, so the turn does not pass that LSN.
        complete, progress = self._stream.complete_to, self._work.progress
        log = LogSpan(self._work.log, LsnRange(min(progress.replay_lsn, complete), complete))
        request = self.requests.current()
        exact = request.lsn if request is not None else None
        late = {entry.table.name for entry in progress.listed.late()}
        return log, View(
            complete=complete,
            positions=[
                TablePosition(entry.table.name, entry.replay_lsn, entry.table.name in late)
                for entry in progress.followed()
                if not entry.reshaping
            ],
            batches=log.ending_within,
            point=self.point,
            share_bytes=self._work.settings.range_bytes,
            gathers=gathers and not self._stream.arrived,
            held=request is not None and request.lsn is None,
            paused=paused,
            exact=None if exact is None or progress.points.has(exact) else exact,
        )

    def _catch_up(self, log: LogSpan, step: TakeLateTurn) -> bool:
        """Take a turn of the late tables only, so that they catch up with the other tables. Returns whether any of them
        has a higher position now."""
        before = self._entries(step.tables)
        turn = take_turn(self._work, log, step.upto, before)
        self._ranges.count_late(turn)
        moved = any(
            now.replay_lsn > was.replay_lsn for now, was in zip(self._entries(step.tables), before, strict=True)
        )
        if moved:
            self.point.refused_at = None
        self._check_unread_rows()
        return moved

    def _take(self, log: LogSpan, step: TakeTurn) -> bool:
        """Take a turn, and publish a point if one is due or ``verify`` has asked for it. Returns whether the turn
        changed anything, or made the point for ``verify``."""
        progress, began = self._work.progress, time.time()
        start = progress.replay_lsn
        with logs.about(lsn=str(step.upto)):
            turn = take_turn(self._work, log, step.upto, self._entries(step.tables))
        messages = take_messages(self._work, log, step.upto)
        batches = self._ranges.count(log, turn)
        applied = time.time()
        self._check_unread_rows()
        if step.exact:
            progress.reread_versions()
        if turn.tables or messages.count or step.exact or self.point.due:
            due = time.monotonic()
            self.point.published(step.upto, whole=self.publish(step.upto))
            if progress.published == step.upto:
                self._work.meter.published(time.monotonic() - due)
            if not self.point.due:
                self._succeed()
        else:
            self._work.meter.unpublished()
        self._stream.report_apply(progress.replay_lsn)
        if self._spans is not None and turn.tables:
            self._spans.record(began, start, turn, batches, applied)
        return bool(turn.tables or messages.count) or (step.exact and not self.point.due)

    def _check_unread_rows(self) -> None:
        """Check the catalog if a table waits for a check, because the log has rows that do not fit its mirror, or
        because the mirror lacks new columns."""
        if self._work.progress.needs_catalog_check:
            self.check_catalog()
            self.begin_copies()

    def publish(self, upto: Lsn) -> bool:
        """Publish a point at ``upto``; returns whether the point lists every followed table. The catalog is checked
        first, if it has changed since the last check. No point is published while a lock prevents the check.

        So no point lists a mirror that DDL has made wrong. The log was complete to ``upto`` before the check, so the
        check sees all DDL that was committed below ``upto``. A table that this DDL affects is set aside, or waits for a
        copy, before the point is made."""
        if not self._catalog.is_current:
            if not self.check_catalog():
                return False
            self.begin_copies()
        whole = self._work.progress.publish(upto, self._work.log.position(), messages_at(self._work, upto))
        self.report_foreign_changes()
        self._work.after_point()
        return whole

    def report_foreign_changes(self) -> None:
        """Report, once for each table, that another writer changed rows of its mirror."""
        for name, what in self._work.progress.changed.items():
            if name not in self._reported:
                self._reported.add(name)
                self._work.say("watch", f"the mirror of {name} does not match the source: {what}", name)

    def _entries(self, names: Sequence[TableName]) -> list[TableRecord]:
        return [self._work.progress[name] for name in names]


def take_turn(work: Work, log: LogSpan, upto: Lsn, tables: Sequence[TableRecord]) -> Turn:
    """Apply the log to those of the ``tables`` that are below ``upto``, a boundary up to which the log is complete.
    ``log``: the log up to its end, as read for this turn.

    Afterwards, these tables are at ``upto``; a table without changes gets this position without a Delta commit. There
    are three exceptions. A table that cannot be followed is set aside. If commits of another writer made every attempt
    to commit to a mirror fail, the next turn tries again. If the log has a row with a structure, or of a partition,
    that the mirror does not have, nothing is applied to the table until the next catalog check.
    """
    behind = [entry for entry in tables if entry.replay_lsn < upto and not entry.reshaping and entry.unread is None]
    _hold_strays(work, _span(log, behind, max(upto, log.lsns.end)), behind)
    behind = [entry for entry in behind if _applies(work, entry.table.name)]
    span, router = _span(log, behind, upto), work.progress.router
    _unlist_roots(work, span, behind)
    names = {name for shape in span.shapes.values() for name in router.place(shape).concerned}
    changed = [entry for entry in behind if entry.table.name in names]
    done, outrun, seconds = _derive_and_apply(work, changed, span, router) if changed else ([], set(), {})
    for entry in behind:
        if entry.table.name not in outrun and _applies(work, entry.table.name):
            work.progress.moved(entry.table.name, upto)
    return Turn(upto, done, seconds)


def _applies(work: Work, name: TableName) -> bool:
    record = work.progress[name]
    return record.followed and record.unread is None


def _span(log: LogSpan, tables: Sequence[TableRecord], upto: Lsn) -> LogSpan:
    return log.part(LsnRange(min((entry.replay_lsn for entry in tables), default=upto), upto))


def _hold_strays(work: Work, span: LogSpan, tables: Sequence[TableRecord]) -> None:
    """Pause tables whose partitions have changed: nothing is applied to them until the next catalog check. There are
    two cases:

    - The log has rows of a leaf partition that is not among the leaves recorded for the table's mirror.
    - The table was itself a partition of another table for some time, so the stream sent its rows as rows of that other
      table.

    Each batch's summary in the log names the leaf partitions of its rows, and shows both cases. The rows themselves do
    not: a row that is published via the root looks like a row of the root. Nor does the catalog show a leaf that was
    dropped or detached.

    ``span`` reaches beyond the turn to the log's end. A partition may have been attached below the turn's end with rows
    that the stream never sends, although the log has its first row only after the turn.
    """
    for entry in tables:
        name, oid, known = entry.table.name, entry.table.oid, known_leaves(entry.table)
        partitions = [batch.partitions for batch in span.batches if batch.end > entry.replay_lsn]
        if any(oid in of_root for leaves in partitions for of_root in leaves.values()):
            what = "it was a partition of another table for some time, and its changes arrived as changes of that table"
            work.say("watch", f"table {name}: {what}", name)
            work.progress.hold(name, UnreadRows(Strange.ATTACHED, what))
        elif any(set(leaves.get(oid, ())) - known for leaves in partitions):
            what = "rows of an unknown partition arrived; it may have been dropped or detached since then"
            work.progress.hold(name, UnreadRows(Strange.PARTITION, what))


def _unlist_roots(work: Work, span: LogSpan, tables: Sequence[TableRecord]) -> None:
    """Leave a partitioned table out of points below the next catalog check, if the log has rows of a relation that is
    not known, was dropped before the receiver read its facts, and had the table's columns. It may have been a partition
    of the table. The source's table then had these rows until the drop, and the mirror never gets them. Rows below
    :attr:`Work.looked_to` are ignored."""
    # The summaries of batches name the leaves of a table that is published via its root (see _hold_strays).
    roots = [record.table for record in tables if record.table.partitioned and not record.table.via_root]
    if not roots:
        return
    start, end = span.lsns.start, span.lsns.end
    new = span.part(LsnRange(min(max(start, work.looked_to), end), end))
    dropped = [shape for shape in new.shapes.values() if shape.forgotten]
    if not dropped:
        return
    known = {oid for record in work.progress for oid in (record.table.oid, *known_leaves(record.table))}
    columns = [{column.name for column in shape.columns} for shape in dropped if shape.relation_id not in known]
    work.progress.unlist(root.name for root in roots if {column.name for column in root.columns} in columns)


def _derive_and_apply(
    work: Work, changed: Sequence[TableRecord], span: LogSpan, router: Router
) -> tuple[list[TableTurn], set[TableName], dict[str, float]]:
    upto, started = span.lsns.end, time.monotonic()
    followed = [Followed(entry.table, entry.replay_lsn, entry.unchanged_from) for entry in changed]
    parts = transform(work.session(), span, work.feeds, followed, router=router)
    derived = time.monotonic()
    known = {entry.table.name: entry.table for entry in changed}
    applied = work.target.apply(list(parts.values()), upto, known)
    seconds = {"transform": derived - started, "apply": time.monotonic() - derived}
    outrun = {result.table.name for result in applied if result.outrun}
    applied = [result for result in applied if not result.outrun]
    done = [record(work, result, parts[result.table.name].counts, seconds["transform"]) for result in applied]
    ended = {name: part.ended for name, part in parts.items() if part.ended is not None}
    for name, end in ended.items():
        if end.unread:
            work.progress.hold(name, UnreadRows(Strange.STRUCTURE, end.reason))
            work.say("apply", f"{name} is paused until the next catalog check: {end.reason}", name, end.lsn)
    failed = {name: (end.lsn, end.reason) for name, end in ended.items() if not end.unread}
    failed |= {result.table.name: result.set_aside for result in applied if result.set_aside is not None}
    for name, (lsn, reason) in failed.items():
        work.put_aside(name, lsn, reason)
    return done, outrun, seconds


def record(work: Work, result: Applied, changes: Mapping[str, int], seconds: float = 0.0) -> TableTurn:
    """Record the position and version that a table has after an apply or a repair; returns what it changed.
    ``changes``: the number of rows in the table's feed, by operation."""
    version = result.version if result.version >= 0 else None
    # If the table is set aside, the mirror has no rows with the new columns, and maybe not even the columns.
    table = result.table if result.set_aside is None else None
    work.progress.moved(result.table.name, result.replay_lsn, version, table)
    return TableTurn(
        table=result.table.name,
        replay_lsn=result.replay_lsn,
        version=result.version,
        inserted=result.inserted,
        updated=result.updated,
        deleted=result.deleted,
        changes=dict(changes),
        seconds_transform=seconds,
        seconds_apply=result.seconds,
    )
