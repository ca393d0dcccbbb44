"""Executes the steps of one story (a random history of DDL, writes and syncs) on the source, in one thread, over the
story's own connections."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.history.structure import source, writes
from tests.history.structure.chronicle import Chronicle
from tests.history.structure.moves import MOVES, Site
from tests.history.structure.source import Schemas, Table
from tests.history.structure.story import Kind, Step, Story

Write = Callable[[psycopg.Connection[Any], Table, random.Random], None]


@dataclass
class Session:
    """One connection and its transaction, if one is open."""

    name: str
    conn: psycopg.Connection[Any]
    open: bool = False
    savepoints: int = 0

    def begin(self) -> None:
        if not self.open:
            self.conn.execute("BEGIN")
            self.open, self.savepoints = True, 0


@dataclass
class Player:
    story: Story
    schemas: Schemas
    publication: str
    kind: Kind
    reader: str
    sessions: Sequence[Session]
    chronicle: Chronicle
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)
    """The executed SQL, for the report of a failure."""
    silences: list[str] = field(default_factory=list)
    _hit: int = 0
    """OID of the table that the last move (schema change) changed."""
    _ways_back: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """For each group of steps that belong together, by its number (the step's ``idea``): the statements that undo its
    move."""

    def take(self, step: Step) -> None:
        session, chance = self.sessions[step.connection], random.Random(step.seed)
        try:
            if step.op in MOVES:
                self._move(session, chance, step)
            elif (write := _WRITES.get(step.op)) is not None:
                self._write(session, chance, *write)
            else:
                _CONTROLS[step.op](self, session, chance, step)
        except psycopg.Error as error:
            self.told.append(f"    refused: {type(error).__name__}: {str(error).splitlines()[0]}")
            self.refused[step.op] += 1
            self._end(session, "ROLLBACK")

    def finish(self) -> None:
        for session in self.sessions:
            self._end(session, "COMMIT")

    # Structure --------------------------------------------------------------------------------------

    def _move(self, session: Session, chance: random.Random, step: Step) -> None:
        kind, tables = self.kind, self._tables(session)
        site = Site(tables, chance, self.schemas, self.publication, kind.scope, kind.via_root, self.reader, kind.few)
        move = MOVES[step.op](site)
        if move is None:
            return
        if move.alone:
            self._alone(session, move.do)
        else:
            self._do(session, move.do)
        self._hit = move.on
        self._ways_back[step.idea] = move.undo
        self.done[step.op] += 1

    def _back(self, session: Session, chance: random.Random, step: Step) -> None:
        statements = self._ways_back.pop(step.idea, ())
        if statements:
            self._do(session, statements)
            self.done["back"] += 1

    def _do(self, session: Session, statements: Sequence[str]) -> None:
        session.begin()
        for statement in statements:
            self.told.append(f"{session.name}: {statement}")
            session.conn.execute(statement.encode())

    def _alone(self, session: Session, statements: Sequence[str]) -> None:
        """Runs statements outside of a transaction block, between two transactions that only emit a message of the
        chronicle."""
        self._end(session, "COMMIT")
        self.chronicle.announce(session.conn)
        self.chronicle.committed(self.schemas.both)
        before = self.chronicle.announced
        try:
            for statement in statements:
                self.told.append(f"{session.name}: {statement}")
                session.conn.execute(statement.encode())
        finally:
            self.chronicle.announce(session.conn)
            self.chronicle.committed(self.schemas.both, since=before)

    # Rows -------------------------------------------------------------------------------------------

    def _write(self, session: Session, chance: random.Random, act: Write, loyal: float) -> None:
        """Writes to a table. ``loyal``: the probability that this is the table of the last move."""
        session.begin()
        tables = self._tables(session)
        hit = [table for table in tables if table.oid == self._hit]
        table = hit[0] if hit and chance.random() < loyal else chance.choice(tables)
        guarded = chance.random() < 0.5
        self.told.append(f"{session.name}: {act.__name__} {table.sql}")
        if guarded:
            session.conn.execute("SAVEPOINT guard")
        act(session.conn, table, chance)
        if guarded:
            session.conn.execute("RELEASE guard")
        self.done[act.__name__] += 1

    def _tables(self, session: Session) -> list[Table]:
        return source.tables(session.conn, self.schemas)

    # Transactions -----------------------------------------------------------------------------------

    def _savepoint(self, session: Session, chance: random.Random, step: Step) -> None:
        session.begin()
        session.savepoints += 1
        self._do(session, (f"SAVEPOINT s{session.savepoints}",))

    def _rollback_to(self, session: Session, chance: random.Random, step: Step) -> None:
        if session.open and session.savepoints:
            session.savepoints = chance.randint(1, session.savepoints)
            self._do(session, (f"ROLLBACK TO s{session.savepoints}",))
            self.done["rollback to"] += 1

    def _release(self, session: Session, chance: random.Random, step: Step) -> None:
        if session.open and session.savepoints:
            session.savepoints = chance.randint(1, session.savepoints) - 1
            self._do(session, (f"RELEASE s{session.savepoints + 1}",))

    def _commit(self, session: Session, chance: random.Random, step: Step) -> None:
        self._end(session, "COMMIT")

    def _rollback(self, session: Session, chance: random.Random, step: Step) -> None:
        self._end(session, "ROLLBACK")

    def _end(self, session: Session, how: str) -> None:
        if not session.open:
            return
        session.open = False
        self.told.append(f"{session.name}: {how}")
        if how == "COMMIT":
            try:
                self.chronicle.announce(session.conn)
                session.conn.execute("COMMIT")
            except psycopg.Error as error:
                self.told.append(f"    refused: {type(error).__name__}")
            else:
                self.chronicle.committed(self.schemas.both)
                return
        session.conn.execute("ROLLBACK")


_WRITES: dict[str, tuple[Write, float]] = {
    "write": (writes.write, 0.5), "write hit": (writes.write, 1), "fill": (writes.fill, 0.3),
}  # fmt: skip
_CONTROLS: dict[str, Callable[[Player, Session, random.Random, Step], None]] = {
    "back": Player._back, "savepoint": Player._savepoint, "rollback to": Player._rollback_to,
    "release": Player._release, "commit": Player._commit, "rollback": Player._rollback,
}  # fmt: skip
