"""Cuts a table's copy into pieces. A piece is a range of pages, read by one COPY statement that any process can run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import sql
from psycopg.errors import LockNotAvailable

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.encoding import UTF8
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyOutdated
from pgcdc_assets.source.connect.connection import encoding_of

# Only heap tables can be read by ranges of ctid.
_STORAGE = """
SELECT c.oid, coalesce(m.amname = 'heap', false), current_setting('block_size')::int8,
       greatest(c.relpages, 0)::int8
FROM pg_catalog.pg_class c LEFT JOIN pg_catalog.pg_am m ON m.oid = c.relam
WHERE c.oid = ANY(%s)
"""
# Both functions lock the relation (ACCESS SHARE). TOAST data is counted: one page may point to megabytes of TOAST data.
_SIZES = """
SELECT r.oid, coalesce(pg_catalog.pg_relation_size(r.oid), 0), coalesce(pg_catalog.pg_table_size(r.oid), 0)
FROM unnest(%s::oid[]) AS r (oid)
"""
_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '100ms'"


@dataclass(frozen=True)
class Piece:
    """A part of a table's copy, as one COPY statement. The statement returns CSV with the published columns: values are
    quoted, and NULL is empty and unquoted. ``leaf``: the leaf to read; None for a plain table. ``oid``: the OID of the
    relation to read, because its name may change before it is read. ``bytes_estimate`` is 0 if unknown."""

    table: Table
    leaf: TableName | None
    oid: int
    columns: str = field(repr=False)
    """The select list, as SQL."""
    condition: str = field(repr=False)
    """The range of pages and the row filter, as SQL. Empty for all rows."""
    bytes_estimate: int = 0
    encoding: str = UTF8.name
    """The encoding of the CSV and of the COPY statement: the server's encoding."""

    @property
    def relation(self) -> TableName:
        return self.leaf or self.table.name

    def statement(self, relation: str) -> str:
        """Returns the COPY statement. ``relation``: the relation's current name, quoted for SQL. The statement uses
        ONLY, because children of an inheritance parent have their own mirrors."""
        where = f" WHERE {self.condition}" if self.condition else ""
        query = f"SELECT {self.columns} FROM ONLY {relation}{where}"  # noqa: S608  (identifiers are quoted)
        return f"COPY ({query}) TO STDOUT (FORMAT csv, FORCE_QUOTE *, ENCODING '{self.encoding}')"


@dataclass(frozen=True)
class _Storage:
    heap: bool
    pages: int
    size: int


def pieces(conn: psycopg.Connection[Any], table: Table, target_bytes: int) -> list[Piece]:
    """Cuts a table into pieces of about ``target_bytes`` on the source's disk, with at least one piece per leaf.
    ``conn`` may see newer sizes than the snapshot. This does no harm, because the last piece of each leaf has no upper
    bound, and the snapshot shows no rows in pages that were added later. Raises CopyOutdated if a leaf was dropped."""
    relations: dict[int, TableName | None] = {table.oid: None}
    if table.partitioned:
        relations = {leaf.oid: leaf.name for leaf in sorted(table.leaves, key=lambda leaf: leaf.name)}
    storages = _storages(conn, list(relations))
    if missing := relations.keys() - storages.keys():
        raise CopyOutdated(f"was dropped, or {len(missing)} of its partitions were", thing=f"table {table.name}",
                           do="run the command again, which reads the catalog again")  # fmt: skip
    encoding = encoding_of(conn).name
    cut = (_cut(table, leaf, oid, storages[oid], target_bytes) for oid, leaf in relations.items())
    return [replace(piece, encoding=encoding) for found in cut for piece in found]


def bytes_on_disk(conn: psycopg.Connection[Any], relations: Iterable[int]) -> int:
    """Returns the size of relations on disk, with TOAST data and without indexes. A copy reads about as much."""
    return sum(storage.size for storage in _storages(conn, list(relations)).values())


def _storages(conn: psycopg.Connection[Any], oids: list[int]) -> dict[int, _Storage]:
    """Returns each relation's storage by OID. If a relation stays locked for 100 ms, estimates the sizes from
    pg_class.relpages."""
    sizes: dict[int, tuple[int, int]] = {}
    with suppress(LockNotAvailable), conn.transaction():
        conn.execute(_LOCK_TIMEOUT)
        sizes = {oid: (own, whole) for oid, own, whole in conn.execute(_SIZES, [oids])}
    found: dict[int, _Storage] = {}
    for oid, heap, block, pages in conn.execute(_STORAGE, [oids]):
        own, whole = sizes.get(oid, (pages * block, pages * block))
        found[oid] = _Storage(heap, math.ceil(own / block), whole)
    return found


def _cut(table: Table, leaf: TableName | None, oid: int, storage: _Storage, target_bytes: int) -> list[Piece]:
    count = max(1, math.ceil(storage.size / target_bytes)) if storage.heap else 1
    step = max(1, math.ceil(storage.pages / count))
    starts = list(range(0, max(storage.pages, 1), step))
    ends: list[int | None] = [*starts[1:], None]
    names = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.columns).as_string(None)
    return [
        Piece(table, leaf, oid, names, _condition(table, start, end), int(storage.size / len(starts)))
        for start, end in zip(starts, ends, strict=True)
    ]


def _condition(table: Table, start: int, end: int | None) -> str:
    conditions: list[str] = []
    if start:
        conditions.append(f"ctid >= '({start:d},0)'")
    if end is not None:
        conditions.append(f"ctid < '({end:d},0)'")
    if table.row_filter:
        # The publication's row filter as the server prints it. The server can parse it again.
        conditions.append(f"({table.row_filter})")
    return " AND ".join(conditions)
