"""The ranges of a run. What the run's turns take is counted into the open range. When the range is closed, its report
is written and its many small files are merged."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.failures import contained
from pgcdc_assets.flow.accounting import keep_untaken, untaken
from pgcdc_assets.flow.messages import merge_messages, messages_report
from pgcdc_assets.flow.ranges import OpenRange, rows_by_kind
from pgcdc_assets.flow.reports import RangeReport, TableTurn
from pgcdc_assets.flow.stream import LogStream
from pgcdc_assets.flow.thinning import Thinning
from pgcdc_assets.flow.turn import Turn
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.span import LogSpan
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

    def count(self, log: LogSpan, turn: Turn) -> None:
        """Count a turn of all tables, with its batches."""
        batches = log.ending_within(self._counted, turn.upto)
        if batches:
            self._counted = batches[-1].end
            self._open.add(batches, turn.tables, turn.seconds)
            self.transactions += sum(batch.transactions for batch in batches)
            self.rows += sum(sum(kinds.values()) for batch in batches for kinds in batch.counts.values())
            self._tell_untaken(log.part(LsnRange(batches[0].start, batches[-1].end)))
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

    def _tell_untaken(self, span: LogSpan) -> None:
        """Report once for each relation why no mirror takes its rows."""
        for rows in untaken(self._work, span):
            if (rows.relation_id, rows.why) not in self._told:
                self._told.add((rows.relation_id, rows.why))
                what = f"rows of {rows.name} go into no mirror: {rows.why}"
                self._work.observer.progress("transform", what, lsn=str(span.lsns.start))


def closed_range(work: Work, open_range: OpenRange, source_position: Lsn) -> RangeReport:
    """Close the range; returns its report. ``source_position``: the source's flush LSN now."""
    lsns, turns, seconds = open_range.close()
    span = LogSpan(work.log, lsns)
    report = range_report(work, span, turns, seconds, source_position)
    keep_untaken(work, span.batches, report.untaken)
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
    span: LogSpan,
    turns: dict[TableName, TableTurn],
    seconds: dict[str, float],
    source_position: Lsn,
) -> RangeReport:
    replay_lsn, batches = work.progress.replay_lsn, span.batches
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
        tables={**_from_log(work, span), **turns},
        seconds=seconds,
        untaken=untaken(work, span),
        messages=messages_report(work, batches),
    )


def _from_log(work: Work, span: LogSpan) -> dict[TableName, TableTurn]:
    """The changed tables, as the log counts their rows. Changes that an earlier run applied before it died are
    included."""
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
