"""Plans what a transform does for each table, from the shapes of its rows and the state of its feed. Both are read
once a turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.events import Route
from pgcdc_assets.feed.routing import Router
from pgcdc_assets.feed.table import Feeds
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import FACTS, read_rows
from pgcdc_assets.protocol.shape import RelationFacts, Shape
from pgcdc_assets.structure.rowshapes import Refusal, alignment, evolved, together


@dataclass(frozen=True)
class Followed:
    """A table whose changes are derived, as at its copy (plus columns that appeared since)."""

    table: Table
    after: Lsn
    """Its ``replay_lsn``: transactions below it are not needed."""


@dataclass(frozen=True)
class FeedPlan:
    """The changes to derive for one table, and how to read its rows."""

    table: Table
    """The table with the columns of the span's rows."""
    after: Lsn
    todo: LsnRange | None
    """None if the feed holds everything. It may reach beyond the span, because a file of the feed is replaced as a
    whole."""
    replaced: tuple[str, ...]
    """Files of the feed that the new files replace."""
    relations: frozenset[int]
    routes: dict[int, Route]
    """By schema_id."""
    refused: dict[int, str]
    """By schema_id: how such rows show that the table cannot be followed any further."""
    again: bool


Failures = dict[TableName, tuple[Table, Lsn, str]]
"""Tables whose feed cannot be read: the table with the columns of its rows, the mirror's position, and the reason."""


def planned(
    log: ChangeLog, feeds: Feeds, router: Router, span: LsnRange, tables: Sequence[Followed], *, again: bool
) -> tuple[list[FeedPlan], Failures]:
    """A plan for each table. With ``again``, the whole span is derived, even if the feeds already hold it."""
    starts = [span.start if again else min(max(entry.after, span.start), span.end) for entry in tables]
    reaches = [LsnRange(start, span.end) for start in starts]
    placed = _placed(log, router, reaches)
    plans: list[FeedPlan] = []
    failures: Failures = {}
    for entry, reach in zip(tables, reaches, strict=True):
        mine = placed.get(entry.table.name, _Placed())
        evolution = _Evolution.of(log, entry.table, mine, reach, past=again)
        with contained() as failed:
            plan = _plan(feeds, span, entry, mine, evolution, again=again)
        if failed.reason is not None:
            failures[entry.table.name] = evolution.table, entry.after, failed.reason
            continue
        if plan.todo is not None and not reach.start <= plan.todo.start <= plan.todo.end <= reach.end:
            plan = _widened(log, router, entry, plan, plan.todo)
        plans.append(plan)
    return plans, failures


def _plan(
    feeds: Feeds, span: LsnRange, entry: Followed, placed: _Placed, evolution: _Evolution, *, again: bool
) -> FeedPlan:
    # A feed that a run derived but could not apply already has the columns that appeared. If it were opened for the
    # table without these columns, it would seem to be empty, and its rows would be derived a second time.
    feed = feeds.open(evolution.table)
    after = min(max(entry.after, span.start), span.end)
    start = span.start if again else after
    if not again and feed.covered.start <= after <= feed.covered.end:
        start = feed.covered.end
    todo, replaced = feed.replaced(LsnRange(start, span.end)) if start < span.end else (None, ())
    return FeedPlan(
        evolution.table,
        after,
        todo,
        replaced,
        frozenset(placed.relations),
        evolution.routes,
        evolution.refused | placed.refused,
        again,
    )


def _widened(log: ChangeLog, router: Router, entry: Followed, plan: FeedPlan, todo: LsnRange) -> FeedPlan:
    """The plan with the shapes of rows outside the span that are also derived."""
    placed = _placed(log, router, [todo]).get(entry.table.name, _Placed())
    evolution = _Evolution.of(log, entry.table, placed, todo, past=plan.again, at_least=plan.table)
    return replace(
        plan,
        table=evolution.table,
        relations=frozenset(placed.relations),
        routes=evolution.routes,
        refused=evolution.refused | placed.refused,
    )


@dataclass
class _Placed:
    """The shapes that concern one table."""

    taken: list[Shape] = field(default_factory=list)
    leaves: dict[int, TableName | None] = field(default_factory=dict)
    """By schema_id: the leaf of the shape, by its name in the mirror."""
    refused: dict[int, str] = field(default_factory=dict)
    """See :class:`FeedPlan`."""
    relations: set[int] = field(default_factory=set)


def _placed(log: ChangeLog, router: Router, spans: Sequence[LsnRange]) -> dict[TableName, _Placed]:
    """The shapes that rows of any of the spans may have, by the tables that they concern."""
    found: dict[TableName, _Placed] = {}
    for shape in log.shapes(hull(spans)).values() if spans else ():
        place = router.place(shape)
        for name in place.concerned:
            entry = found.setdefault(name, _Placed())
            entry.relations.add(shape.relation_id)
            if name in place.refused:
                entry.refused[shape.schema_id] = place.refused[name]
            else:
                entry.taken.append(shape)
                entry.leaves[shape.schema_id] = place.leaf
    return found


def hull(spans: Sequence[LsnRange]) -> LsnRange:
    """The range from the first start to the last end."""
    return LsnRange(min(span.start for span in spans), max(span.end for span in spans))


@dataclass(frozen=True)
class _Evolution:
    """The table, and how to read its rows, according to the shapes of a span."""

    table: Table
    routes: dict[int, Route]
    refused: dict[int, str]

    @classmethod
    def of(
        cls, log: ChangeLog, table: Table, placed: _Placed, span: LsnRange, *, past: bool,
        at_least: Table | None = None,
    ) -> _Evolution:  # fmt: skip
        """``placed`` may hold shapes that no row of the span has; such shapes must not add columns."""
        shapes = placed.taken
        after = _after(log, table, shapes, span)
        read = partial(evolved, table, past=past)
        found = {s.schema_id: read(s, None, after=after[s.schema_id]) for s in shapes}
        odd = [shape for shape in shapes if isinstance(found[shape.schema_id], Refusal)]
        if odd:
            facts = _facts(log, {shape.schema_id for shape in odd})
            used = _used(log, span, {shape.schema_id for shape in odd}, {shape.relation_id for shape in odd})
            odd = [shape for shape in odd if shape.schema_id in used]
            found |= {s.schema_id: read(s, facts.get(s.schema_id), after=after[s.schema_id]) for s in odd}
        followed = [version for version in found.values() if isinstance(version, Table)]
        newest = together([table, at_least or table, *followed])
        order = {s.schema_id: alignment(newest, s, after[s.schema_id]) for s in shapes}
        routes = {
            s.schema_id: Route.of(s, newest, placed.leaves[s.schema_id], order[s.schema_id])
            for s in shapes if isinstance(found[s.schema_id], Table)
        }  # fmt: skip
        refused = {s.schema_id: reason.reason for s in odd if isinstance(reason := found[s.schema_id], Refusal)}
        return cls(newest, routes, refused)


def _after(log: ChangeLog, table: Table, shapes: Sequence[Shape], span: LsnRange) -> dict[int, Lsn]:
    """By schema_id: a position below which no row of the span has the shape. This matters for a span that begins below
    the start of the table's newest structure and ends above it."""
    found = dict.fromkeys((shape.schema_id for shape in shapes), span.start)
    since = table.columns_since
    if not shapes or since is None or not span.start < since < span.end:
        return found
    before = _used(log, LsnRange(span.start, since), set(found), {shape.relation_id for shape in shapes})
    return found | dict.fromkeys(found.keys() - before, since)


def _facts(log: ChangeLog, schema_ids: set[int]) -> dict[int, RelationFacts]:
    """The catalog facts that the log carries for these shapes. Read only if a table changed its structure."""
    found: dict[int, RelationFacts] = {}
    asked = (pc.field("kind") == FACTS) & pc.field("schema_id").isin(list(schema_ids))
    for segment in filter(lambda segment: segment.notes, log.all_segments()):
        if found.keys() >= schema_ids:
            break
        for note in read_rows(segment.file, ["schema_id", "payload"], asked).to_pylist():
            found[note["schema_id"]] = RelationFacts.from_json(json.loads(note["payload"]))
    return found


def _used(log: ChangeLog, span: LsnRange, schema_ids: set[int], relations: set[int]) -> set[int]:
    """The shapes, among these, that some row of the span has."""
    found: set[int] = set()
    low, high = pc.field("commit_lsn") >= span.start, pc.field("commit_lsn") < span.end
    asked = low & high & pc.field("schema_id").isin(list(schema_ids)) & pc.field("kind").isin(["I", "U", "D", "T"])
    for segment in log.segments(span, relations):
        rows = read_rows(segment.file, ["schema_id"], asked)
        found |= set(pc.unique(rows["schema_id"]).to_pylist())
    return found
