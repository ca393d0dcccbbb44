"""The LSN ranges of a run. A range is one or more whole batches of the log. It is a Dagster partition: the unit that
people see, and that backfills use. A batch is usually smaller than a range, so that changes are applied quickly.

Each batch that a turn has applied is added to the open range. The range is closed when it has reached a certain size or
a certain age. Then its report is made, and its small files in log and feeds are merged. The report's numbers come from
the batches' summaries in the log. So even if a run dies before it closes a range, the report that the next run makes
covers the whole range.

The log counts its rows by relation. If a relation's rows are applied to no mirror, the report says why. The transform
makes the opposite check: it sets a table aside if the table's feed lacks a row that the log counts
(:func:`pgcdc_assets.feed.transform.transform`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LogCorrupt
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.plan import Router, known_leaves
from pgcdc_assets.flow.maintenance import Thinning
from pgcdc_assets.flow.messages import merge_messages, messages_report
from pgcdc_assets.flow.reports import RangeReport, TableTurn, Turn, Untaken
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.log.summary import ROW_KINDS, BatchSummary
from pgcdc_assets.log.upkeep import compact
from pgcdc_assets.points.untaken import UntakenLedger, UntakenRows
from pgcdc_assets.protocol.shape import Shape
from pgcdc_assets.source.catalog.tables import TablePatterns
from pgcdc_assets.structure.record import TableState


@dataclass
class OpenRange:
    """The range to which applied batches are added. After it is closed, the object describes the next range."""

    start: Lsn
    max_bytes: int
    min_seconds: float
    clock: Callable[[], float] = time.monotonic
    _end: Lsn | None = None
    _bytes: int = 0
    _opened: float | None = None
    _turns: dict[TableName, TableTurn] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)

    def add(self, batches: Sequence[BatchSummary], turns: Sequence[TableTurn], seconds: dict[str, float]) -> None:
        """Add the batches that one turn applied. The age of a range counts from its first batch with a transaction, so
        that no range is closed while the source is idle."""
        if batches:
            self._end = batches[-1].end
        self._bytes += sum(batch.bytes for batch in batches)
        if self._opened is None and any(batch.transactions for batch in batches):
            self._opened = self.clock()
        for turn in turns:
            before = self._turns.get(turn.table)
            self._turns[turn.table] = summed(before, turn) if before else turn
        for stage, spent in seconds.items():
            self._seconds[stage] = self._seconds.get(stage, 0.0) + spent

    @property
    def due(self) -> bool:
        if self._opened is None:
            return False
        return self._bytes >= self.max_bytes or self.clock() - self._opened >= self.min_seconds

    @property
    def empty(self) -> bool:
        return self._opened is None

    def close(self) -> tuple[LsnRange, dict[TableName, TableTurn], dict[str, float]]:
        """End the range at its last batch, and open the next range there."""
        assert self._end is not None
        closed = LsnRange(self.start, self._end), self._turns, self._seconds
        self.start, self._end, self._bytes, self._opened = self._end, None, 0, None
        self._turns, self._seconds = {}, {}
        return closed


def summed(left: TableTurn, right: TableTurn) -> TableTurn:
    """The sum of two turns of one table. Position and version are those of the later turn, ``right``."""
    return TableTurn(
        table=right.table,
        replay_lsn=right.replay_lsn,
        version=right.version,
        inserted=left.inserted + right.inserted,
        updated=left.updated + right.updated,
        deleted=left.deleted + right.deleted,
        changes=dict(Counter(left.changes) + Counter(right.changes)),
        seconds_transform=left.seconds_transform + right.seconds_transform,
        seconds_apply=left.seconds_apply + right.seconds_apply,
    )


def rows_by_kind(batches: Sequence[BatchSummary]) -> dict[str, int]:
    """The number of row messages in these batches, by pgoutput's letter for the kind."""
    total: Counter[str] = Counter()
    for batch in batches:
        for kinds in batch.rows.values():
            total.update(kinds)
    return {kind: total[kind] for kind in ROW_KINDS}


class Why(StrEnum):
    """Why rows of the log were applied to no mirror."""

    LEFT_OUT = "the setting `tables` excludes the table"
    COPY = "the table waits for a copy, which will contain these rows"
    RENAMED = "the table was renamed, and the mirror with the new name gets these rows"
    SET_ASIDE = "the table is set aside"
    LEFT = "this partition no longer belongs to the table, and neither do its rows"
    UNKNOWN = "this relation belongs to no mirrored table"


def untaken(work: Work, span: LogSpan) -> list[Untaken]:
    """The rows of ``span`` that belong to no followed table, by relation."""
    counts = span.rows
    if not counts:
        return []
    router = work.progress.router
    shapes = {shape.relation_id: shape for shape in span.shapes.values()}
    if lacking := counts.keys() - shapes.keys():
        raise LogCorrupt(f"the log counts rows of relation {min(lacking)}, but lacks the columns of this relation",
                         lsn=span.lsns.start)  # fmt: skip
    others = [shapes[relation] for relation in sorted(counts) if router.place(shapes[relation]).table is None]
    every = Router.of(entry.table for entry in work.progress) if others else router
    return [Untaken(s.relation_id, s.table, counts[s.relation_id].total(), _why(work, every, s)) for s in others]


def keep_untaken(work: Work, batches: Sequence[BatchSummary], found: Sequence[Untaken]) -> None:
    """Store the row counts of relations that belong to no known table, so that ``status`` reports them after the run.
    If a run died before it closed its range, the next run gets the same batches again. So an LSN is stored with each
    count: batches up to this LSN are included, and are not counted again."""
    lost = [entry for entry in found if entry.why is Why.UNKNOWN]
    if not lost:
        return
    ledger = UntakenLedger(work.layout)
    known = ledger.all()
    new: list[UntakenRows] = []
    for entry in lost:
        stored = known[entry.relation_id].end if entry.relation_id in known else ZERO
        holding = [batch for batch in batches if batch.end > stored and _rows(batch, entry.relation_id)]
        if holding:
            rows = sum(_rows(batch, entry.relation_id) for batch in holding)
            span = (holding[0].start, holding[-1].start, holding[-1].end)
            new.append(UntakenRows(entry.relation_id, entry.name, rows, *span))
    ledger.add(new)


def _rows(batch: BatchSummary, relation: int) -> int:
    return sum(batch.rows.get(relation, {}).values())


def _came(work: Work, table: Table, leaf: int) -> bool:
    """Whether ``leaf`` is a leaf partition that was unlogged or detached earlier, and whose rows the stream contains
    now. The table's mirror lacks this partition's earlier rows, so the next catalog check makes the table wait for a
    new copy."""
    now = work.catalog.table(table.name)
    known = {one.oid for one in table.outside} | {one.oid for one in (now.leaves if now is not None else ())}
    return leaf in known


def _why(work: Work, every: Router, shape: Shape) -> Why:
    place = every.place(shape)
    entries = [work.progress[name] for name in place.concerned]
    if any(entry.state is TableState.SET_ASIDE for entry in entries):
        return Why.SET_ASIDE
    if entries:
        return Why.RENAMED if all(entry.former for entry in entries) else Why.COPY
    if holders := [entry for entry in work.progress if shape.relation_id in known_leaves(entry.table)]:
        if not any(_came(work, entry.table, shape.relation_id) for entry in holders):
            return Why.LEFT
        return Why.SET_ASIDE if any(entry.state is TableState.SET_ASIDE for entry in holders) else Why.COPY
    meant = TablePatterns.parse(work.settings.tables).match(shape.root or shape.table)
    return Why.UNKNOWN if meant else Why.LEFT_OUT


class RunRanges:
    """The ranges of one run. Every method runs in the run's own thread."""

    def __init__(self, work: Work, stream: LogStream) -> None:
        self._work = work
        self._stream = stream
        known = work.observer.known_ranges()
        start = known[-1].end if known else work.log.start
        self._open = OpenRange(start, work.settings.range_bytes, work.settings.range_seconds)
        self._counted = start
        """Batches up to this LSN are in the open range, or in an earlier range."""
        self._thinning = Thinning(work)
        self._reported: set[tuple[int, str]] = set()
        """The relations that were reported already, each with the reason why its rows are applied to no mirror."""
        self.turns = self.transactions = self.rows = 0

    @property
    def due(self) -> bool:
        return self._open.due

    def count(self, log: LogSpan, turn: Turn) -> list[BatchSummary]:
        """Add the batches that no earlier turn has applied to the open range; returns them. Not called for a turn of
        late tables only, which has no such batches."""
        batches = log.ending_within(self._counted, turn.upto)
        if batches:
            self._counted = batches[-1].end
            self._open.add(batches, turn.tables, turn.seconds)
            self.transactions += sum(batch.transactions for batch in batches)
            self.rows += sum(sum(kinds.values()) for batch in batches for kinds in batch.counts.values())
            self._report_untaken(log.part(LsnRange(batches[0].start, batches[-1].end)))
        self._work.meter.took(batches, turn.seconds)
        self.turns += bool(turn.tables)
        return batches

    def count_late(self, turn: Turn) -> None:
        """Count a turn of late tables only. Its batches are counted in the turns of the other tables."""
        self._work.meter.took([], turn.seconds)
        self.turns += bool(turn.tables)

    def close(self) -> None:
        """Close the open range, unless it is empty."""
        if self._open.empty:
            return
        lsns, turns, seconds = self._open.close()
        span = LogSpan(self._work.log, lsns)
        report = range_report(self._work, span, turns, seconds, self._stream.source_position())
        keep_untaken(self._work, span.batches, report.untaken)
        self._work.observer.range_closed(report)
        merge_files(self._work, report)
        self._thinning.after_range(report.tables)

    def _report_untaken(self, span: LogSpan) -> None:
        for rows in untaken(self._work, span):
            if (rows.relation_id, rows.why) not in self._reported:
                self._reported.add((rows.relation_id, rows.why))
                what = f"rows of {rows.name} are not applied to a mirror: {rows.why}"
                self._work.say("transform", what, rows.name, span.lsns.start)


def merge_files(work: Work, report: RangeReport) -> None:
    """Merge the small files that a range's batches and turns have left in log and feeds, so that later turns open fewer
    files."""
    compact(work.log, report.span)
    merge_messages(work)
    for name in report.tables:
        if name not in work.progress:
            continue
        entry = work.progress[name]
        with contained() as failed:
            work.feeds.open(entry.table).compact(entry.replay_lsn)
        if failed.reason is not None:
            # The table is still followed, because its mirror has already applied the changes in these files.
            what = f"small files of the change feed of {name} were not merged: {failed.reason}"
            work.say("apply", f"{what}; `pgcdc repair` of the table's ranges rebuilds the feed", name)


def range_report(
    work: Work, span: LogSpan, turns: dict[TableName, TableTurn], seconds: dict[str, float], source_position: Lsn
) -> RangeReport:
    """The report of the range ``span``. ``source_position``: the source's present flush LSN, for the lag."""
    replay_lsn, batches = work.progress.replay_lsn, span.batches
    first_commit = min((batch.first_commit_ts for batch in batches if batch.first_commit_ts is not None), default=None)
    last_commit = max((batch.last_commit_ts for batch in batches if batch.last_commit_ts is not None), default=None)
    return RangeReport(
        span=span.lsns,
        transactions=sum(batch.transactions for batch in batches),
        rows=rows_by_kind(batches),
        bytes=sum(batch.bytes for batch in batches),
        transform_lsn=work.log.position(),
        replay_lsn=replay_lsn,
        lag_bytes=max(0, source_position - replay_lsn),
        lag_seconds=None if last_commit is None else max(0.0, (datetime.now(UTC) - last_commit).total_seconds()),
        tables={name: _with_rows(work, turn) for name, turn in {**_from_log(work, span), **turns}.items()},
        seconds=seconds,
        untaken=untaken(work, span),
        messages=messages_report(work, batches),
        committed=(first_commit, last_commit) if first_commit and last_commit else None,
    )


def _with_rows(work: Work, turn: TableTurn) -> TableTurn:
    """The turn with ``rows`` set to the mirror's row count. If the mirror cannot be read, ``rows`` stays None, and the
    next turn reports the error."""
    with contained():
        return replace(turn, rows=work.target.rows(turn.table))
    return turn


def _from_log(work: Work, span: LogSpan) -> dict[TableName, TableTurn]:
    """The tables with rows in the range, with the log's row counts. This includes rows that were applied by an earlier
    run which died before it closed the range."""
    router = work.progress.router
    places = {shape.relation_id: router.place(shape).table for shape in span.shapes.values()}
    changes: dict[TableName, Counter[str]] = {}
    for relation, kinds in span.rows.items():
        if (name := places.get(relation)) is not None:
            changes.setdefault(name, Counter()).update(kinds)
    result: dict[TableName, TableTurn] = {}
    for name, counts in changes.items():
        if name in work.progress:
            entry = work.progress[name]
            result[name] = TableTurn(name, entry.replay_lsn, entry.version, changes=dict(counts))
    return result
