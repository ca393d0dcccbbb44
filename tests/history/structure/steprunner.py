"""Executes the steps of one random history (DDL, writes and syncs) on the source, in one thread, over the history's own
connections."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.history.structure import source, writes
from tests.history.structure.changes import CHANGES, Site
from tests.history.structure.chronicle import Chronicle
from tests.history.structure.generate import History, Kind, Step
from tests.history.structure.source import Schemas, Table

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
class StepRunner:
    history: History
    schemas: Schemas
    publication: str
    kind: Kind
    reader: str
    sessions: Sequence[Session]
    chronicle: Chronicle
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    script: list[str] = field(default_factory=list)
    """The executed SQL, for the report of a failure."""
    failures: list[str] = field(default_factory=list)
    _hit: int = 0
    """OID of the table that the last schema change altered."""
    _ways_back: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """For each group of steps that belong together, by its number (the step's ``sequence``): the statements that undo
    the group's schema change."""

    def take(self, step: Step) -> None:
        session, chance = self.sessions[step.connection], random.Random(step.seed)
        try:
            if step.op in CHANGES:
                self._change(session, chance, step)
            elif (write := _WRITES.get(step.op)) is not None:
                self._write(session, chance, *write)
            else:
                _CONTROLS[step.op](self, session, chance, step)
        except psycopg.Error as error:
            self.script.append(f"    refused: {type(error).__name__}: {str(error).splitlines()[0]}")
            self.refused[step.op] += 1
            self._end(session, "ROLLBACK")

    def finish(self) -> None:
        for session in self.sessions:
            self._end(session, "COMMIT")

    # Structure --------------------------------------------------------------------------------------

    def _change(self, session: Session, chance: random.Random, step: Step) -> None:
        kind, tables = self.kind, self._tables(session)
        site = Site(tables, chance, self.schemas, self.publication, kind.scope, kind.via_root, self.reader, kind.few)
        change = CHANGES[step.op](site)
        if change is None:
            return
        if change.alone:
            self._alone(session, change.do)
        else:
            self._do(session, change.do)
        self._hit = change.on
        self._ways_back[step.sequence] = change.undo
        self.done[step.op] += 1

    def _back(self, session: Session, chance: random.Random, step: Step) -> None:
        statements = self._ways_back.pop(step.sequence, ())
        if statements:
            self._do(session, statements)
            self.done["back"] += 1

    def _do(self, session: Session, statements: Sequence[str]) -> None:
        session.begin()
        for statement in statements:
            self.script.append(f"{session.name}: {statement}")
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
                self.script.append(f"{session.name}: {statement}")
                session.conn.execute(statement.encode())
        finally:
            self.chronicle.announce(session.conn)
            self.chronicle.committed(self.schemas.both, since=before)

    # Rows -------------------------------------------------------------------------------------------

    def _write(self, session: Session, chance: random.Random, act: Write, loyal: float) -> None:
        """Writes to a table. ``loyal``: the probability that this is the table of the last schema change."""
        session.begin()
        tables = self._tables(session)
        hit = [table for table in tables if table.oid == self._hit]
        table = hit[0] if hit and chance.random() < loyal else chance.choice(tables)
        guarded = chance.random() < 0.5
        self.script.append(f"{session.name}: {act.__name__} {table.sql}")
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
        self.script.append(f"{session.name}: {how}")
        if how == "COMMIT":
            try:
                self.chronicle.announce(session.conn)
                session.conn.execute("COMMIT")
            except psycopg.Error as error:
                self.script.append(f"    refused: {type(error).__name__}")
            else:
                self.chronicle.committed(self.schemas.both)
                return
        session.conn.execute("ROLLBACK")


_WRITES: dict[str, tuple[Write, float]] = {
    "write": (writes.write, 0.5), "write hit": (writes.write, 1), "fill": (writes.fill, 0.3),
}  # fmt: skip
_CONTROLS: dict[str, Callable[[StepRunner, Session, random.Random, Step], None]] = {
    "back": StepRunner._back, "savepoint": StepRunner._savepoint, "rollback to": StepRunner._rollback_to,
    "release": StepRunner._release, "commit": StepRunner._commit, "rollback": StepRunner._rollback,
}  # fmt: skip
