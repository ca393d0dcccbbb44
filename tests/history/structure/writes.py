"""Random changes of rows, in any table with its current columns."""

from __future__ import annotations

import random
from typing import Any

import psycopg

from tests.history.structure.source import Column, Table

_TEXTS = ("'a'", "''", "'it''s'", "'😀 ü'", "repeat(md5('x'), 90)")
ODD_TEXTS = {"LATIN1": "ÿ ü", "WIN1252": "€ “ü”", "EUC_JP": "日本語 ①～￢ ｶﾅ"}
"""By server encoding: a text with non-ASCII characters, used instead of a text that only UTF8 can encode."""

_MANY = 400
"""Number of rows that :func:`fill` inserts, with about 200 bytes each. Together these rows exceed the smallest
``logical_decoding_work_mem``, 64 kB."""


def write(conn: psycopg.Connection[Any], table: Table, chance: random.Random) -> None:
    act = chance.choice((insert, insert, insert, update, update, rekey, delete))
    act(conn, table, chance)


def insert(conn: psycopg.Connection[Any], table: Table, chance: random.Random) -> None:
    columns = [column for column in table.columns if not column.generated]
    cells = ", ".join(_value(conn, table, column, chance) for column in columns)
    names = ", ".join(f'"{column.name}"' for column in columns)
    conn.execute(f"INSERT INTO {table.sql} ({names}) VALUES ({cells}) ON CONFLICT DO NOTHING".encode())


def update(conn: psycopg.Connection[Any], table: Table, chance: random.Random) -> None:
    columns = [column for column in table.columns if not column.generated and column.name != "id"]
    if columns:
        column = chance.choice(columns)
        value = _value(conn, table, column, chance)
        conn.execute(f'UPDATE {table.sql} SET "{column.name}" = {value} {_some(table, chance)}'.encode())


def rekey(conn: psycopg.Connection[Any], table: Table, chance: random.Random) -> None:
    conn.execute(f"UPDATE {table.sql} SET id = {_id(table, chance)} {_some(table, chance, 1)}".encode())


def delete(conn: psycopg.Connection[Any], table: Table, chance: random.Random) -> None:
    conn.execute(f"DELETE FROM {table.sql} {_some(table, chance)}".encode())


def fill(conn: psycopg.Connection[Any], table: Table, chance: random.Random) -> None:
    """Inserts many rows, and deletes all but a few of them again."""
    first = chance.randrange(100, 10_000)
    text = next((f'"{column.name}"' for column in table.typed("text")), None)
    if table.place is not None or table.partitioned or text is None:
        return
    conn.execute(
        f"INSERT INTO {table.sql} (id, {text}) SELECT g, repeat(md5(g::text), 6)"
        f" FROM generate_series({first}, {first + _MANY}) g ON CONFLICT DO NOTHING".encode()
    )
    conn.execute(f"DELETE FROM {table.sql} WHERE id BETWEEN {first} AND {first + _MANY - 4}".encode())


def _some(table: Table, chance: random.Random, rows: int | None = None) -> str:
    count = rows or chance.choice((1, 1, 2, 4))
    skipped = chance.randrange(6)
    place = "(tableoid::text || ctid::text)"
    return (
        f"WHERE {place} IN (SELECT {place} FROM {table.sql} AS t ORDER BY t::text"
        f" OFFSET {skipped} % greatest((SELECT count(*) FROM {table.sql}), 1) LIMIT {count})"
    )


def _id(table: Table, chance: random.Random) -> int:
    if table.place is not None:
        return table.place * 10 + chance.randrange(10)
    return chance.randrange(20 if table.partitioned else 9)


def _value(conn: psycopg.Connection[Any], table: Table, column: Column, chance: random.Random) -> str:
    if column.name == "id":
        return str(_id(table, chance))
    return _of_type(conn, column.type, chance)


def _of_type(conn: psycopg.Connection[Any], type_: str, chance: random.Random) -> str:
    if chance.random() < 0.15:
        return f"NULL::{type_}"
    if type_ == "text":
        odd = ODD_TEXTS.get(conn.info.parameter_status("server_encoding") or "", "😀 ü")
        return chance.choice(_TEXTS).replace("😀 ü", odd)
    plain = type_.rpartition(".")[2]
    if plain == "mood":
        labels = conn.execute(f"SELECT enum_range(NULL::{type_})::text[]".encode()).fetchall()[0][0]
        return f"'{chance.choice(labels)}'::{type_}"
    if type_.endswith("[]"):
        return f"ARRAY[{_of_type(conn, type_[:-2], chance)}]::{type_}"
    if plain in ("comp", "part"):
        query = """SELECT format_type(atttypid, atttypmod) FROM pg_attribute
                   WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"""
        inner = [_of_type(conn, kind, chance) for (kind,) in conn.execute(query, [type_]).fetchall()]
        return f"ROW({', '.join(inner)})::{type_}"
    return f"{chance.randrange(100)}::{type_}"
