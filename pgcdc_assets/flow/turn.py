"""Carries out a turn: applies the log, up to a boundary, to mirrors. The run then publishes a consistent point."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.feed.plan import Followed, Router, known_leaves
from pgcdc_assets.feed.transform import transform
from pgcdc_assets.flow.reports import TableTurn, Turn
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.mirror.target import Applied
from pgcdc_assets.structure.record import Strange, TableRecord, UnreadRows


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
    work.progress.moved(result.table.name, result.replay_lsn, version, result.table)
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
