"""Executes the steps of a history on the source: one thread runs one statement at a time over several connections.

A statement that would wait for another connection's lock, or that violates a constraint, fails at once. Then its
transaction is rolled back, or only the statement if it has its own savepoint.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import errors

from pgcdc_assets.demo.server import USER
from tests.fix_postgres import Database
from tests.history.steps import CONNECTIONS, Step
from tests.history.tables import Column, Spec, quoted
from tests.history.values import HOSTILE, LARGE, TYPES, default, fitting

_SETTINGS = """
SET lock_timeout = '20ms'; SET DateStyle = ISO; SET IntervalStyle = postgres; SET TimeZone = UTC;
SET extra_float_digits = 1; SET bytea_output = hex
"""
_REFUSED = (errors.IntegrityError, errors.LockNotAvailable, errors.DeadlockDetected, errors.ObjectInUse,
            errors.FeatureNotSupported, errors.ProgramLimitExceeded, errors.UntranslatableCharacter)  # fmt: skip
"""Errors that a random statement may cause: a violated constraint, a lock, a TRUNCATE of a referenced table or with
pending trigger events, a key that is too long for its index, a text that the encoding cannot encode."""

Act = Callable[[], None]


@dataclass
class Session:
    """One connection and its transaction, if one is open."""

    conn: psycopg.Connection[Any]
    open: bool = False
    savepoints: int = 0
    exclusive: bool = False
    """Whether the open transaction may hold a lock that blocks even queries of the catalog."""

    def begin(self) -> None:
        if not self.open:
            self.conn.execute("BEGIN")
            self.open, self.savepoints = True, 0

    def end(self, how: str) -> bool:
        """Ends the transaction by COMMIT, ROLLBACK or PREPARE. Returns False if a deferred constraint was violated, and
        the transaction was therefore rolled back."""
        self.open = self.exclusive = False
        try:
            self.conn.execute(how.encode())
        except _REFUSED:
            self.conn.execute("ROLLBACK")
            return False
        return True


@dataclass
class Workload:
    database: Database
    tables: Sequence[Spec]
    conn: psycopg.Connection[Any]
    """A connection for statements outside of the sessions: DDL, COMMIT PREPARED."""
    sessions: list[Session] = field(default_factory=list)
    prepared: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    """By the name of the step: how many steps took effect, including steps whose transaction was rolled back later.
    Refused steps are not counted."""
    refused: Counter[str] = field(default_factory=Counter)
    positions: list[int] = field(default_factory=list)
    """The WAL insert position after each step. A sync may get any of these positions as its endpos."""
    _gid: int = 0

    def make(self) -> None:
        encoding = self.conn.info.parameter_status("server_encoding") or ""
        (label,) = fitting(("😀",), encoding) or ("?",)
        self.conn.execute(TYPES.replace("😀", label).encode())
        self.conn.execute('CREATE SCHEMA "Odd Schema"')
        for spec in self.tables:
            for statement in spec.ddl():
                self.conn.execute(statement.encode())
        for _ in range(CONNECTIONS):
            conn = self.database.connect(client_encoding="UTF8")
            conn.execute(_SETTINGS)
            self.sessions.append(Session(conn))

    def close(self) -> None:
        for session in self.sessions:
            session.conn.close()

    def take(self, step: Step) -> None:
        chance = random.Random(step.seed)
        session = self.sessions[step.connection]
        spec = self.tables[step.table % len(self.tables)]
        control = getattr(self, "_" + step.op.replace(" ", "_"), None)
        if control is not None:
            control(session, chance)
        else:
            self._act(session, step.op, chance, Acts(session.conn, spec, self.tables, step.pick, chance))
        row = self.conn.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()
        assert row is not None
        self.positions.append(int(row[0]))

    def release(self) -> None:
        """Ends the transactions that truncated a table, because queries of pg_publication_tables and copies of the
        table would wait for their locks."""
        for session in self.sessions:
            if session.exclusive:
                session.end("COMMIT")

    def finish(self, chance: random.Random) -> None:
        """Ends every transaction, including prepared transactions."""
        for session in self.sessions:
            if session.open:
                session.end(chance.choice(("COMMIT", "COMMIT", "ROLLBACK")))
        while self.prepared:
            self._finish_prepared(self.sessions[0], chance)

    # Transactions -------------------------------------------------------------------------------

    def _begin(self, session: Session, chance: random.Random) -> None:
        session.begin()

    def _commit(self, session: Session, chance: random.Random) -> None:
        if session.open:
            self._count("commit", session.end("COMMIT"))

    def _rollback(self, session: Session, chance: random.Random) -> None:
        if session.open:
            self._count("rollback", session.end("ROLLBACK"))

    def _empty(self, session: Session, chance: random.Random) -> None:
        if not session.open:
            session.conn.execute("BEGIN; SELECT pg_current_xact_id(); COMMIT")

    def _savepoint(self, session: Session, chance: random.Random) -> None:
        session.begin()
        session.savepoints += 1
        session.conn.execute(f"SAVEPOINT s{session.savepoints}".encode())

    def _rollback_to(self, session: Session, chance: random.Random) -> None:
        if session.open and session.savepoints:
            session.savepoints = chance.randint(1, session.savepoints)
            session.conn.execute(f"ROLLBACK TO s{session.savepoints}".encode())
            self._count("rollback to", True)

    def _prepare(self, session: Session, chance: random.Random) -> None:
        if session.open and not session.exclusive and len(self.prepared) < 3:
            self._gid += 1
            name = f"{self.database.name} {self._gid}"
            done = session.end(f"PREPARE TRANSACTION '{name}'")
            self._count("prepare", done)
            self.prepared += [name] * done

    def _finish_prepared(self, session: Session, chance: random.Random) -> None:
        if self.prepared:
            name = self.prepared.pop(chance.randrange(len(self.prepared)))
            how = chance.choice(("COMMIT", "COMMIT", "ROLLBACK"))
            self.conn.execute(f"{how} PREPARED '{name}'".encode())
            self._count(f"{how.lower()} prepared", True)

    def _default(self, session: Session, chance: random.Random) -> None:
        """Changes or resets a default setting of the database, or of the database's owner in this database. The new
        default applies to new connections."""
        change, role = chance.choice(HOSTILE), chance.choice((None, USER))
        change = f"SET {change}" if chance.random() < 0.7 else f"RESET {change.split()[0]}"
        self.conn.execute(default(change, role).encode())
        self._count("default", True)

    # Statements ---------------------------------------------------------------------------------

    def _act(self, session: Session, op: str, chance: random.Random, acts: Acts) -> None:
        act: Act = getattr(acts, op.replace(" ", "_"))
        alone, guarded = not session.open and chance.random() < 0.3, chance.random() < 0.8
        session.begin()
        session.exclusive |= op in ("truncate", "truncate leaf", "churn")
        if guarded:
            session.conn.execute("SAVEPOINT guard")
        try:
            act()
        except _REFUSED:
            self._count(op, False)
            if guarded:
                session.conn.execute("ROLLBACK TO guard")
            else:
                session.end("ROLLBACK")
                return
        else:
            self.done[op] += acts.effect
        if guarded:
            session.conn.execute("RELEASE guard")
        if alone:
            self._count("commit", session.end("COMMIT"))

    def _count(self, op: str, done: bool) -> None:
        (self.done if done else self.refused)[op] += 1


@dataclass
class Acts:
    """The statements that change a table in a transaction. To select rows, a statement sorts all rows of the table by
    their text, and takes the rows from number ``pick`` on. So a repeated history selects the same rows."""

    conn: psycopg.Connection[Any]
    spec: Spec
    tables: Sequence[Spec]
    pick: int
    chance: random.Random
    effect: bool = False
    """Whether a statement affected a row, or truncated a table."""

    def insert(self) -> None:
        for _ in range(self.chance.choice((1, 2, 4))):
            self._insert()

    def update(self) -> None:
        self._update(self._some(self.spec.values))

    def touch(self) -> None:
        """Updates rows, but not their large values. So the stream does not contain the large values again."""
        self._update(self._some([column for column in self.spec.values if column.kind is not LARGE]))

    def rekey(self) -> None:
        self._update(self._some(self.spec.key), rows=1)

    def negate(self) -> None:
        column = self._whole_number()
        if column is not None and self.spec.followed:
            self._execute(f"UPDATE {self.spec.sql} SET {quoted(column)} = -{quoted(column)}")

    def swap(self) -> None:
        """Two rows swap their keys through a third value."""
        key = self.spec.key[:1]
        if not self.spec.followed or not key or key[0].kind.spare is None:
            return
        column = quoted(key[0].name)
        rows = self._execute(f"SELECT {column}::text, {_PLACE} FROM {self.spec.sql} AS t {self._order(2)}")
        self.effect = len(rows) == 2
        if len(rows) < 2:
            return
        (a, at_a), (b, at_b) = rows
        parked = self._execute(
            f"UPDATE {self.spec.sql} SET {column} = {key[0].kind.spare} "
            f"WHERE {_PLACE} = {literal(at_a)} RETURNING {_PLACE}"
        )
        self._set_key(key[0], a, at_b)
        self._set_key(key[0], b, parked[0][0])

    def delete(self) -> None:
        if self.spec.followed:
            self._execute(f"DELETE FROM {self.spec.sql} {self._where(self.chance.choice((1, 1, 3)))}")

    def reinsert(self) -> None:
        """Deletes a row and inserts an equal row, or another row with the same key."""
        if not self.spec.followed:
            return
        found = self._execute(f"DELETE FROM {self.spec.sql} AS t {self._where(1)} RETURNING t::text")
        for (row,) in found:
            names = [column.name for column in self.spec.columns]
            kept = {column.name for column in self.spec.columns if self.chance.random() < 0.5}
            kept |= {name for name in names if name not in {column.name for column in self.spec.values}}
            values = [
                f"(r).{quoted(column.name)}" if column.name in kept else column.kind.value(self.chance)
                for column in self.spec.columns
            ]
            self._execute(
                f"INSERT INTO {self.spec.sql} ({', '.join(map(quoted, names))}) SELECT {', '.join(values)}"
                f" FROM (SELECT {literal(row)}::{self.spec.sql} AS r) s"
            )

    def move_leaf(self) -> None:
        if self.spec.partitioned:
            self._update([column for column in self.spec.columns if column.name == "region"], rows=1)

    def truncate(self) -> None:
        more = [spec for spec in self.tables if spec is not self.spec and self.chance.random() < 0.3]
        names = ", ".join(spec.sql for spec in [self.spec, *more])
        restart, cascade = (text * (self.chance.random() < 0.5) for text in (" RESTART IDENTITY", " CASCADE"))
        self._execute(f"TRUNCATE {names}{restart}{cascade}")

    def truncate_leaf(self) -> None:
        if self.spec.partitioned:
            self._execute(f"TRUNCATE {self.spec.leaf(self.chance.choice('ns'))}")

    def churn(self) -> None:
        self._insert()
        self._execute(f"TRUNCATE {self.spec.sql} CASCADE")
        self._insert()

    def message(self) -> None:
        self._execute(f"SELECT pg_logical_emit_message({self.chance.choice(('true', 'false'))}, 'odd', 'message')")

    # Parts of statements ------------------------------------------------------------------------

    def _execute(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self.conn.execute(statement.encode())
        self.effect |= cursor.rowcount != 0
        return cursor.fetchall() if cursor.description else []

    def _insert(self) -> None:
        needed = self.spec.keyed or self.spec.form == "deferrable" or self.spec.partitioned
        fixed = {column.name for column in self.spec.key} | {"region"}
        cells = {
            quoted(column.name): column.kind.value(self.chance, null=not (needed and column.name in fixed))
            for column in self.spec.columns
        }
        if self.spec.generated:
            cells["base"] = str(self.chance.randrange(100))
        if self.spec.parent is not None and self.chance.random() < 0.7:
            target = self.spec.parent
            at = f"(SELECT count(*) FROM {target.sql})"
            cells["parent"] = (
                f"(SELECT {quoted(target.key[0].name)} FROM {target.sql} AS t ORDER BY t::text"
                f" OFFSET {self.pick} % greatest({at}, 1) LIMIT 1)"
            )
        # ON CONFLICT cannot use a deferrable constraint.
        otherwise = "" if self.spec.form == "deferrable" else " ON CONFLICT DO NOTHING"
        values = ", ".join(cells.values())
        self._execute(f"INSERT INTO {self.spec.sql} ({', '.join(cells)}) VALUES ({values}){otherwise}")

    def _update(self, columns: Sequence[Column], rows: int | None = None) -> None:
        if not columns or not self.spec.followed:
            return
        fixed = {column.name for column in self.spec.key} if self.spec.form != "bag" else set()
        sets = [
            f"{quoted(c.name)} = {c.kind.value(self.chance, null=c.name not in fixed | {'region'})}" for c in columns
        ]
        if self.spec.generated and self.chance.random() < 0.3:
            sets.append("base = base + 1")
        count = rows or self.chance.choice((1, 1, 2, 5))
        self._execute(f"UPDATE {self.spec.sql} SET {', '.join(sets)} {self._where(count)}")

    def _some(self, columns: Sequence[Column]) -> list[Column]:
        return self.chance.sample(list(columns), min(len(columns), self.chance.choice((1, 1, 2, 3))))

    def _whole_number(self) -> str | None:
        names = [column.name for column in self.spec.key if column.kind.type in ("int", "numeric", "float8")]
        return names[0] if names else None

    def _set_key(self, column: Column, text: str | None, place: str) -> None:
        cell = f"{quoted(column.name)} = {literal(text)}::{column.kind.type}"
        self._execute(f"UPDATE {self.spec.sql} SET {cell} WHERE {_PLACE} = {literal(place)}")

    def _where(self, rows: int) -> str:
        return f"WHERE {_PLACE} IN (SELECT {_PLACE} FROM {self.spec.sql} AS t {self._order(rows)})"

    def _order(self, rows: int) -> str:
        count = f"(SELECT count(*) FROM {self.spec.sql})"
        return f"ORDER BY t::text OFFSET {self.pick} % greatest({count}, 1) LIMIT {rows}"


def literal(text: str | None) -> str:
    return "NULL" if text is None else "'" + text.replace("'", "''") + "'"


_PLACE = "(tableoid::text || ctid::text)"
