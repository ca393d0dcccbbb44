"""Plans what a transform does for each table, from the relation shapes of its rows and the state of its feed. A shape
(:class:`Shape`) is one version of a relation: its columns and their types. It has a number in the log, the schema_id.

The OID of the rows' relation decides to which table the rows belong: it is the OID of a table, or of a leaf partition
that a table had at its snapshot copy. Names and facts of the catalog never decide, for two reasons: a name may change
and be used again, and the catalog is read after the rows were written. Names and facts only show that a table cannot be
followed further, because a partition was detached or added, or because a different table has its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.events import Route
from pgcdc_assets.feed.table import Feeds, FeedTable
from pgcdc_assets.log.span import LogSpan, facts_of
from pgcdc_assets.protocol.shape import Shape
from pgcdc_assets.structure.rowshapes import Unreadable, alignment, table_of_rows, together


@dataclass(frozen=True)
class Place:
    """The tables that rows of one relation shape affect."""

    table: TableName | None
    """The table to which the rows belong; None if it is not a mirrored table."""
    leaf: TableName | None = None
    """The leaf partition to which the rows belong, by its name at the table's snapshot copy."""
    strange_to: Mapping[TableName, str] = field(default_factory=dict)
    """Tables that cannot be followed further because of these rows, with the reason."""

    @property
    def concerned(self) -> set[TableName]:
        """All tables that these rows affect: ``table`` and the tables of ``strange_to``."""
        return self.strange_to.keys() | ({self.table} if self.table is not None else set())


@dataclass(frozen=True)
class Router:
    """Finds mirrored tables by the OIDs of relations."""

    tables: Mapping[int, Table]
    """Tables by their own OIDs."""
    holders: Mapping[int, tuple[Table, ...]]
    """Tables by the OIDs of their leaf partitions. An OID has two tables if the leaf was moved from one to the other,
    and each had the leaf at its snapshot copy."""
    names: Mapping[TableName, Table]

    @classmethod
    def of(cls, tables: Iterable[Table]) -> Self:
        followed = list(tables)
        holders: dict[int, tuple[Table, ...]] = {}
        for table in followed:
            for leaf in table.leaves:
                holders[leaf.oid] = (*holders.get(leaf.oid, ()), table)
        return cls({table.oid: table for table in followed}, holders, {table.name: table for table in followed})

    def place(self, shape: Shape) -> Place:
        """Returns the tables that rows of this shape affect."""
        taker = self._taker(shape)
        return Place(
            taker.name if taker else None,
            _leaf(taker, shape) if taker else None,
            {table.name: reason for table, reason in self._strange(shape) if table is not taker},
        )

    def relations(self, table: TableName) -> frozenset[int]:
        """Returns the OIDs of the relations whose rows belong to a table: its own OID and those of its leaves."""
        found = self.names[table]
        return frozenset((found.oid, *(leaf.oid for leaf in found.leaves)))

    def _taker(self, shape: Shape) -> Table | None:
        root = self._root(shape)
        if root is not None and root in self.holders.get(shape.relation_id, ()):
            return root
        return self.tables.get(shape.relation_id)

    def _root(self, shape: Shape) -> Table | None:
        return None if shape.root_oid is None else self.tables.get(shape.root_oid)

    def _strange(self, shape: Shape) -> Iterator[tuple[Table, str]]:
        root, known = self._root(shape), self.tables.get(shape.relation_id)
        for holder in self.holders.get(shape.relation_id, ()):
            went = "dropped" if shape.forgotten else "detached"
            yield holder, f"its partition {_leaf(holder, shape)} was {went}, together with its rows"
        if known is not None and root is not None:
            yield known, f"the table became a partition of {root.name}"
        if root is not None and shape.relation_id not in known_leaves(root):
            yield root, f"partition {shape.table} was added, possibly with rows"
        if known is None and shape.root is None and shape.catalog_name in (None, shape.table):
            namesake = self.names.get(shape.table)
            if namesake is not None:
                yield namesake, "the table was dropped and created again, or another table has its name now"


def known_leaves(table: Table) -> set[int]:
    """Returns the OIDs of all leaf partitions that the table has had since its snapshot copy, also of partitions whose
    rows are not mirrored."""
    left = table.lineage.left if table.lineage is not None else ()
    return {*(leaf.oid for leaf in table.leaves), *(leaf.oid for leaf in table.outside), *left}


def _leaf(table: Table, shape: Shape) -> TableName | None:
    return next((leaf.name for leaf in table.leaves if leaf.oid == shape.relation_id), None)


@dataclass(frozen=True)
class Followed:
    """A table whose changes the transform writes to the table's feed."""

    table: Table
    """The table with the columns of its snapshot copy, and the columns that were added since the copy."""
    after: Lsn
    """The table's ``replay_lsn``. Transactions that commit below this LSN are not needed, unless the changes of the
    whole span are derived again."""
    unchanged_from: Lsn | None = None
    """No transaction between this LSN and ``after`` changed the table. None: no such LSN below ``after`` is known."""


@dataclass(frozen=True)
class FeedPlan:
    """The changes to derive for one table, and how to read its rows."""

    table: Table
    """The table, including all columns that rows of the span have."""
    feed: FeedTable
    after: Lsn
    """The LSN at which the table's part of the span begins."""
    unchanged_from: Lsn
    """See :attr:`Followed.unchanged_from`."""
    replay_lsn: Lsn
    """See :attr:`Followed.after`."""
    todo: LsnRange | None
    """The range to derive; None if the feed already contains everything. It may be larger than the span of the
    transform, because only whole files of the feed can be replaced (:meth:`FeedTable.replaced`)."""
    replaced: tuple[str, ...]
    """Names of the feed's files that the new files replace."""
    relations: frozenset[int]
    """The OIDs of the relations whose rows affect the table."""
    routes: dict[int, Route]
    """By schema_id: how rows with this shape become rows of the mirror."""
    unread: dict[int, str]
    """By schema_id: why the table's feed must end at rows with this shape. For example, they cannot be read, or they
    belong to a partition that is not known."""
    again: bool
    """Whether changes that the feed already contains are derived again."""


Failures = dict[TableName, tuple[Table, Lsn, str]]
"""Tables whose feed cannot be read. Each value has the table, the mirror's ``replay_lsn``, and the reason."""


def planned(
    span: LogSpan, feeds: Feeds, router: Router, tables: Sequence[Followed], *, again: bool
) -> tuple[list[FeedPlan], Failures]:
    """Returns a plan for each table, and the tables whose feeds cannot be read. With ``again``, the plans also derive
    changes that the feeds already contain."""
    placed = _placed(span, router)
    plans: list[FeedPlan] = []
    failures: Failures = {}
    for entry in tables:
        after = span.lsns.start if again else min(max(entry.after, span.lsns.start), span.lsns.end)
        reach = span.part(LsnRange(after, span.lsns.end))
        mine = placed.get(entry.table.name, _Placed())
        reading = _Reading.of(reach, entry.table, mine, past=again)
        with contained() as failed:
            plan = _plan(feeds, reach, entry, mine, reading, again=again)
            if plan.todo is not None and not reach.lsns.start <= plan.todo.start <= plan.todo.end <= reach.lsns.end:
                plan = _widened(feeds, span.part(plan.todo), router, entry, plan)
            plans.append(plan)
        if failed.reason is not None:
            failures[entry.table.name] = reading.table, entry.after, failed.reason
    return plans, failures


def _plan(
    feeds: Feeds, reach: LogSpan, entry: Followed, placed: _Placed, reading: _Reading, *, again: bool
) -> FeedPlan:
    # The feed is opened with all columns of the span's rows. An earlier transform may have derived changes with new
    # columns, and the run may have ended before they were applied. If the feed were opened without these columns,
    # these changes would not match its schema, and would be derived a second time.
    feed = feeds.open(reading.table)
    after, end = reach.lsns.start, reach.lsns.end
    start = feed.covered.end if not again and feed.covered.start <= after <= feed.covered.end else after
    todo, replaced = feed.replaced(LsnRange(start, end), reach.log.start) if start < end else (None, ())
    return FeedPlan(
        reading.table,
        feed,
        after,
        min(after, after if entry.unchanged_from is None else entry.unchanged_from),
        entry.after,
        todo,
        replaced,
        frozenset(placed.relations),
        reading.routes,
        reading.unread | placed.unread,
        again,
    )


def _widened(feeds: Feeds, todo: LogSpan, router: Router, entry: Followed, plan: FeedPlan) -> FeedPlan:
    """Returns the plan with the shapes of all rows in ``todo``, which goes beyond the part of the log for which the
    plan was made."""
    placed = _placed(todo, router).get(entry.table.name, _Placed())
    reading = _Reading.of(todo, entry.table, placed, past=plan.again, at_least=plan.table)
    return replace(
        plan,
        table=reading.table,
        feed=feeds.open(reading.table),
        relations=frozenset(placed.relations),
        routes=reading.routes,
        unread=reading.unread | placed.unread,
    )


@dataclass
class _Placed:
    """The relation shapes that affect one table."""

    taken: list[Shape] = field(default_factory=list)
    """Shapes whose rows belong to the table."""
    leaves: dict[int, TableName | None] = field(default_factory=dict)
    """By schema_id: the rows' leaf partition (its name at the snapshot copy); None if they belong to no leaf."""
    unread: dict[int, str] = field(default_factory=dict)
    """By schema_id: why rows with this shape end the table's feed."""
    relations: set[int] = field(default_factory=set)


def _placed(span: LogSpan, router: Router) -> dict[TableName, _Placed]:
    """Maps each affected table to the relation shapes that rows of the span may have."""
    found: dict[TableName, _Placed] = {}
    for shape in span.shapes.values():
        place = router.place(shape)
        for name in place.concerned:
            entry = found.setdefault(name, _Placed())
            entry.relations.add(shape.relation_id)
            if name in place.strange_to:
                entry.unread[shape.schema_id] = place.strange_to[name]
            else:
                entry.taken.append(shape)
                entry.leaves[shape.schema_id] = place.leaf
    return found


@dataclass(frozen=True)
class _Reading:
    table: Table
    routes: dict[int, Route]
    unread: dict[int, str]

    @classmethod
    def of(
        cls, span: LogSpan, table: Table, placed: _Placed, *, past: bool, at_least: Table | None = None
    ) -> _Reading:  # fmt: skip
        """Decides how the rows of the span become rows of the table. A shape of ``placed`` may add columns to the table
        only if the span has rows of this shape. ``past``: see :func:`table_of_rows`. ``at_least``: the resulting table
        also has the columns of this table."""
        shapes = placed.taken
        after = _after(span, table, shapes)
        read = partial(table_of_rows, table, past=past)
        found = {s.schema_id: read(s, None, after=after[s.schema_id]) for s in shapes}
        odd = [shape for shape in shapes if isinstance(found[shape.schema_id], Unreadable)]
        if odd:
            facts = facts_of(span.log, {shape.schema_id for shape in odd})
            used = span.used({shape.schema_id for shape in odd}, {shape.relation_id for shape in odd})
            odd = [shape for shape in odd if shape.schema_id in used]
            found |= {s.schema_id: read(s, facts.get(s.schema_id), after=after[s.schema_id]) for s in odd}
        newest = together([table, at_least or table, *(one for one in found.values() if isinstance(one, Table))])
        routes = {
            s.schema_id: Route.of(s, newest, placed.leaves[s.schema_id], alignment(newest, s, after[s.schema_id]))
            for s in shapes if isinstance(found[s.schema_id], Table)
        }  # fmt: skip
        unread = {s.schema_id: why.reason for s in odd if isinstance(why := found[s.schema_id], Unreadable)}
        return cls(newest, routes, unread)


def _after(span: LogSpan, table: Table, shapes: Sequence[Shape]) -> dict[int, Lsn]:
    """Returns, for each shape by its schema_id, the LSN at or above which all rows of this shape in the span commit
    (see :func:`table_of_rows`). This is the table's ``columns_since`` if it is inside the span and no row below it has
    the shape. Otherwise it is the span's start."""
    start, end = span.lsns.start, span.lsns.end
    found = dict.fromkeys((shape.schema_id for shape in shapes), start)
    since = table.columns_since
    if not shapes or since is None or not start < since < end:
        return found
    before = span.part(LsnRange(start, since)).used(set(found), {shape.relation_id for shape in shapes})
    return found | dict.fromkeys(found.keys() - before, since)
