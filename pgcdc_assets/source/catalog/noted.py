"""What our event triggers said of a table, and how its structures follow on each other by that. Pure.

The message of a change is trusted as far as it fits: each row of pg_attribute that is another one than before was
written by the transaction of the message itself, and what the last message says is what the catalog shows. So a change
that no message tells of is never passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pgcdc_assets.core.catalog import Column, ReplicaIdentity, Table
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.source.catalog.drift import table_changes
from pgcdc_assets.source.catalog.mirrorkey import Index, RowIdentity, followable, mirror_key
from pgcdc_assets.source.catalog.pgtypes import PgTypes
from pgcdc_assets.source.catalog.successor import alike

_TABLES = ("ALTER TABLE",)
"""Statements that name no table where they touch partitions: a table may have been one for a while."""


@dataclass(frozen=True)
class NotedTable:
    """A table right after a statement."""

    oid: int
    name: TableName
    columns: tuple[Column, ...]
    rows: Mapping[int, str]
    """By attnum: the mark of its row in pg_attribute (:attr:`Table.column_rows`)."""
    own: frozenset[int]
    """attnums whose rows the statement's transaction has written."""
    replica_identity: ReplicaIdentity
    identity: RowIdentity
    relfilenode: int
    toast: int
    listed: bool
    """A publication lists columns: which ones the stream carries is not told."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """KeyError, TypeError or ValueError where it is not what our functions say."""
        types = PgTypes.of(told["types"])
        columns = [
            Column(attnum, name, types.get(oid, typmod), not_null, generated, missing)
            for attnum, name, oid, typmod, not_null, generated, missing, _, _ in told["columns"] or ()
        ]
        indexes = [Index(tuple(names), primary, identity, usable)
                   for primary, identity, usable, names in told["indexes"]]  # fmt: skip
        return cls(
            int(told["oid"]),
            TableName(told["schema"], told["name"]),
            tuple(columns),
            {row[0]: str(row[7]) for row in told["columns"] or ()},
            frozenset(row[0] for row in told["columns"] or () if row[8]),
            told["identity"],
            RowIdentity.of(told["identity"], indexes),
            int(told["relfilenode"]),
            int(told["toast"]),
            bool(told["listed"]),
        )

    @property
    def generated(self) -> bool:
        """Whether it has generated columns: which of them the stream carries is not told."""
        return any(column.generated for column in self.columns)

    def table_in(self, files: Table, now: Table) -> Table:
        """The same where no row was written anew: whatever files it has got, they count as those of before."""
        return replace(self.table(now), relfilenode=files.relfilenode, toast=files.toast)

    def table(self, now: Table) -> Table:
        """The table as it was then, with all that is not told as it is ``now``."""
        names = [column.name for column in self.columns]
        attnums = {column.name: column.attnum for column in self.columns}
        seen = now.updates_seen and followable(self.identity, [self.identity], names)
        key = mirror_key(self.identity, [self.identity], names) if seen else ()
        return replace(
            now, columns=self.columns, key=tuple(attnums[name] for name in key), updates_seen=seen,
            replica_identity=self.replica_identity,
            identity_key=tuple(attnums[name] for name in self.identity.carried if name in attnums),
            relfilenode=self.relfilenode, toast=self.toast,
            column_rows=" ".join(self.rows[attnum] for attnum in sorted(self.rows)), attnums_given=0, lineage=None,
        )  # fmt: skip


@dataclass(frozen=True)
class StructureNote:
    """A message: where its transaction committed, and what it says. No table: the catalog is to be looked at."""

    commit_lsn: Lsn
    end_lsn: Lsn
    tag: str
    tables: tuple[NotedTable, ...]
    rewritten: int | None = None
    """OID of a table whose rows the statement writes anew."""
    cast: bool = False
    """It does so by PostgreSQL's own casts to other types alone."""

    @classmethod
    def of(cls, commit_lsn: Lsn, end_lsn: Lsn, content: bytes) -> Self:
        """A message that is not of our functions says that the catalog is to be looked at: anybody may emit one."""
        try:
            told = json.loads(content)
            tables = tuple(NotedTable.of(table) for table in told["tables"])
            return cls(commit_lsn, end_lsn, str(told["tag"]), tables, told["rewritten"], told.get("cast") is True)
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls(commit_lsn, end_lsn, "", ())

    @property
    def parted(self) -> bool:
        """Whether a partition may have come or gone by it."""
        return not self.tables and self.rewritten is None and self.tag in _TABLES


@dataclass(frozen=True)
class StructureChange:
    """A table has this structure from ``end_lsn`` on, and had the one before up to ``commit_lsn``, a boundary."""

    commit_lsn: Lsn
    end_lsn: Lsn
    table: Table
    cast: bool = False
    """Its rows were written anew by PostgreSQL's own casts to other types alone."""


def structure_changes(
    before: Table, now: Table, notes: Sequence[StructureNote]
) -> list[StructureChange] | None:  # fmt: skip
    """The structures that led from ``before`` to ``now``, in order; None if the notes do not tell all of it.

    ``notes``: all that came since the table had the structure of ``before``, in order.
    """
    if before.partitioned or now.partitioned or before.root or any(note.parted for note in notes):
        return None
    rows = dict(mark.split(":") for mark in before.column_rows.split())
    rewriting = {note.commit_lsn for note in notes if note.rewritten == before.oid}
    otherwise = {note.commit_lsn for note in notes if note.rewritten == before.oid and not note.cast}
    last, found = before, dict[Lsn, StructureChange]()
    for note in notes:
        for told in note.tables:
            if told.oid != before.oid:
                continue
            if told.name != now.name or told.listed or told.generated or _unnoted(told, rows):
                return None
            rows = dict(mark.split(":") for mark in told.rows.values())
            last = told.table(now) if note.commit_lsn in rewriting else told.table_in(last, now)
            if last.key != before.key:
                # It is followed from the first row on that comes under it.
                return None
            # Of several statements of one transaction the last one counts.
            cast = note.commit_lsn in rewriting - otherwise
            found[note.commit_lsn] = StructureChange(note.commit_lsn, note.end_lsn, last, cast)
    if last.column_rows != now.column_rows or not alike(last, now):
        return None
    return _different(before, list(found.values()))


def _unnoted(told: NotedTable, rows: Mapping[str, str]) -> bool:
    """Whether the catalog's row of a column was written by another transaction than the message's."""
    marks = (mark.split(":") for mark in told.rows.values())
    return any(rows.get(attnum) != xmin and int(attnum) not in told.own for attnum, xmin in marks)


def names_suffice(table: Table, after: Lsn, notes: Sequence[StructureNote]) -> bool:
    """Whether a row of a transaction from ``after`` on has the table's columns if its message names them.

    Messages of rows name no attnums. Below the table's structure that holds only in the transaction that changed it,
    and if no other structure within it, and none that the table had before, has another column of the same name and
    type.
    """
    since = Lsn(table.lineage.since) if table.lineage is not None else ZERO
    if after >= since:
        return True
    within = [note for note in notes if note.commit_lsn <= after < note.end_lsn == since]
    of = {(column.name, column.type.oid, column.type.typmod): column.attnum for column in table.columns}
    former = table.lineage.former if table.lineage is not None else ()
    others = [*former, *(column for note in within for told in note.tables if told.oid == table.oid
                         for column in told.columns)]  # fmt: skip
    return bool(within) and all(
        of.get((column.name, column.type.oid, column.type.typmod), column.attnum) == column.attnum for column in others
    )


def _different(before: Table, changes: Sequence[StructureChange]) -> list[StructureChange]:
    """Those that a mirror has to follow."""
    found, last = list[StructureChange](), before
    for change in changes:
        if table_changes(as_published(last, change.table), change.table):
            found.append(change)
        last = change.table
    return found


def as_published(table: Table, like: Table) -> Table:
    """The table with what publications say of another version of it."""
    return replace(table, publication_rows=like.publication_rows, row_filter=like.row_filter,
                   schema_rows=like.schema_rows, enum_labels=like.enum_labels, enum_rows=like.enum_rows,
                   composites=like.composites)  # fmt: skip
