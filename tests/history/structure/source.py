"""The tables of a random history with schema changes: the SQL that creates them, and their current state in the
catalog."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg


@dataclass(frozen=True)
class Schemas:
    """The two schemas of a history. The setting ``tables`` includes both. A publication FOR TABLES IN SCHEMA publishes
    only ``app``."""

    number: int

    @property
    def app(self) -> str:
        return f"app{self.number}"

    @property
    def away(self) -> str:
        return f"away{self.number}"

    @property
    def both(self) -> tuple[str, str]:
        return self.app, self.away


_BASE = """
CREATE SCHEMA app; CREATE SCHEMA away;
CREATE TYPE app.mood AS ENUM ('sad', 'so so', 'glad');
CREATE TYPE app.part AS (m app.mood, n int);
CREATE TYPE app.comp AS (a int, b text, p app.part);
"""
FAMILIES = {
    "plain": ("u", "v"),
    "parts": ("p", "p0", "p1", "p2"),
    "typed": ("c",),
    "made": ("g",),
    "wide": ("w",),
    "even": ("q", "q0", "q1"),
    "bag": ("b", "b0", "b1"),
}
"""By family: the tables that :func:`make` creates. ``p2`` is a table that can be attached as a partition next to ``p0``
and ``p1``. Partitions of ``q`` and ``b`` have the attnums of their root."""
_DDL = {
    "plain": [
        "CREATE TABLE app.u (id int PRIMARY KEY, n int, m int, s text)",
        "CREATE TABLE app.v (id int PRIMARY KEY, n int, m int, s text)",
        "INSERT INTO app.u SELECT g, g, -g, 'u' || g FROM generate_series(1, 4) g",
        "INSERT INTO app.v SELECT g, g * 10, g, 'v' || g FROM generate_series(1, 5) g",
    ],
    "parts": [
        "CREATE TABLE app.p (id int NOT NULL, n int, s text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE app.p0 PARTITION OF app.p (CHECK (id BETWEEN 0 AND 9)) FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE app.p1 (s text, id int NOT NULL CHECK (id BETWEEN 10 AND 19), n int, PRIMARY KEY (id))",
        "ALTER TABLE app.p ATTACH PARTITION app.p1 FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE app.p2 (id int NOT NULL CHECK (id BETWEEN 20 AND 29), n int, s text, PRIMARY KEY (id))",
        "INSERT INTO app.p SELECT g * 3, g, 'p' || g FROM generate_series(1, 5) g",
        "INSERT INTO app.p2 VALUES (21, 1, 'loose')",
    ],
    "typed": [
        "CREATE TABLE app.c (id int PRIMARY KEY, c app.comp, f app.mood, h app.part[])",
        """INSERT INTO app.c VALUES (1, '(1,x,"(sad,1)")', 'sad', '{"(glad,2)"}'), (2, '(,,)', 'glad', NULL)""",
    ],
    "made": [
        "CREATE TABLE app.g (id int PRIMARY KEY, n int DEFAULT 1, k int GENERATED ALWAYS AS (n * 2) STORED)",
        "INSERT INTO app.g (id) SELECT generate_series(1, 4)",
    ],
    "wide": [
        "CREATE TABLE app.w (id int, n int, s text)",
        "ALTER TABLE app.w REPLICA IDENTITY FULL",
        "INSERT INTO app.w SELECT g / 2, g, 'w' FROM generate_series(1, 4) g",
    ],
    "even": [
        "CREATE TABLE app.q (id int NOT NULL, n int, m int, s text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE app.q0 PARTITION OF app.q (CHECK (id BETWEEN 0 AND 9)) FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE app.q1 PARTITION OF app.q (CHECK (id BETWEEN 10 AND 19)) FOR VALUES FROM (10) TO (20)",
        "INSERT INTO app.q SELECT g * 3, g, -g, 'q' || g FROM generate_series(1, 5) g",
    ],
    "bag": [
        "CREATE TABLE app.b (id int, n int, m int, s text) PARTITION BY RANGE (id)",
        "CREATE TABLE app.b0 PARTITION OF app.b (CHECK (id BETWEEN 0 AND 9)) FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE app.b1 PARTITION OF app.b (CHECK (id BETWEEN 10 AND 19)) FOR VALUES FROM (10) TO (20)",
        "ALTER TABLE app.b REPLICA IDENTITY FULL",
        "ALTER TABLE app.b0 REPLICA IDENTITY FULL",
        "ALTER TABLE app.b1 REPLICA IDENTITY FULL",
        "INSERT INTO app.b SELECT g % 4 * 4, g % 3, g % 2, 'b' FROM generate_series(1, 16) g",
    ],
}


def make(conn: psycopg.Connection[Any], schemas: Schemas, families: Sequence[str]) -> None:
    for statement in [_BASE, *(statement for family in families for statement in _DDL[family])]:
        here = statement.replace("app.", f"{schemas.app}.").replace("SCHEMA app", f"SCHEMA {schemas.app}")
        conn.execute(here.replace("SCHEMA away", f"SCHEMA {schemas.away}").encode())


@dataclass(frozen=True)
class Column:
    name: str
    type: str
    generated: bool

    @property
    def plain_type(self) -> str:
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class Table:
    """A table of the source. ``parent``: the root, if the table is a partition."""

    oid: int
    schema: str
    name: str
    partitioned: bool
    parent: str | None
    logged: bool
    columns: tuple[Column, ...]
    key: str | None
    """The name of the primary key constraint, or None without a primary key."""

    @property
    def sql(self) -> str:
        return f'"{self.schema}"."{self.name}"'

    @property
    def place(self) -> int | None:
        """The number of the partition's range of ten ids (0: ids 0 to 9), from the table's name. None if the table does
        not have the name of a partition."""
        match = re.match(r"[pqb](\d)", self.name)
        return int(match[1]) if match else None

    def typed(self, type_: str) -> list[Column]:
        """The columns whose type is ``type_``, without generated columns and the column ``id``. For a type in the
        history's schema, ``type_`` is the name without the schema."""
        return [c for c in self.columns if c.plain_type == type_ and not c.generated and c.name != "id"]


_TABLES = """
SELECT c.oid, n.nspname, c.relname, c.relkind = 'p', i.inhparent::regclass::text, c.relpersistence = 'p',
  coalesce((SELECT array_agg(ARRAY[a.attname::text, format_type(a.atttypid, a.atttypmod), a.attgenerated::text]
                             ORDER BY a.attnum)
   FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped), '{}'),
  (SELECT conname FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'p')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
WHERE n.nspname = ANY (%s) AND c.relkind IN ('r', 'p') ORDER BY n.nspname, c.relname
"""


def tables(conn: psycopg.Connection[Any], schemas: Schemas) -> list[Table]:
    """The tables that ``conn`` sees in its transaction. The tables are ordered by name, so that a repeated history
    finds the same order."""
    return [
        Table(oid, schema, name, partitioned, parent, logged, tuple(Column(n, t, g != "") for n, t, g in columns), key)
        for oid, schema, name, partitioned, parent, logged, columns, key in
        conn.execute(_TABLES, [list(schemas.both)]).fetchall()
    ]  # fmt: skip
