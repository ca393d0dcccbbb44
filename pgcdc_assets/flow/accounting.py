"""Counts and explains the rows of the log that no mirror takes. Every other row has gone into its mirror's feed.

The rows that the receiver counted for each relation are compared with the followed tables. The transform does the other
half: it sets a table aside if its feed lacks a row of the table (:func:`pgcdc_assets.feed.transform.transform`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import ZERO
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import LogCorrupt
from pgcdc_assets.feed.routing import Router, known_leaves
from pgcdc_assets.flow.reports import Untaken
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.log.summary import BatchSummary
from pgcdc_assets.points.untaken import UntakenLedger, UntakenRows
from pgcdc_assets.protocol.shape import Shape
from pgcdc_assets.source.catalog.tables import TablePatterns


class Why(StrEnum):
    """Why rows went into no mirror."""

    LEFT_OUT = "the setting `tables` leaves it out"
    COPY = "its table waits for a copy, which will hold them"
    RENAMED = "its table was renamed, and its mirror takes them under the new name"
    SET_ASIDE = "its table is set aside"
    LEFT = "its partition went, and its rows with it"
    UNKNOWN = "it belongs to no table that is followed"


def untaken(work: Work, span: LogSpan) -> list[Untaken]:
    """The rows of ``span`` that no followed table takes, by relation."""
    counts = span.rows
    if not counts:
        return []
    router = work.progress.router
    shapes = {shape.relation_id: shape for shape in span.shapes.values()}
    if lacking := counts.keys() - shapes.keys():
        raise LogCorrupt(f"counts rows of relation {min(lacking)}, which it does not describe", lsn=span.lsns.start)
    others = [shapes[relation] for relation in sorted(counts) if router.place(shapes[relation]).table is None]
    every = Router.of(entry.table for entry in work.progress) if others else router
    return [Untaken(s.relation_id, s.table, counts[s.relation_id].total(), _why(work, every, s)) for s in others]


def keep_untaken(work: Work, batches: Sequence[BatchSummary], found: Sequence[Untaken]) -> None:
    """Store the counts of rows of relations that belong to no table, so that ``status`` reports them after the run.

    If a run died before its range was closed, the next run counts the same batches again. Batches whose rows are stored
    already are left out then.
    """
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
    """Whether a leaf whose rows the table does not take yet has its rows in the stream now. It was unlogged, or was not
    attached for a while. A catalog check then has the table copied again, with the leaf."""
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
