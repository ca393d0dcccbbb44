"""The journal: a record of all changes of the source, from which the rows of each table at any LSN can be computed.

Row triggers write the old and new row, in PostgreSQL's text form, into a table that is not published. A rollback
removes these entries. A second slot, the witness, shows the ``commit_lsn`` of each transaction. At LSN L, a table has
the rows that transactions with ``commit_lsn`` < L added, minus the rows that these transactions removed. Only
transactions since the last TRUNCATE count. The journal uses no code of the project.

    journal = Journal.keep(conn, "public.t", "public.root")     # before the workload; finds the leaves
    ...
    journal.assert_published(lake)                               # every consistent point, all tables
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psycopg
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from psycopg import sql

from tests.oracle import Rows, mirror_rows, source_rows, store_options

_MAKE = """
CREATE SCHEMA journal;
CREATE TABLE journal.entry (n bigserial PRIMARY KEY, xid bigint, relation oid, op text, was text, became text);
CREATE PUBLICATION journal_witness FOR TABLE journal.entry WITH (publish = 'insert');
CREATE FUNCTION journal.row_changed() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
  SET extra_float_digits = 1 SET DateStyle = 'ISO' SET IntervalStyle = 'postgres' SET TimeZone = 'UTC'
  SET bytea_output = 'hex' AS $$
BEGIN
  INSERT INTO journal.entry (xid, relation, op, was, became) VALUES (
    pg_current_xact_id()::text::bigint, TG_RELID, left(TG_OP, 1),
    CASE WHEN TG_OP IN ('UPDATE', 'DELETE') THEN OLD::text END,
    CASE WHEN TG_OP IN ('UPDATE', 'INSERT') THEN NEW::text END);
  RETURN NULL;
END $$;
CREATE FUNCTION journal.emptied() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  INSERT INTO journal.entry (xid, relation, op) VALUES (pg_current_xact_id()::text::bigint, TG_RELID, 'T');
  RETURN NULL;
END $$;
"""

_LEAVES = """
SELECT c.oid, n.nspname, c.relname FROM pg_partition_tree(%(table)s::regclass) AS tree
JOIN pg_class c ON c.oid = tree.relid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE tree.isleaf AND c.relpersistence = 'p'
UNION
SELECT c.oid, n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = %(table)s::regclass AND c.relkind = 'r'
"""

_IMAGES = """
WITH done AS (
  SELECT entry.*, coalesce(commit.lsn, '0/0') AS at
  FROM journal.entry LEFT JOIN unnest({xids}::bigint[], {lsns}::pg_lsn[]) AS commit (xid, lsn) USING (xid)
  WHERE relation = {relation} AND (xid = 0 OR commit.lsn < {upto}::pg_lsn)
), last_truncate AS (
  SELECT at, n FROM done WHERE op = 'T' ORDER BY at DESC, n DESC LIMIT 1
), moves AS (
  SELECT became AS image, 1 AS copies, at, n FROM done WHERE became IS NOT NULL
  UNION ALL SELECT was, -1, at, n FROM done WHERE was IS NOT NULL
)
SELECT image, sum(copies)::int AS copies FROM moves
WHERE (at, n) > (SELECT coalesce(max(at), '0/0'), coalesce(max(n), 0) FROM last_truncate)
GROUP BY image HAVING sum(copies) <> 0
"""


@dataclass
class Journal:
    """``tables``: schema.table, unquoted. ``conn`` is in autocommit mode."""

    conn: psycopg.Connection[Any]
    tables: tuple[str, ...]
    witness: str

    @classmethod
    def keep(cls, conn: psycopg.Connection[Any], *tables: str) -> Self:
        """Starts the journal with the existing rows. Nobody may write to the tables during this call. pgcdc's setting
        ``tables`` must exclude the schema ``journal``."""
        conn.execute(_MAKE)
        journal = cls(conn, tables, f"witness_{conn.info.dbname}"[:60])
        for table in tables:
            for oid, schema, leaf in journal._leaves(table):
                journal._watch(oid, sql.Identifier(schema, leaf))
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [journal.witness])
        return journal

    def commits(self) -> dict[int, str]:
        """By xid: the ``commit_lsn`` of every transaction since the journal began, from the witness slot."""
        found = self.conn.execute(
            "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
            " 'publication_names', 'journal_witness') WHERE get_byte(data, 0) = ascii('B')",
            [self.witness],
        ).fetchall()
        begins = [struct.unpack(">cQqI", data) for (data,) in found]
        return {xid: f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}" for _, lsn, _, xid in begins}

    def rows_at(self, table: str, lsn: int, commits: dict[int, str] | None = None) -> tuple[list[str], Rows]:
        """Column names and rows of a table after exactly the transactions with ``commit_lsn`` < ``lsn``. Values are in
        the form that ``tests.oracle`` compares."""
        commits = self.commits() if commits is None else commits
        schema, name = table.split(".", 1)
        columns = self._columns(table)
        parts = []
        for oid, leaf_schema, leaf in self._leaves(table):
            images = sql.SQL(_IMAGES).format(
                xids=sql.Literal(list(commits)), lsns=sql.Literal(list(commits.values())), relation=sql.Literal(oid),
                upto=sql.Literal(f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"),
            )  # fmt: skip
            self._sound(images, table)
            names = sql.SQL(", ").join(sql.SQL("(r).") + sql.Identifier(column) for column in columns)
            parts.append(
                sql.SQL(
                    "SELECT {names} FROM (SELECT image::{leaf} AS r FROM ({images}) i, generate_series(1, i.copies)) s"
                ).format(names=names, leaf=sql.Identifier(leaf_schema, leaf), images=images)
            )
        at = sql.SQL("({}) AS at_lsn").format(sql.SQL(" UNION ALL ").join(parts))
        return source_rows(self.conn, schema, name, at)

    def assert_equal_at(self, lake: Path | str, lsn: int, versions: dict[str, int], commits: dict[int, str]) -> None:
        """Checks that the mirrors at ``versions`` (by schema.table) equal the source at ``lsn``."""
        for table, version in versions.items():
            if table not in self.tables:
                continue
            columns, expected = self.rows_at(table, lsn, commits)
            found = mirror_rows(lake, table.replace(".", "/", 1), columns, version)
            missing, extra = expected - found, found - expected
            where = f"{table} at {lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}, version {version}"
            assert not missing, f"{where}: {missing.total()} rows missing, like {next(iter(missing))}"
            assert not extra, f"{where}: {extra.total()} rows too many, like {next(iter(extra))}"

    def assert_published(self, lake: Path | str, *, after: int = 0) -> int:
        """Compares every consistent point above ``after`` with the source at its LSN. Returns the number of points."""
        points = [point for point in published(lake) if point[0] > after]
        commits = self.commits()
        for lsn, versions in points:
            self.assert_equal_at(lake, lsn, versions, commits)
        return len(points)

    # Parts -----------------------------------------------------------------------------------------

    def _leaves(self, table: str) -> list[tuple[int, str, str]]:
        name = sql.Identifier(*table.split(".", 1)).as_string(self.conn)
        return self.conn.execute(_LEAVES, {"table": name}).fetchall()

    def _columns(self, table: str) -> list[str]:
        name = sql.Identifier(*table.split(".", 1)).as_string(self.conn)
        return [
            row[0]
            for row in self.conn.execute(
                "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
                " ORDER BY attnum", [name],
            ).fetchall()
        ]  # fmt: skip

    def _watch(self, oid: int, leaf: sql.Identifier) -> None:
        self.conn.execute(
            sql.SQL(
                "CREATE TRIGGER journal_rows AFTER INSERT OR UPDATE OR DELETE ON {leaf} FOR EACH ROW"
                " EXECUTE FUNCTION journal.row_changed();"
                "CREATE TRIGGER journal_truncate AFTER TRUNCATE ON {leaf} EXECUTE FUNCTION journal.emptied();"
                "ALTER TABLE {leaf} ENABLE ALWAYS TRIGGER journal_rows;"
                "ALTER TABLE {leaf} ENABLE ALWAYS TRIGGER journal_truncate"
            ).format(leaf=leaf)
        )
        with self.conn.transaction():
            self.conn.execute("SET LOCAL extra_float_digits = 1; SET LOCAL DateStyle = 'ISO'")
            self.conn.execute("SET LOCAL IntervalStyle = 'postgres'; SET LOCAL TimeZone = 'UTC'")
            self.conn.execute(
                sql.SQL(
                    "INSERT INTO journal.entry (xid, relation, op, became) SELECT 0, {oid}, 'I', r::text FROM {leaf} r"
                ).format(oid=sql.Literal(oid), leaf=leaf)
            )

    def _sound(self, images: sql.Composed, table: str) -> None:
        """Checks that no row was removed more often than it was added, which would mean that the journal itself is
        wrong."""
        odd = self.conn.execute(sql.SQL("SELECT image, copies FROM ({}) i WHERE copies < 0").format(images)).fetchone()
        assert odd is None, f"the journal of {table} removed a row that was not there: {odd}"


def published(lake: Path | str) -> list[tuple[int, dict[str, int]]]:
    """Every consistent point, oldest first: its LSN, and the Delta version of each table (schema.table, unquoted)."""
    folder = f"{lake}/_pgcdc/consistent_points"
    options = store_options(lake)
    if not DeltaTable.is_deltatable(folder, storage_options=options):
        return []
    query = "SELECT replay_lsn, tables FROM points ORDER BY at"
    table = DeltaTable(folder, storage_options=options)
    found = pa.table(QueryBuilder().register("points", table).execute(query).read_all())
    return [
        (row["replay_lsn"], {_verbatim(name): version for name, version in row["tables"]}) for row in found.to_pylist()
    ]


def _verbatim(name: str) -> str:
    """A quoted name such as ``"Odd Schema"."Select"`` without its quotes."""
    parts = re.findall(r'"((?:[^"]|"")+)"|([^".]+)', name)
    return ".".join(quoted.replace('""', '"') or plain for quoted, plain in parts)
