"""A table's copy in pieces: ranges of its pages, each one COPY statement that any process can run."""

from __future__ import annotations

import math
import select
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import OperationalError, pq, sql

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyOutdated, SourceUnavailable
from pgcdc_assets.source.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.failures import first_line, of_exception, result_error

# Only the heap can be read by ctid ranges. TOAST counts: a page of pointers may stand for megabytes.
_STORAGE = """
SELECT c.oid, n.nspname::text, c.relname::text, coalesce(m.amname = 'heap', false),
       ceil(pg_catalog.pg_relation_size(c.oid) / current_setting('block_size')::float8)::int8,
       pg_catalog.pg_table_size(c.oid), greatest(c.reltuples, 0)::float8
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_am m ON m.oid = c.relam
WHERE c.oid = ANY(%s)
"""
# Left: as the snapshot has it. Right: as it is.
_UNCHANGED = """
SELECT c.relfilenode = pg_catalog.pg_relation_filenode(c.oid)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s
"""


@dataclass(frozen=True)
class Piece:
    """One COPY of CSV: NULL is empty and unquoted, every value quoted, one column per published column.

    ``leaf``: the partition that it reads, None for a plain table. Estimates are 0 where unknown.
    """

    table: Table
    leaf: TableName | None
    sql: str = field(repr=False)
    rows_estimate: int
    bytes_estimate: int = 0

    @property
    def relation(self) -> TableName:
        return self.leaf or self.table.name


@dataclass(frozen=True)
class _Storage:
    oid: int
    name: TableName
    heap: bool
    pages: int
    size: int
    rows: float


def pieces(conn: psycopg.Connection[Any], table: Table, target_bytes: int) -> list[Piece]:
    """Cut a table into pieces of about ``target_bytes`` on the source's disk; at least one per leaf.

    ``conn`` stands in the snapshot's transaction. The last piece of each leaf is open-ended: pages
    that came since hold nothing that the snapshot shows, but the relation's size is no part of it.
    """
    oids = [leaf.oid for leaf in table.leaves] if table.partitioned else [table.oid]
    rows = conn.execute(_STORAGE, [oids])
    storages = [_Storage(row[0], TableName(row[1], row[2]), *row[3:]) for row in rows]
    if missing := set(oids) - {storage.oid for storage in storages}:
        raise CopyOutdated(f"{len(missing)} of its relations are gone", thing=f"table {table.name}", do="run again")
    return [piece for storage in sorted(storages, key=lambda s: s.name) for piece in _cut(table, storage, target_bytes)]


def _cut(table: Table, storage: _Storage, target_bytes: int) -> list[Piece]:
    count = max(1, math.ceil(storage.size / target_bytes)) if storage.heap else 1
    step = max(1, math.ceil(storage.pages / count))
    starts = list(range(0, max(storage.pages, 1), step))
    share = 1 / len(starts)
    ends: list[int | None] = [*starts[1:], None]
    return [
        Piece(
            table, storage.name if table.partitioned else None, _copy_sql(table, storage.name, start, end),
            int(storage.rows * share), int(storage.size * share),
        )
        for start, end in zip(starts, ends, strict=True)
    ]  # fmt: skip


def _copy_sql(table: Table, relation: TableName, start: int, end: int | None) -> str:
    """The published columns by name, of ONLY this relation (an inheritance parent has children)."""
    conditions: list[sql.Composable] = []
    if start:
        conditions.append(sql.SQL("ctid >= {}").format(f"({start},0)"))
    if end is not None:
        conditions.append(sql.SQL("ctid < {}").format(f"({end},0)"))
    if table.row_filter:
        # The server's own rendering of the publication's filter, fit to be parsed again.
        conditions.append(sql.SQL("({})").format(_verbatim(table.row_filter)))
    query = sql.SQL("COPY (SELECT {} FROM ONLY {}{}) TO STDOUT (FORMAT csv, FORCE_QUOTE *)").format(
        sql.SQL(", ").join(sql.Identifier(column.name) for column in table.columns),
        sql.Identifier(relation.schema, relation.name),
        _where(conditions),
    )
    return query.as_string(None)


def _where(conditions: Sequence[sql.Composable]) -> sql.Composable:
    return sql.SQL(" WHERE {}").format(sql.SQL(" AND ").join(conditions)) if conditions else sql.SQL("")


def _verbatim(text: str) -> sql.Composable:
    return sql.Composed([_Raw(text)])


class _Raw(sql.Composable):
    """SQL that the server wrote. sql.SQL would take its braces for placeholders, and wants a literal."""

    def as_bytes(self, context: Any = None) -> bytes:
        return str(self._obj).encode()


def copy_blocks(conninfo: str, snapshot_name: str, piece: Piece, block_bytes: int) -> Iterator[bytes]:
    """The piece's CSV under the snapshot, in blocks of whole rows of at least ``block_bytes`` (the last less).

    Runs anywhere with a way to the source. CopyOutdated if the table was truncated or rewritten since
    the snapshot: its rows are then empty without an error. SourceFailed where row-level security
    would have hidden some.
    """
    conn = connect(conninfo, application_name=f"{APPLICATION}/copy", row_security=False)
    try:
        try:
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(snapshot_name))
            yield from _blocks(conn, piece.sql, block_bytes)
            unchanged = conn.execute(_UNCHANGED, [piece.relation.schema, piece.relation.name]).fetchone()
        except psycopg.Error as error:
            raise of_exception(error).typed(f"copy of {piece.relation}") from None
        if unchanged != (True,):
            raise CopyOutdated("was truncated, rewritten or dropped since the snapshot",
                               thing=f"table {piece.relation}", do="run again: it takes a new snapshot")  # fmt: skip
    finally:
        conn.close()


def _blocks(conn: SourceConnection, statement: str, block_bytes: int) -> Iterator[bytes]:
    """Each CopyData message is one row. At libpq's level: psycopg's own loop costs two thirds more CPU."""
    pgconn = conn.pgconn
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN)
    try:
        pgconn.send_query(statement.encode())
        while pgconn.is_busy():
            poll.poll()
            pgconn.consume_input()
        _expect(pgconn, pq.ExecStatus.COPY_OUT)
        # Joining the rows' memoryviews in the end would take three times the CPU.
        block = bytearray()
        while (got := pgconn.get_copy_data(1))[0] >= 0:
            if got[0] == 0:
                poll.poll()
                pgconn.consume_input()
                continue
            block += got[1]
            if len(block) >= block_bytes:
                yield bytes(block)
                block.clear()
        if block:
            yield bytes(block)
        _expect(pgconn, pq.ExecStatus.COMMAND_OK)
        while pgconn.get_result() is not None:
            pass
    except OperationalError as error:
        raise SourceUnavailable(first_line(str(error)), thing=conn.endpoint) from None


def _expect(pgconn: pq.abc.PGconn, status: pq.ExecStatus) -> None:
    result = pgconn.get_result()
    if result is None:
        raise SourceUnavailable("the server gave no answer", thing="copy")
    if result.status != status:
        raise result_error(result, pgconn).typed("copy")
