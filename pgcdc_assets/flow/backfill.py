"""Carries out Dagster's backfills of LSN ranges, and ``pgcdc repair``. Reads the change log, never the source."""

from __future__ import annotations

from collections.abc import Sequence

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import NotRepairable, PgcdcError, RangeGap, UsageError
from pgcdc_assets.failures import of_one_table
from pgcdc_assets.feed.plan import Followed
from pgcdc_assets.feed.transform import transform
from pgcdc_assets.flow.messages import derive_messages
from pgcdc_assets.flow.ranges import range_report, summed
from pgcdc_assets.flow.reports import RangeReport, TableTurn
from pgcdc_assets.flow.turns import record, take_turn
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.structure.record import TableRecord, TableState


def check(work: Work, span: LsnRange) -> RangeReport:
    """Check that the log contains the whole range and can be read. Nothing is received from the source."""
    span = widened(work, span)
    work.log.verify(span)
    return _report(work, span, {})


def derive(work: Work, tables: Sequence[TableName], span: LsnRange) -> RangeReport:
    """Write the change feeds of these tables again for a range, from the log.

    Changes below the LSN of a mirror's copy are skipped, because an earlier table of this name may have made them. If
    the range begins above a table's ``replay_lsn``, the feed is written from ``replay_lsn`` on, because the next turn
    applies the feed from there."""
    span = widened(work, span)
    entries = [_readable(work, name) for name in tables]
    asked: dict[tuple[LsnRange, bool], list[Followed]] = {}
    for entry in entries:
        held = work.target.standing(entry.table.name)
        start = span.start if held is None else max(span.start, held.snapshot_lsn)
        end = min(span.end, entry.replay_lsn)
        if start < end:
            asked.setdefault((LsnRange(start, end), True), []).append(Followed(entry.table, entry.replay_lsn))
        if entry.replay_lsn < span.end:
            asked.setdefault((LsnRange(entry.replay_lsn, span.end), False), []).append(
                Followed(entry.table, entry.replay_lsn, entry.unchanged_from)
            )
    turns: dict[TableName, TableTurn] = {}
    for (part_of, again), followed in asked.items():
        for name, part in transform(
            work.session(), LogSpan(work.log, part_of), work.feeds, followed, again=again
        ).items():
            if part.ended is not None:
                do = f"copy it again: `pgcdc snapshot {name.shell}`"
                raise NotRepairable(part.ended.reason, thing=str(name), lsn=part.ended.lsn, do=do)
            entry = work.progress[name]
            turn = TableTurn(name, entry.replay_lsn, entry.version, changes=part.counts)
            turns[name] = summed(turns[name], turn) if name in turns else turn
    return _report(work, span, turns)


def messages(work: Work, span: LsnRange) -> RangeReport:
    """Write the feed of logical messages again for a range, from the log."""
    span = widened(work, span)
    derive_messages(work, span)
    return _report(work, span, {})


def apply(work: Work, tables: Sequence[TableName], span: LsnRange) -> RangeReport:
    """Apply a range to some mirrors. For each table, the part above its ``replay_lsn`` is applied, and the part below
    is repaired (see :func:`repair`). If the range begins above ``replay_lsn``, all changes from ``replay_lsn`` on are
    applied."""
    span = widened(work, span)
    turns: dict[TableName, TableTurn] = {}
    for name in tables:
        entry = _readable(work, name)
        if span.start < entry.replay_lsn:
            turns[name] = _repaired(work, entry, LsnRange(span.start, min(span.end, entry.replay_lsn)))
    forward = [work.progress[name] for name in tables if work.progress[name].replay_lsn < span.end]
    if forward:
        log = LogSpan(work.log, LsnRange(min(entry.replay_lsn for entry in forward), work.log.position()))
        for turn in take_turn(work, log, span.end, forward).tables:
            turns[turn.table] = turn
    for name in tables:
        unread = work.progress[name].unread
        if unread is not None:
            raise NotRepairable(f"the range above this table's replay_lsn cannot be applied yet: {unread.what}",
                                thing=str(name), lsn=work.progress[name].replay_lsn,
                                do="run `pgcdc sync`, which checks the source's catalog first")  # fmt: skip
    return _report(work, span, turns)


def repair(work: Work, name: TableName, span: LsnRange) -> RangeReport:
    """Compute again, from the log up to the table's ``replay_lsn``, the rows whose keys changed in the range, and merge
    them into the mirror."""
    span = widened(work, span)
    entry = work.progress[name]
    if entry.state in (TableState.WAITING, TableState.COPYING):
        raise _unreadable(entry)
    if span.end > entry.replay_lsn:
        raise UsageError(
            f"range {span} ends above the table's replay_lsn {entry.replay_lsn}, so a part of it is not applied yet",
            thing=str(name), do="run `pgcdc sync`, which applies it",
        )  # fmt: skip
    return _report(work, span, {name: _repaired(work, entry, span)})


def _readable(work: Work, name: TableName) -> TableRecord:
    entry = work.progress[name]
    if not entry.state.readable:
        raise _unreadable(entry)
    return entry


def _unreadable(entry: TableRecord) -> UsageError:
    name = entry.table.name
    what = str(entry.state).replace("_", " ")
    return UsageError(f"has the state {what}, so no range of its changes can be applied or rebuilt", thing=str(name),
                      do=f"copy it first: `pgcdc snapshot {name.shell}`")  # fmt: skip


def _repaired(work: Work, entry: TableRecord, span: LsnRange) -> TableTurn:
    table = entry.table
    try:
        result = work.target.repair(work.log, table, span, entry.replay_lsn)
    except Exception as error:
        if isinstance(error, PgcdcError) or (failure := of_one_table(error)) is None:
            raise
        do = f"copy it again: `pgcdc snapshot {table.name.shell}`"
        raise NotRepairable(failure, thing=str(table.name), lsn=span.start, do=do) from None
    work.target.settle({entry.table.name: result.version})
    turn = record(work, result, {})
    work.progress.publish_repaired(table.name)
    return turn


def widened(work: Work, span: LsnRange) -> LsnRange:
    """Returns the smallest range of whole batches that contains ``span``. RangeGap if the log lacks a part of it."""
    start, end = work.log.start, work.log.position()
    if span.start < start:
        raise RangeGap(f"range {span} begins below the log, which starts at {start}",
                       do="choose a range above that LSN, or copy the table again: `pgcdc snapshot TABLE`")  # fmt: skip
    if span.end > end:
        raise RangeGap(f"range {span} ends above {end}, the end of the log", lsn=span.end,
                       do="run `pgcdc sync`, which receives the rest")  # fmt: skip
    ends = [batch.end for batch in work.log.batches(start, end)]
    return LsnRange(
        max((lsn for lsn in [start, *ends] if lsn <= span.start), default=start),
        min((lsn for lsn in ends if lsn >= span.end), default=Lsn(end)),
    )


def _report(work: Work, span: LsnRange, turns: dict[TableName, TableTurn]) -> RangeReport:
    return range_report(work, LogSpan(work.log, span), turns, {}, work.log.position())
