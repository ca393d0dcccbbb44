"""The transform: rows of the log into the change feeds of their tables.

One Spark job a turn for all tables; each task reads some segments and writes one file per table. Then
one small commit per feed. What a feed holds already (its ``changes_lsn``) is not derived again unless asked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pyarrow.compute as pc
from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.layout import DELTA_LOG, Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.delta.commit import settle
from pgcdc_assets.delta.failures import of_one_table
from pgcdc_assets.feed.events import Route
from pgcdc_assets.feed.evolve import Refusal, evolved, together
from pgcdc_assets.feed.file import trimmed
from pgcdc_assets.feed.routing import Router
from pgcdc_assets.feed.schema import FeedFile, FeedPart
from pgcdc_assets.feed.table import FeedTable
from pgcdc_assets.feed.task import Derivation, Derived, FeedTarget, derive
from pgcdc_assets.log.counting import rows_by_relation
from pgcdc_assets.log.reader import ChangeLog, Segment
from pgcdc_assets.log.segment import FACTS, read_rows
from pgcdc_assets.protocol.shape import RelationFacts, Shape
from pgcdc_assets.spark.tasks import run_tasks

TASK_BYTES = 4 << 20
"""Compressed log that is worth a task of its own: some 0.3 s of decoding."""
BUCKET_ROWS = 400_000
"""Changes collapsed by one task: some 300 MB of a wide table in memory."""
MOST_BUCKETS = 256
"""Files that a task has open at once, twice as many where keys change."""


@dataclass(frozen=True)
class Followed:
    """A table to derive changes of, as at its copy (plus columns that appeared since)."""

    table: Table
    after: Lsn
    """Its ``replay_lsn``: transactions below it are not wanted."""


def transform(
    spark: SparkSession, log: ChangeLog, span: LsnRange, tables: Sequence[Followed], *, again: bool = False,
    router: Router | None = None,
) -> dict[TableName, FeedPart]:  # fmt: skip
    """Bring the feeds of ``tables`` to the end of ``span`` and tell what they hold of it.

    ``span`` ends at a transaction boundary up to which the log is complete. With ``again`` all of it is
    derived anew, and replaces what the feeds hold of it. A table that cannot be followed has
    ``set_aside`` in its part; the others are not touched by that. ``router`` knows all tables that are
    followed, where ``tables`` are some of them.
    """
    layout = Layout(log.path.parents[1])
    router = router or Router.of(entry.table for entry in tables)
    grown = _evolved_over(log, router, span, tables, again)
    asked: list[_Asked] = []
    parts: dict[TableName, FeedPart] = {}
    for entry, table in zip(tables, grown, strict=True):
        try:
            asked.append(_Asked.of(log, layout, span, entry, table, again))
        except Exception as error:
            if (failure := of_one_table(error)) is None:
                raise
            parts[table.name] = _nothing(table, entry.after, failure)
    todo = [one.todo for one in asked if one.todo is not None]
    placed = _placed(log, router, todo)
    wanted = [_Wanted.of(log, one, placed.get(one.table.name, _Placed()), past=again) for one in asked]
    done = _derived(spark, log, layout, [one for one in wanted if one.todo is not None])
    _check_taken(log, router, wanted, done)
    for one in wanted:
        try:
            parts[one.table.name] = one.committed(log, layout, done, span)
        except Exception as error:
            if (failure := of_one_table(error)) is None:
                raise
            parts[one.table.name] = _nothing(one.table, one.after, failure)
    # A mirror that took a part of a feed must not outlive it.
    derived = (layout.changes(one.table.name) for one in wanted if one.todo is not None)
    settle(folder for folder in derived if (folder / DELTA_LOG).is_dir())
    return parts


def _nothing(table: Table, after: Lsn, failure: str) -> FeedPart:
    """The part of a table whose feed cannot be read or written: it ends where the mirror stands."""
    return FeedPart(table, LsnRange(after, after), (), (after, failure))


def _evolved_over(
    log: ChangeLog, router: Router, span: LsnRange, tables: Sequence[Followed], again: bool
) -> list[Table]:
    """The tables as the rows of the span make them, before their feeds are asked.

    A feed that a run derived and could not apply has the columns that appeared already: asked for the
    table as it was, it would seem to hold nothing, and its rows would be derived beside themselves.
    """
    starts = [span.start if again else min(max(entry.after, span.start), span.end) for entry in tables]
    reaches = [LsnRange(start, span.end) for start in starts]
    placed = _placed(log, router, reaches)
    return [
        _Evolution.of(log, entry.table, placed.get(entry.table.name, _Placed()), reach, past=again).table
        for entry, reach in zip(tables, reaches, strict=True)
    ]


@dataclass
class _Placed:
    """The shapes that concern one table."""

    taken: list[Shape] = field(default_factory=list)
    leaves: dict[int, TableName | None] = field(default_factory=dict)
    """By schema_id: the leaf of each, as the mirror calls it."""
    refused: dict[int, str] = field(default_factory=dict)
    """By schema_id: rows that show the table to be changed."""
    relations: set[int] = field(default_factory=set)


def _placed(log: ChangeLog, router: Router, spans: Sequence[LsnRange]) -> dict[TableName, _Placed]:
    """The shapes that rows of any of the spans may have, by the tables that they concern."""
    found: dict[TableName, _Placed] = {}
    for shape in log.shapes(_hull(spans)).values() if spans else ():
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


def _hull(spans: Sequence[LsnRange]) -> LsnRange:
    return LsnRange(min(span.start for span in spans), max(span.end for span in spans))


@dataclass(frozen=True)
class _Asked:
    """What is to be derived for one table, and which files of its feed that replaces."""

    table: Table
    """As at its copy: what the shapes are compared with."""
    grown: Table
    """With the columns that appear within the span."""
    after: Lsn
    todo: LsnRange | None
    """None where the feed holds all."""
    replaced: tuple[str, ...] = ()

    @classmethod
    def of(cls, log: ChangeLog, layout: Layout, span: LsnRange, entry: Followed, grown: Table, again: bool) -> _Asked:
        feed = FeedTable(layout, log.identity, grown)
        after = min(max(entry.after, span.start), span.end)
        start = span.start if again else after
        if not again and feed.covered.start <= after <= feed.covered.end:
            start = feed.covered.end
        if start >= span.end:
            return cls(entry.table, grown, after, None)
        # A file is replaced whole, so what it holds beyond the span is derived as well.
        return cls(entry.table, grown, after, *feed.replaced(LsnRange(start, span.end)))


@dataclass(frozen=True)
class _Wanted:
    """One table's part of a transform, with the shapes that its rows have."""

    table: Table
    """Evolved to the end of the span."""
    after: Lsn
    todo: LsnRange | None
    replaced: tuple[str, ...]
    relations: frozenset[int]
    routes: dict[int, Route]
    refused: dict[int, str]
    again: bool

    @classmethod
    def of(cls, log: ChangeLog, asked: _Asked, placed: _Placed, *, past: bool) -> _Wanted:
        todo = asked.todo or LsnRange(asked.after, asked.after)
        evolution = _Evolution.of(log, asked.table, placed, todo, past=past, at_least=asked.grown)
        refused = evolution.refused | placed.refused
        return cls(
            evolution.table, asked.after, asked.todo, asked.replaced, frozenset(placed.relations), evolution.routes,
            refused, past,
        )  # fmt: skip

    def committed(self, log: ChangeLog, layout: Layout, done: dict[TableName, _Outcome], span: LsnRange) -> FeedPart:
        """Commit what was derived, and gather what the feed now holds of the span."""
        feed = FeedTable(layout, log.identity, self.table)
        set_aside = None
        if self.todo is not None:
            outcome, end = done.get(self.table.name, _Outcome()), self.todo.end
            files, set_aside = outcome.files, outcome.set_aside
            if set_aside is not None:
                end = set_aside[0]
                files = [part for file in files if (part := trimmed(feed.path / file.name, end)) is not None]
            if set_aside is not None and self.again:
                # A repair that cannot be made takes nothing from the feed.
                return FeedPart(self.table, LsnRange(self.after, self.after), (), set_aside)
            if files or self.replaced:
                feed.commit(files, LsnRange(min(self.todo.start, end), end), self.replaced)
        if set_aside is not None and set_aside[0] >= span.end:
            set_aside = None  # after the span; found again when that is asked for
        end = span.end if set_aside is None else set_aside[0]
        taken = LsnRange(min(self.after, end), end)
        return FeedPart(self.table, taken, tuple(feed.files(taken)), set_aside)


@dataclass
class _Outcome:
    """What the tasks found of one table."""

    files: Sequence[FeedFile] = ()
    set_aside: tuple[Lsn, str] | None = None
    taken: int = 0
    """Rows of the log."""


def _derived(
    spark: SparkSession, log: ChangeLog, layout: Layout, wanted: Sequence[_Wanted]
) -> dict[TableName, _Outcome]:
    relations = {relation for entry in wanted for relation in entry.relations}
    if not relations:
        return {}
    refused: dict[int, dict[TableName, str]] = {}
    for entry in wanted:
        for schema_id, reason in entry.refused.items():
            refused.setdefault(schema_id, {})[entry.table.name] = reason
    todo = {w.table.name: w.todo for w in wanted if w.todo is not None}
    segments = log.segments(_hull(list(todo.values())), relations)
    if not segments:
        return {}
    base = Derivation(
        segments=(),
        targets={
            w.table.name: FeedTarget(w.table, layout.changes(w.table.name), span, _buckets(log, w.relations, span))
            for w in wanted if (span := todo.get(w.table.name)) is not None
        },
        routes={schema_id: route for w in wanted for schema_id, route in w.routes.items()},
        refused=refused,
    )  # fmt: skip
    workers = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    tasks = [replace(base, segments=tuple(s.path for s in group)) for group in grouped(segments, 2 * workers)]
    return _together(run_tasks(spark, derive, tasks))


def grouped(segments: Sequence[Segment], most: int) -> list[list[Segment]]:
    """Segments in runs of about equal size: as many as are worth a task, ``most`` at most."""
    total = sum(segment.size for segment in segments)
    count = max(1, min(most, total // TASK_BYTES, len(segments)))
    groups: list[list[Segment]] = [[] for _ in range(count)]
    taken = 0
    for segment in sorted(segments, key=lambda s: (s.commit_min or 0, s.path.name)):
        groups[min(taken * count // max(total, 1), count - 1)].append(segment)
        taken += segment.size
    return [group for group in groups if group]


def _together(results: Iterable[Derived]) -> dict[TableName, _Outcome]:
    found: dict[TableName, _Outcome] = {}
    for result in results:
        for name, files in result.files.items():
            entry = found.setdefault(name, _Outcome())
            entry.files = [*entry.files, *files]
        for name, where in result.set_aside.items():
            entry = found.setdefault(name, _Outcome())
            if entry.set_aside is None or where[0] < entry.set_aside[0]:
                entry.set_aside = where
        for name, rows in result.taken.items():
            found.setdefault(name, _Outcome()).taken += rows
    return found


def _check_taken(log: ChangeLog, router: Router, wanted: Sequence[_Wanted], done: dict[TableName, _Outcome]) -> None:
    """Compare the rows that the tasks took of each table with those that the log counts of its relations.

    The receiver counted them as they came, whatever was to become of them. A table that lacks one is set aside:
    no rule of ours can pass over a row without a word.
    """
    counts: dict[LsnRange, dict[int, Counter[str]]] = {}
    for entry in wanted:
        if entry.todo is None:
            continue
        if entry.todo not in counts:
            counts[entry.todo] = rows_by_relation(log, entry.todo)
        name, of = entry.table.name, counts[entry.todo]
        outcome = done.setdefault(name, _Outcome())
        held = sum(of[relation].total() for relation in router.relations(name) & of.keys())
        if outcome.set_aside is None and held != outcome.taken:
            reason = f"the log holds {held} rows of it in {entry.todo}, of which {outcome.taken} were taken"
            outcome.set_aside = entry.todo.start, reason


def _buckets(log: ChangeLog, relations: frozenset[int], span: LsnRange) -> int:
    """Buckets of keys, so that no task collapses more than BUCKET_ROWS. Inserts alone are not collapsed."""
    kinds: Counter[str] = Counter()
    for batch in log.batches(span.start):
        if batch.start < span.end:
            for relation in relations & batch.counts.keys():
                kinds.update(batch.counts[relation])
    rows = sum(kinds[kind] for kind in "IUD")
    if rows == kinds["I"] and not kinds["T"]:
        return 1
    return min(-(-rows // BUCKET_ROWS), MOST_BUCKETS) if rows else 1


@dataclass(frozen=True)
class _Evolution:
    """What the shapes of a span make of a table."""

    table: Table
    routes: dict[int, Route]
    refused: dict[int, str]

    @classmethod
    def of(
        cls, log: ChangeLog, table: Table, placed: _Placed, span: LsnRange, *, past: bool,
        at_least: Table | None = None,
    ) -> _Evolution:  # fmt: skip
        """``placed`` may hold shapes that no row of the span has; those must not add columns."""
        shapes = placed.taken
        found = {shape.schema_id: evolved(table, shape, None, past=past) for shape in shapes}
        odd = [shape for shape in shapes if isinstance(found[shape.schema_id], Refusal)]
        if odd:
            facts = _facts(log, {shape.schema_id for shape in odd})
            used = _used(log, span, {shape.schema_id for shape in odd}, {shape.relation_id for shape in odd})
            odd = [shape for shape in odd if shape.schema_id in used]
            found |= {s.schema_id: evolved(table, s, facts.get(s.schema_id), past=past) for s in odd}
        followed = [version for version in found.values() if isinstance(version, Table)]
        after = together([table, at_least or table, *followed])
        routes = {
            s.schema_id: Route.of(s, after, placed.leaves[s.schema_id])
            for s in shapes if isinstance(found[s.schema_id], Table)
        }  # fmt: skip
        refused = {s.schema_id: reason.reason for s in odd if isinstance(reason := found[s.schema_id], Refusal)}
        return cls(after, routes, refused)


def _facts(log: ChangeLog, schema_ids: set[int]) -> dict[int, RelationFacts]:
    """The catalog facts that the log carries beside these shapes. Read only where a table changed its form."""
    found: dict[int, RelationFacts] = {}
    asked = (pc.field("kind") == FACTS) & pc.field("schema_id").isin(list(schema_ids))
    for segment in filter(lambda segment: segment.notes, log.all_segments()):
        if found.keys() >= schema_ids:
            break
        for note in read_rows(segment.path, ["schema_id", "payload"], asked).to_pylist():
            found[note["schema_id"]] = RelationFacts.from_json(json.loads(note["payload"]))
    return found


def _used(log: ChangeLog, span: LsnRange, schema_ids: set[int], relations: set[int]) -> set[int]:
    """Which of the shapes some row of the span has."""
    found: set[int] = set()
    low, high = pc.field("commit_lsn") >= span.start, pc.field("commit_lsn") < span.end
    asked = low & high & pc.field("schema_id").isin(list(schema_ids)) & pc.field("kind").isin(["I", "U", "D", "T"])
    for segment in log.segments(span, relations):
        rows = read_rows(segment.path, ["schema_id"], asked)
        found |= set(pc.unique(rows["schema_id"]).to_pylist())
    return found
