"""Table ``t`` in publication ``p``, and functions that read a snapshot piece by piece."""

from __future__ import annotations

import psycopg

from pgcdc_assets.core.names import TableName
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.snapshot.export import Snapshot
from pgcdc_assets.source.snapshot.pieces import Piece, pieces
from pgcdc_assets.source.snapshot.reading import copy_blocks, read_whole
from tests.fix_postgres import Database

T = TableName("public", "t")


def scalar(conn: psycopg.Connection, query: str) -> object:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def copied(database: Database, snapshot: Snapshot, name: TableName, target: int = 1 << 30) -> list[bytes]:
    """All rows of a published table, as CSV lines."""
    return [line for piece in cut(snapshot, name, target) for block in read(database, snapshot, piece)
            for line in block.splitlines()]  # fmt: skip


def cut(snapshot: Snapshot, name: TableName = T, target: int = 1 << 30) -> list[Piece]:
    with snapshot.reading() as conn:
        (table,) = [t for t in read_tables(conn, ["p"]) if t.name == name]
        return pieces(conn, table, target)


def read(database: Database, snapshot: Snapshot, piece: Piece) -> list[bytes]:
    return read_whole(lambda: list(copy_blocks(database.conninfo, snapshot.name, piece, 1 << 16)))


def publish(conn: psycopg.Connection, columns: str = "i int PRIMARY KEY, x text") -> None:
    conn.execute(f"CREATE TABLE t ({columns}); CREATE PUBLICATION p FOR TABLE t".encode())
