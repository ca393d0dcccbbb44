"""The ranges of a run. What the run's turns take is counted into the open range. When the range is closed, its report
is written and its many small files are merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.failures import contained
from pgcdc_assets.flow.accounting import keep_untaken, untaken
from pgcdc_assets.flow.messages import merge_messages, messages_report
from pgcdc_assets.flow.ranges import ROW_KINDS, OpenRange, rows_by_kind
from pgcdc_assets.flow.reports import RangeReport, TableTurn
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.thinning import Thinning
from pgcdc_assets.flow.turn import Turn
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.summary import BatchSummary
from pgcdc_assets.log.upkeep import compact
from pgcdc_assets.structure.record import TableRecord


class RunRanges:
    """The ranges of one run. Every method runs in the run's own thread."""

    def __init__(self, work: Work, stream: LogStream) -> None:
        self._work = work
        self._stream = stream
        known = work.observer.known_ranges()
        start = known[-1].end if known else work.log.start
        self._open = OpenRange(start, work.settings.range_bytes, work.settings.range_seconds)
        self._counted = start
        """Batches up to this LSN are counted."""
        self._thinning = Thinning(work)
        self._told: set[tuple[int, str]] = set()
        """Relations, and reasons why no mirror takes their rows, that were reported already."""
        self.turns = self.transactions = self.rows = 0

    @property
    def due(self) -> bool:
        return self._open.due

    def count(self, turn: Turn) -> None:
        """Count a turn of all tables, with its batches."""
        batches = [b for b in self._work.log.batches(self._counted, turn.upto) if b.end <= turn.upto]
        if batches:
            self._counted = batches[-1].end
            self._open.add(batches, turn.tables, turn.seconds)
            self.transactions += sum(batch.transactions for batch in batches)
            self.rows += sum(sum(kinds.values()) for batch in batches for kinds in batch.counts.values())
            self._tell_untaken(batches)
        self.count_late(turn)

    def count_late(self, turn: Turn) -> None:
        """Count a turn of late tables. Its batches were counted already, in a turn of the other tables."""
        self.turns += bool(turn.tables)

    def close(self) -> None:
        """Close the open range, if it holds anything."""
        if self._open.empty:
            return
        report = closed_range(self._work, self._open, self._stream.source_position())
        self._work.observer.range_closed(report)
        merge_files(self._work, report)
        self._thinning.after_range(report.tables)

    def _tell_untaken(self, batches: Sequence[BatchSummary]) -> None:
        """Report once for each relation why no mirror takes its rows."""
        span = LsnRange(batches[0].start, batches[-1].end)
        for rows in untaken(self._work, span, batches):
            if (rows.relation_id, rows.why) not in self._told:
                self._told.add((rows.relation_id, rows.why))
                what = f"rows of {rows.name} go into no mirror: {rows.why}"
                self._work.observer.progress("transform", what, lsn=str(span.start))


def closed_range(work: Work, open_range: OpenRange, source_position: Lsn) -> RangeReport:
    """Close the range; returns its report. ``source_position``: the source's flush LSN now."""
    span, batches, turns, seconds = open_range.close()
    report = range_report(work, span, batches, turns, seconds, source_position)
    keep_untaken(work, batches, report.untaken)
    return report


def merge_files(work: Work, report: RangeReport) -> None:
    """Merge the small files of batches and turns into one file per range, so that later turns read log and feeds
    fast."""
    compact(work.log, report.span)
    merge_messages(work)
    for name in report.tables:
        if name in work.progress:
            _merge_feed(work, work.progress[name])


def _merge_feed(work: Work, entry: TableRecord) -> None:
    """Merge a feed's small files. If this fails, the files stay. The mirror has applied them already, and goes on."""
    with contained() as failed:
        work.feeds.open(entry.table).compact(entry.replay_lsn)
    if failed.reason is not None:
        work.observer.progress("apply", f"the change feed of {entry.table.name} is not merged: {failed.reason}; "
                               "`pgcdc repair` of the ranges that it holds derives them again")  # fmt: skip


def range_report(
    work: Work,
    span: LsnRange,
    batches: Sequence[BatchSummary],
    turns: dict[TableName, TableTurn],
    seconds: dict[str, float],
    source_position: Lsn,
) -> RangeReport:
    replay_lsn = work.progress.replay_lsn
    last_commit = max((batch.last_commit_ts for batch in batches if batch.last_commit_ts is not None), default=None)
    return RangeReport(
        span=span,
        transactions=sum(batch.transactions for batch in batches),
        rows=rows_by_kind(batches),
        bytes=sum(batch.bytes for batch in batches),
        transform_lsn=work.log.position(),
        replay_lsn=replay_lsn,
        lag_bytes=max(0, source_position - replay_lsn),
        lag_seconds=None if last_commit is None else max(0.0, (datetime.now(UTC) - last_commit).total_seconds()),
        tables={**_from_log(work, span, batches), **turns},
        seconds=seconds,
        untaken=untaken(work, span, batches),
        messages=messages_report(work, batches),
    )


def _from_log(work: Work, span: LsnRange, batches: Sequence[BatchSummary]) -> dict[TableName, TableTurn]:
    """The changed tables, as the log counts their rows. Changes that an earlier run applied before it died are
    included."""
    places = {shape.relation_id: work.progress.router.place(shape) for shape in work.log.shapes(span).values()}
    mirrors = {relation: place.table for relation, place in places.items() if place.table is not None}
    changes: dict[TableName, Counter[str]] = {}
    for batch in batches:
        for relation, kinds in batch.counts.items():
            if relation in mirrors:
                rows = {kind: count for kind, count in kinds.items() if kind in ROW_KINDS}
                changes.setdefault(mirrors[relation], Counter()).update(rows)
    result: dict[TableName, TableTurn] = {}
    for name, counts in changes.items():
        if name in work.progress:
            entry = work.progress[name]
            result[name] = TableTurn(name, entry.replay_lsn, entry.version, changes=dict(counts))
    return result
