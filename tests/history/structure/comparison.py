"""Compares every published point with the chronicle, which has the rows of every table after each commit.

Also checks that ``status`` reports every table that the newest point does not list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import LiteralString

from pgcdc_assets.checks.status import Status, status
from pgcdc_assets.core.names import TableName
from pgcdc_assets.lake.lake import Lake
from pgcdc_assets.lake.point import LakeAt
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from pgcdc_assets.structure.record import TableState
from tests.deltatables import by_delta_rs
from tests.history.structure.chronicle import Chronicle, Contents, Tables
from tests.oracle import RAW, written

_OURS = "_pgcdc_"
_UNPUBLISHED_ROOTS: LiteralString = """
SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'p' AND (
  SELECT coalesce(bool_and(l.relpersistence = 'u'), true)
  FROM pg_partition_tree(c.oid) t JOIN pg_class l ON l.oid = t.relid WHERE t.isleaf
)
"""
_SCHEMAS: LiteralString = """
SELECT n.nspname FROM pg_publication_namespace p JOIN pg_namespace n ON n.oid = p.pnnspid
JOIN pg_publication b ON b.oid = p.pnpubid WHERE b.pubname = %s
"""


@dataclass(frozen=True)
class Failure:
    """A failure: a table that differs from the source or is missing, although nothing reports this. ``schema`` is the
    schema of the table, which identifies the failed history."""

    schema: str
    what: str
    title: str = ""
    """schema.table, unquoted, of a table whose rows differ."""
    oids: frozenset[int] = frozenset()
    """OIDs of the source's tables that had this name at the LSN of the point."""


@dataclass
class Comparison:
    settings: Settings
    chronicle: Chronicle
    everything: bool
    """Whether the publication contains all tables. If not, a table that never had a mirror may be missing without a
    report."""
    seen: int = 0
    """Number of points that were compared."""
    listed: int = 0
    """How many tables were compared with the source, over all points."""
    reported: Counter[str] = field(default_factory=Counter)
    """Counts, by reason, what does not count as a failure: tables that the newest point lacks and ``status`` reports,
    and tables that differ from the source for a known reason."""
    _inserts_only: set[int] = field(default_factory=set)
    """OIDs of tables of which ``status`` said, at the last comparison, that their updates and deletes are not seen."""
    _known: set[TableName] = field(default_factory=set)
    """Tables that at least one point listed."""
    _read: dict[tuple[str, int], tuple[tuple[str, ...], Counter[tuple[str | None, ...]]]] = field(default_factory=dict)

    def forget(self) -> None:
        """Makes the next call of :meth:`compare` compare all points again. This is needed after a power cut, which
        replaces the lake by the files that are left of it."""
        self.seen = 0
        self._read.clear()

    def compare(self) -> list[Failure]:
        """Checks all new points and the current status. During the call, nothing may write to the source or to the
        lake."""
        found = status(self.settings)
        names = {f"{name.schema}.{name.name}" for name in _inserts_only(found)}
        now = {source.oid for title, source in self.chronicle.now.items() if title in names}
        failures = [*self._points(self._inserts_only | now), *self._now(found)]
        self._inserts_only = now
        return failures

    def _points(self, inserts_only: set[int]) -> Iterator[Failure]:
        points = ConsistentPoints(self.settings.layout).all()
        commits, exist = self.chronicle.commits(), self.chronicle.oids
        for point in points[self.seen :]:
            at = int(point.replay_lsn)
            for failure in self._point(point, self.chronicle.at(at, commits)):
                if failure.oids & inserts_only:
                    self.reported["inserts only"] += 1
                elif self.chronicle.renamed_back(failure.title, at, commits):
                    # A known limit (docs/explanation/limits.md): the point may list the table under the wrong name.
                    self.reported["renamed back"] += 1
                elif self.chronicle.partial_at(at, commits) and not (self.chronicle.partial and failure.oids & exist):
                    # `status` can no longer report this difference: the publication has all kinds of changes again, or
                    # the table was dropped.
                    self.reported["changes left out"] += 1
                else:
                    yield failure
        self.seen = len(points)

    def _point(self, point: Point, known: Sequence[Tables]) -> Iterator[Failure]:
        at = LakeAt(self.settings.layout, point)
        for name in at.tables:
            title = f"{name.schema}.{name.name}"
            wrong = [self._difference(at, name, tables.get(title)) for tables in known]
            self.listed += 1
            self._known.add(name)
            if all(wrong):
                where = f"{title} at {point.replay_lsn}, version {point.tables[name]}"
                oids = frozenset(tables[title].oid for tables in known if title in tables)
                yield Failure(name.schema, f"{where}: {wrong[0]}", title, oids)

    def _difference(self, at: LakeAt, name: TableName, source: Contents | None) -> str | None:
        if source is None:
            return "is listed, and no table of the source has this name"
        columns, rows = self._mirrored(at, name)
        if extra := set(columns) - set(source.columns):
            return f"columns {sorted(extra)} are not the source's"
        if (lacking := set(source.columns) - source.generated - set(columns)) and not self._may_lack(name):
            return f"columns {sorted(lacking)} of the source are lacking"
        places = {column: place for place, column in enumerate(columns)}
        mine = [column for column in source.columns if column in places or column not in source.generated]
        wanted = [source.columns.index(column) for column in mine]
        expected = Counter[tuple[str | None, ...]]()
        for row, copies in source.rows.items():
            expected[tuple(row[place] for place in wanted)] += copies
        # A column that the mirror is allowed to lack counts as NULL in all rows.
        taken = [places.get(column) for column in mine]
        found = Counter[tuple[str | None, ...]]()
        for row, copies in rows.items():
            found[tuple(None if place is None else row[place] for place in taken)] += copies
        if missing := expected - found:
            return f"{missing.total()} rows missing, like {next(iter(missing))} of {mine}; too many: {found - expected}"
        if more := found - expected:
            return f"{more.total()} rows too many, like {next(iter(more))} of {mine}"
        return None

    def _may_lack(self, name: TableName) -> bool:
        """Whether the mirror may lack a new column of the table until the first row message with this column arrives.
        Until then, the column must be NULL in all rows of the source."""
        row = TableStates(self.settings.layout).get(name)
        table = None if row is None else row.table
        return table is None or table.multiset or any(leaf.numbering is None for leaf in table.leaves)

    def _mirrored(self, at: LakeAt, name: TableName) -> tuple[tuple[str, ...], Counter[tuple[str | None, ...]]]:
        key = (str(name), at.versions[name])
        if key not in self._read:
            table = by_delta_rs(Lake(self.settings.layout.root).at(at.lsn) if self._current(at) else at, name)
            columns = tuple(column for column in table.column_names if not column.startswith(_OURS))
            misfits = [dict(entry or ()) for entry in table[RAW].to_pylist()]
            data = [written(column, table[column], misfits) for column in columns]
            self._read[key] = (columns, Counter(zip(*data, strict=True)))
        return self._read[key]

    def _current(self, at: LakeAt) -> bool:
        """Whether a reader at this LSN gets this point, and not a later point with the same LSN."""
        return Lake(self.settings.layout.root).at(at.lsn).versions == at.versions

    def missing_tables(self) -> list[Failure]:
        """One failure for each table of the source that the newest point lacks. UNLOGGED tables do not count.

        Some other tables do not count either, because they cannot be replicated: tables of a schema that was removed
        from a publication that pgcdc has not made, and partitioned tables without partitions or with only UNLOGGED
        partitions.
        """
        names = {f"{name.schema}.{name.name}" for name in Lake(self.settings.layout.root).at().tables}
        wanted = {title for title, source in self.chronicle.now.items() if source.logged}
        wanted -= self._titles(_UNPUBLISHED_ROOTS)
        if not self.everything:
            schemas = self._titles(_SCHEMAS, self.settings.publication)
            wanted = {title for title in wanted if title.split(".")[0] in schemas}
        return [Failure(title.split(".")[0], f"{title} is not followed again after setup and a new copy")
                for title in sorted(wanted - names)]  # fmt: skip

    def _titles(self, query: LiteralString, *values: str) -> set[str]:
        return {title for (title,) in self.chronicle.conn.execute(query, values)}

    # Tables that are not listed ---------------------------------------------------------------------

    def _now(self, found: Status) -> Iterator[Failure]:
        newest = ConsistentPoints(self.settings.layout).newest()
        listed = set() if newest is None else set(newest.tables)
        for title, source in self.chronicle.now.items():
            name = TableName(*title.split(".", 1))
            if name in listed or not source.logged:
                continue
            how = _reported(found, name)
            if how is None and not self.everything and name not in self._known:
                continue
            if how is None:
                problems = [f"{problem.thing} {problem.what}" for problem in found.problems]
                yield Failure(name.schema, f"{title} is neither listed nor reported; status says {problems}")
            else:
                self.reported[how] += 1


def _reported(found: Status, name: TableName) -> str | None:
    for table in found.tables:
        if table.name == name and table.state is not TableState.STREAMING:
            return f"{table.state} for a grant" if "GRANT " in (table.reason or "") else str(table.state)
    return next(("problem" for problem in found.problems if problem.thing == f"table {name}"), None)


def _inserts_only(found: Status) -> set[TableName]:
    """Tables that ``status`` reports as tables without a replica identity, or as published without inserts, updates or
    deletes."""
    names = {problem.thing.removeprefix("table ") for problem in found.problems
             if re.search("updates and deletes are not replicated|is published without .*(insert|update|delete)",
                          problem.what)}  # fmt: skip
    return {table.name for table in found.tables if str(table.name) in names}
