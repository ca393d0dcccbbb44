"""Source and mirror compared by means that share no code with the project: psycopg, and delta-rs's QueryBuilder."""

from __future__ import annotations

import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
from deltalake import DeltaTable, QueryBuilder
from psycopg import sql

_NATIVE = {
    "bool", "int2", "int4", "int8", "float4", "float8", "date", "timestamp", "timestamptz", "bytea",
    "_int2", "_int4", "_int8", "_bool", "_text", "_varchar", "_date",
}  # fmt: skip
"""Types whose Python values from psycopg are those of the mirror; all others are compared as text."""

Rows = Counter[tuple[Any, ...]]


def source_rows(
    conn: psycopg.Connection[Any], schema: str, table: str, at: sql.Composable | None = None
) -> tuple[list[str], Rows]:
    """Column names, and the rows as a multiset of comparable values.

    ``at``: what to read in place of the table, with its columns: the table as it was at another time.
    """
    columns = conn.execute(
        """SELECT a.attname, t.typname, a.atttypmod FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
           WHERE a.attrelid = format('%%I.%%I', %s::text, %s::text)::regclass AND a.attnum > 0 AND NOT a.attisdropped
             AND (a.attgenerated = '' OR current_setting('server_version_num')::int >= 180000 AND a.attgenerated = 'S')
           ORDER BY a.attnum""",
        (schema, table),
    ).fetchall()
    chosen = []
    for name, kind, typmod in columns:
        native = kind in _NATIVE or (kind == "numeric" and typmod >= 0)
        # Python has no single precision: psycopg reads float4's short text as a double of another value.
        form = "{}::float8" if kind == "float4" else "{}" if native else "{}::text"
        chosen.append(sql.SQL(form).format(sql.Identifier(name)))
    read = at or sql.Identifier(schema, table)
    query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(chosen), read)
    with conn.transaction():
        conn.execute("SET LOCAL TimeZone = 'UTC'; SET LOCAL IntervalStyle = 'postgres'; SET LOCAL bytea_output = 'hex'")
        conn.execute("SET LOCAL DateStyle = 'ISO'; SET LOCAL extra_float_digits = 1")
        rows = conn.execute(query).fetchall()
    return [name for name, _, _ in columns], Counter(tuple(map(_plain, row)) for row in rows)


def mirror_rows(lake: Path, folder: str, columns: list[str], version: int | None = None) -> Rows:
    """The mirror's rows as a multiset, in the source's column order."""
    table = DeltaTable(str(lake / folder), version=version)
    listed = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
    batches = QueryBuilder().register("t", table).execute(f"SELECT {listed} FROM t").read_all()
    data = [batches.column(i).to_pylist() for i in range(len(columns))]
    return Counter(tuple(map(_plain, row)) for row in zip(*data, strict=True))


def assert_equal(
    conn: psycopg.Connection[Any], lake: Path, *tables: str, version: dict[str, int] | None = None
) -> None:
    """``tables`` are written schema.table, verbatim; fails with the first differing rows."""
    for name in tables:
        schema, table = name.split(".", 1)
        columns, expected = source_rows(conn, schema, table)
        found = mirror_rows(lake, f"{schema}/{table}", columns, (version or {}).get(name))
        missing, extra = expected - found, found - expected
        assert not missing, f"{name}: {missing.total()} rows missing, like {next(iter(missing))}"
        assert not extra, f"{name}: {extra.total()} rows too many, like {next(iter(extra))}"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, Decimal):
        return str(value)
    return value
