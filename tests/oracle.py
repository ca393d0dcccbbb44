"""Compares source and mirror without code of the project: reads them with psycopg and delta-rs's QueryBuilder.

Values are compared in PostgreSQL's text form. The source uses the types' output functions. For the mirror, Python
writes the value that delta-rs read, or the text in ``_pgcdc_raw`` if the value does not fit.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from psycopg import sql

RAW = "_pgcdc_raw"
"""The mirror's column that contains, by column name, the texts of values that do not fit the mirror's types."""

_CASTS = {"float4": "{}::float8", "float8": "{}", "_float4": "{}::float8[]", "_float8": "{}", "_box": "{}::text[]"}
"""Python has no single precision, so float4 is compared as float8, and Python formats the numbers of both sides. Arrays
of boxes are a special case, because PostgreSQL separates boxes by semicolons."""
_OUTPUT = "CASE WHEN num_nulls({0}) = 0 THEN format('%s', {0}) END"
"""The value's text by the type's output function. A cast to text would differ in blanks (char(n)), masks (inet) and
booleans."""

Rows = Counter[tuple[Any, ...]]


def source_rows(
    conn: psycopg.Connection[Any], schema: str, table: str, at: sql.Composable | None = None
) -> tuple[list[str], Rows]:
    """Column names, and the rows as a multiset of comparable values. ``at``: a query with the table's columns that is
    read instead of the table, such as the table's rows at an earlier LSN."""
    columns = conn.execute(
        """SELECT a.attname, coalesce(b.typname, t.typname) FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
           LEFT JOIN pg_type b ON b.oid = t.typbasetype
           WHERE a.attrelid = format('%%I.%%I', %s::text, %s::text)::regclass AND a.attnum > 0 AND NOT a.attisdropped
             AND (a.attgenerated = '' OR current_setting('server_version_num')::int >= 180000 AND a.attgenerated = 's')
           ORDER BY a.attnum""",
        (schema, table),
    ).fetchall()
    texts = [
        sql.SQL(_OUTPUT).format(sql.SQL(_CASTS.get(kind, "{}")).format(sql.Identifier(name)))
        for name, kind in columns
    ]  # fmt: skip
    query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(texts), at or sql.Identifier(schema, table))
    with conn.transaction():
        conn.execute("SET LOCAL TimeZone = 'UTC'; SET LOCAL IntervalStyle = 'postgres'; SET LOCAL bytea_output = 'hex'")
        conn.execute("SET LOCAL DateStyle = 'ISO'; SET LOCAL extra_float_digits = 1")
        rows = conn.execute(query).fetchall()
    floats = [kind.endswith(("float4", "float8")) for _, kind in columns]
    return [name for name, _ in columns], Counter(
        tuple(_numbers(text) if is_float else text for text, is_float in zip(row, floats, strict=True)) for row in rows
    )


def store_options(lake: Path | str) -> dict[str, str] | None:
    """The options that delta-rs needs, because the tests' S3 server has no TLS."""
    return {"allow_http": "true"} if "://" in str(lake) else None


def mirror_rows(lake: Path | str, folder: str, columns: list[str], version: int | None = None) -> Rows:
    """The mirror's rows as a multiset, in the source's column order. ``folder`` is schema/table, unescaped."""
    escaped = re.sub(r"[%~\\\[\]^|]", lambda found: f"~{ord(found[0]):02X}", folder)
    table = DeltaTable(f"{lake}/{escaped}", version=version, storage_options=store_options(lake))
    listed = ", ".join('"' + name.replace('"', '""') + '"' for name in [*columns, RAW])
    batches = pa.table(QueryBuilder().register("t", table).execute(f"SELECT {listed} FROM t").read_all())
    misfits = [dict(entry or ()) for entry in batches.column(len(columns)).to_pylist()]
    data = (written(name, batches.column(place), misfits) for place, name in enumerate(columns))
    return Counter(zip(*data, strict=True))


def assert_equal(
    conn: psycopg.Connection[Any], lake: Path | str, *tables: str, version: dict[str, int] | None = None
) -> None:
    """Compares tables (schema.table, unquoted). Fails with the first different rows."""
    for name in tables:
        schema, table = name.split(".", 1)
        columns, expected = source_rows(conn, schema, table)
        found = mirror_rows(lake, f"{schema}/{table}", columns, (version or {}).get(name))
        missing, extra = expected - found, found - expected
        assert not missing, f"{name}: {missing.total()} rows missing, like {next(iter(missing))}"
        assert not extra, f"{name}: {extra.total()} rows too many, like {next(iter(extra))}"


def written(name: str, values: Any, misfits: list[dict[str, str]]) -> Iterable[str | None]:
    """An Arrow array's values in PostgreSQL's text form. ``misfits``: for each row, the texts of values that do not fit
    the mirror's type."""
    item = getattr(values.type, "value_type", None)
    for value, texts in zip(values.to_pylist(), misfits, strict=True):
        assert value is None or name not in texts, f"{name} holds a value, and {RAW} holds another of it"
        if value is not None:
            yield _written(value)
        elif item is not None and pa.types.is_floating(item):
            yield _numbers(texts.get(name), single=item == pa.float32())
        else:
            yield texts.get(name)


def _written(value: Any) -> str:
    """PostgreSQL's text form of a value (ISO dates, UTC, hexadecimal bytea)."""
    match value:
        case bool():
            return "t" if value else "f"
        case float():
            return _float(value)
        case Decimal():
            return f"{value:f}"
        case bytes() | bytearray() | memoryview():
            return "\\x" + bytes(value).hex()
        case datetime():
            text = value.replace(tzinfo=None).isoformat(" ")
            return (text.rstrip("0") if "." in text else text) + ("+00" if value.tzinfo else "")
        case date():
            return value.isoformat()
        case list():
            return "{" + ",".join("NULL" if item is None else _element(_written(item)) for item in value) + "}"
        case _:
            return str(value)


def _element(text: str) -> str:
    """Quotes an element as array_out does."""
    if text and text.upper() != "NULL" and not re.search(r'["\\{}, \t\n\r\v\f]', text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _float(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value).replace("inf", "Infinity")


def _numbers(text: str | None, *, single: bool = False) -> str | None:
    """Writes each number in the text as Python writes a float. ``single``: the numbers are float4."""

    def digits(found: re.Match[str]) -> str:
        value = float(found[0])
        return _float(struct.unpack("f", struct.pack("f", value))[0] if single else value)

    return text and re.sub(r"NaN|-?Infinity|-?\d[\d.]*(?:e[+-]?\d+)?", digits, text)
