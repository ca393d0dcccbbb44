"""The chronicle: a record of the rows of every table after each commit, and of the LSN of each commit. Mirrors are
compared with it in random histories with schema changes.

One thread is the only writer, so the rows that are read after a commit are the source's rows until the next commit.
Each transaction emits a logical message. A second slot, the witness, reads the message and so shows the transaction's
``commit_lsn``. The chronicle uses no triggers, because schema changes would break them.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import psycopg
from psycopg import sql

from tests.oracle import Rows

_SETTINGS = """
SET DateStyle = ISO; SET IntervalStyle = postgres; SET TimeZone = UTC; SET extra_float_digits = 1;
SET bytea_output = hex
"""
_TABLES = """
SELECT c.oid, n.nspname, c.relname, c.relkind, c.relpersistence,
  coalesce(array_agg(a.attname ORDER BY a.attnum) FILTER (WHERE a.attgenerated = ''), '{}'),
  coalesce(array_agg(a.attname ORDER BY a.attnum) FILTER (WHERE a.attgenerated <> ''), '{}')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE n.nspname = ANY (%s) AND c.relkind IN ('r', 'p') AND NOT c.relispartition
GROUP BY c.oid, n.nspname, c.relname ORDER BY n.nspname, c.relname
"""
_LOGGED = "{} t WHERE (SELECT relpersistence = 'p' FROM pg_class c WHERE c.oid = t.tableoid)"
"""Excludes rows of UNLOGGED partitions, which are neither in the stream nor in the mirror."""
_PARTIAL = "SELECT FROM pg_publication WHERE pubname = %s AND NOT (pubinsert AND pubupdate AND pubdelete)"
_COMMITS = """
SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1', 'publication_names',
  'history_witness', 'messages', 'true') WHERE get_byte(data, 0) IN (ascii('B'), ascii('M'))
"""
_MESSAGE = re.compile(rb"M.{9}history\0.{4}(\d+)\Z", re.DOTALL)


@dataclass(frozen=True)
class Contents:
    """The contents of a table at one time: its column names, generated columns last, and its rows, with values in this
    order."""

    oid: int
    logged: bool
    columns: tuple[str, ...]
    generated: frozenset[str]
    rows: Rows


Tables = Mapping[str, Contents]
"""The contents of all tables, by schema.table, unquoted. Rows of partitions belong to the root table."""


@dataclass(frozen=True)
class _Entry:
    """The contents of all tables after a change, and two messages that show when the change was committed."""

    first: int
    """The number of a message. The change was committed together with this message or after it."""
    last: int
    """The number of a message. The change was committed together with this message or before it."""
    tables: Tables
    partial: bool
    """Whether the publication excluded inserts, updates or deletes at that time."""


@dataclass
class Chronicle:
    conn: psycopg.Connection[Any]
    witness: str
    publication: str
    _entries: list[_Entry]
    _messages: int = 0

    @classmethod
    def begin(cls, conn: psycopg.Connection[Any], schemas: Sequence[str], publication: str = "") -> Self:
        """Starts the chronicle with the existing rows. ``conn`` is in autocommit mode, and only the chronicle uses
        it."""
        conn.execute(_SETTINGS)
        conn.execute("CREATE PUBLICATION history_witness")
        witness = f"witness_{conn.info.dbname}"[:60]
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [witness])
        chronicle = cls(conn, witness, publication, [_Entry(0, 0, {}, partial=False)])
        chronicle._enter(0, 0, schemas)
        return chronicle

    def announce(self, conn: psycopg.Connection[Any]) -> None:
        """Emits the next message, in a transaction that is about to commit."""
        self._messages += 1
        text = str(self._messages)
        conn.execute("SELECT pg_logical_emit_message(true, 'history', %s::text)", [text])

    def committed(self, schemas: Sequence[str], *, since: int | None = None) -> None:
        """Records the tables after the commit of the transaction that was announced last. This transaction has changed
        only tables of ``schemas``.

        ``since``: the number of an earlier message. The change was committed between this message and the last message,
        in transactions without a message (VACUUM FULL, DETACH CONCURRENTLY).
        """
        self._enter(self._messages if since is None else since, self._messages, schemas)

    @property
    def announced(self) -> int:
        return self._messages

    @property
    def now(self) -> Tables:
        return self._entries[-1].tables

    def at(self, lsn: int, commits: Mapping[int, int]) -> list[Tables]:
        """The possible contents of the tables after the transactions with ``commit_lsn`` < ``lsn``. There are several
        possible contents only if ``lsn`` lies inside a statement that has several transactions."""
        return [entry.tables for entry in self._at(lsn, commits)]

    @property
    def partial(self) -> bool:
        return self._entries[-1].partial

    @property
    def oids(self) -> set[int]:
        """The OIDs of the tables that exist now."""
        return {table.oid for table in self.now.values()}

    def partial_at(self, lsn: int, commits: Mapping[int, int]) -> bool:
        """Whether the publication may have excluded inserts, updates or deletes at that LSN."""
        return any(entry.partial for entry in self._at(lsn, commits))

    def renamed_back(self, title: str, lsn: int, commits: Mapping[int, int]) -> bool:
        """Whether a table that had this name below ``lsn`` has another name at ``lsn``, and later has this name
        again."""
        earlier = [entry for entry in self._entries if commits[entry.last] < lsn and title in entry.tables]
        later = [entry for entry in self._entries if commits[entry.first] >= lsn and title in entry.tables]
        here = {tables[title].oid for tables in self.at(lsn, commits) if title in tables}
        before = {entry.tables[title].oid for entry in earlier}
        return any(entry.tables[title].oid in before - here for entry in later)

    def _at(self, lsn: int, commits: Mapping[int, int]) -> list[_Entry]:
        found: list[_Entry] = []
        for entry in reversed(self._entries):
            if commits[entry.first] < lsn:
                found.append(entry)
                if commits[entry.last] < lsn:
                    break
        return found

    def commits(self) -> dict[int, int]:
        """The ``commit_lsn`` of the transaction that emitted each message, by the message's number. Number 0 stands for
        the start of the chronicle, with LSN 0."""
        found: dict[int, int] = {0: 0}
        commit_lsn = 0
        for (data,) in self.conn.execute(_COMMITS, [self.witness]).fetchall():
            if data[:1] == b"B":
                _, commit_lsn, _, _ = struct.unpack(">cQqI", data)
            elif (match := _MESSAGE.fullmatch(data)) is not None:
                found[int(match[1])] = commit_lsn
        return found

    def _enter(self, first: int, last: int, schemas: Sequence[str]) -> None:
        tables = {title: found for title, found in self.now.items() if title.split(".", 1)[0] not in schemas}
        for oid, schema, name, kind, persistence, columns, generated in self.conn.execute(
            _TABLES, [list(schemas)]
        ).fetchall():
            names = [*columns, *generated]
            rows = self._rows(sql.Identifier(schema, name), names, only=kind == "r")
            tables[f"{schema}.{name}"] = Contents(oid, persistence == "p", tuple(names), frozenset(generated), rows)
        partial = bool(self.conn.execute(_PARTIAL, [self.publication]).fetchall())
        self._entries.append(_Entry(first, last, tables, partial))

    def _rows(self, table: sql.Identifier, names: Sequence[str], *, only: bool) -> Rows:
        text = sql.SQL("CASE WHEN num_nulls({0}) = 0 THEN format('%s', {0}) END")
        listed = sql.SQL(", ").join(text.format(sql.Identifier(name)) for name in names)
        source = sql.SQL("ONLY {}" if only else _LOGGED).format(table)
        query = sql.SQL("SELECT {} FROM {}").format(listed, source)
        return Counter(self.conn.execute(query).fetchall())
