"""Histories of several concurrent sessions, as steps for hypothesis: savepoints, structure, and rows of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import psycopg
from hypothesis import strategies as st

SESSIONS: Final = 3
IMMEDIATE_SINCE: Final = 16
"""From this version on, each change can be its own block."""
SETUP: Final = """
CREATE TABLE bag (id int, v text); ALTER TABLE bag REPLICA IDENTITY FULL;
CREATE TYPE mood AS ENUM ('ok');
CREATE TABLE c (id int PRIMARY KEY, m mood);
CREATE TABLE root (id int, region int, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE leaf0 PARTITION OF root FOR VALUES IN (0);
CREATE TABLE branch PARTITION OF root FOR VALUES IN (1, 2) PARTITION BY LIST (region);
CREATE TABLE leaf1 PARTITION OF branch FOR VALUES IN (1);
CREATE TABLE leaf2 PARTITION OF branch FOR VALUES IN (2);
ALTER PUBLICATION p ADD TABLE bag, c, root;
ALTER PUBLICATION p SET (publish_via_partition_root = true);
"""
_OWN: Final = """
DROP TABLE IF EXISTS {0};
CREATE TABLE {0} (id int PRIMARY KEY, n int, v text); ALTER TABLE {0} ALTER v SET STORAGE EXTERNAL;
ALTER PUBLICATION p ADD TABLE {0};
"""
_DROP: Final = """
DO $$ DECLARE name text; BEGIN
  SELECT attname INTO name FROM pg_attribute
  WHERE attrelid = '{0}'::regclass AND attname ~ '^c[0-9]' AND NOT attisdropped LIMIT 1;
  IF name IS NOT NULL THEN EXECUTE format('ALTER TABLE {0} DROP %I', name); END IF;
END $$
"""
_CAUGHT: Final = """
DO $$ BEGIN
  INSERT INTO {0} (id, v) SELECT g, 'caught' FROM {1};
  BEGIN INSERT INTO {0} (id, v) SELECT -g, 'never' FROM {1}; PERFORM 1 / 0; EXCEPTION WHEN division_by_zero THEN END;
END $$
"""


class Action(StrEnum):
    """What a session does. Only the session itself writes and alters its own table (``own``)."""

    LOOK = "look"
    """The receiver catches up."""
    BEGIN = "begin"
    SAVEPOINT = "savepoint"
    RELEASE = "release"
    BACK = "rollback to"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    PREPARE = "prepare"
    """The session then begins another transaction. The prepared one ends with :attr:`END`, or when it is in the way."""
    END = "commit or rollback prepared"
    INSERT = "INSERT INTO a SELECT g, repeat('x', 300) FROM {rows}"
    BAG = "INSERT INTO bag SELECT g, repeat('y', 300) FROM {rows}"
    MOOD = "INSERT INTO c SELECT g, 'ok' FROM {rows}"
    PARTED = "INSERT INTO root SELECT g, g % 3, repeat('p', 300) FROM {rows}"
    OWN = "INSERT INTO {own} (id, n, v) SELECT g, g, repeat('z', 300) FROM {rows}"
    TOAST = "INSERT INTO {own} (id, n, v) SELECT g, 0, repeat(md5(g::text), 150) FROM {rows}"
    UPDATE = "UPDATE {own} SET n = n + 1 WHERE id % 7 = 0"
    REPLACE = "UPDATE {own} SET v = repeat(md5(id::text), 100) WHERE id % 5 = 0"
    KEYS = "UPDATE {own} SET id = -id WHERE id % 11 = 0"
    DELETE = "DELETE FROM {own} WHERE id % 5 = 1"
    CAUGHT = "caught"
    """A block that fails, in a subtransaction that the server creates."""
    TRUNCATE = "TRUNCATE {own}"
    ADD = "ALTER TABLE {own} ADD c{first} int DEFAULT 7"
    DROP = "drop a column"
    RETYPE = "ALTER TABLE {own} ALTER n TYPE bigint"
    RETYPE_BACK = "ALTER TABLE {own} ALTER n TYPE int"
    REWRITE = "ALTER TABLE {own} ALTER n TYPE bigint USING n + 1"
    MESSAGE = "SELECT pg_logical_emit_message(true, 'app', 'inside {first}')"
    LOOSE = "SELECT pg_logical_emit_message(false, 'app', 'loose {first}')"


_A: Final = Action
_OFTEN: Final = [_A.INSERT, _A.OWN, _A.TOAST, _A.SAVEPOINT, _A.SAVEPOINT, _A.RELEASE, _A.BACK, _A.BACK, _A.BEGIN,
                 _A.LOOK, _A.COMMIT]  # fmt: skip
PLAIN: Final = [*_OFTEN, *_OFTEN, _A.ROLLBACK, _A.BAG, _A.MOOD, _A.PARTED, _A.UPDATE, _A.REPLACE, _A.KEYS, _A.DELETE,
                _A.CAUGHT, _A.LOOSE]  # fmt: skip
PREPARED: Final = [_A.PREPARE, _A.END]
ALL: Final = [*PLAIN, _A.TRUNCATE, _A.ADD, _A.DROP, _A.RETYPE, _A.RETYPE_BACK, _A.REWRITE, _A.MESSAGE]


@dataclass(frozen=True)
class Step:
    session: int
    action: Action
    count: int
    """The number of rows to insert."""


def histories(actions: Sequence[Action] = ALL, *, least: int = 20, most: int = 50) -> st.SearchStrategy[list[Step]]:
    step = st.builds(Step, st.integers(0, SESSIONS - 1), st.sampled_from(actions), st.sampled_from([300, 20, 1]))
    return st.lists(step, min_size=least, max_size=most)


@dataclass
class Sessions:
    """Connections that play histories, one after the other. Transactions of the first connection have an origin."""

    connections: Sequence[psycopg.Connection]
    look: Callable[[], object]
    beside: Sequence[psycopg.Connection] = ()
    """A second connection for each session, which ends its prepared transaction. The first one has the origin, too."""
    _depth: list[int] = field(default_factory=lambda: [-1] * SESSIONS)
    """The number of open savepoints, or -1 outside of a transaction."""
    _next: int = 0
    _prepared: set[int] = field(default_factory=set)
    """Sessions that have a prepared transaction. Each session uses one gid again and again."""

    def play(self, steps: Sequence[Step]) -> None:
        """Plays the steps. Transactions that are open at the end are committed."""
        for number, conn in enumerate(self.connections):
            # Ends the transaction of an earlier example that failed.
            conn.execute("ROLLBACK")
            self._end_prepared(number, "ROLLBACK")
            conn.execute("SET lock_timeout = '20s'")
            self._depth[number] = -1
        for number in range(SESSIONS):
            self.connections[0].execute(_OWN.format(f"own{number}").encode())
        # This transaction is always sent in part.
        for step in [Step(1, Action.BEGIN, 0), Step(1, Action.INSERT, 300), Step(1, Action.LOOK, 0), *steps]:
            self._play(step)
        for number in range(SESSIONS):
            self._end(number, "COMMIT")
            self._end_prepared(number, "COMMIT")

    def _play(self, step: Step) -> None:
        number, action = step.session, step.action
        conn, depth = self.connections[number], self._depth[number]
        if action is Action.LOOK:
            self.look()
        elif action in (Action.BEGIN, Action.SAVEPOINT) and depth < 0:
            conn.execute("BEGIN")
            self._depth[number] = 0
        elif action is Action.SAVEPOINT and depth < 4:
            self._depth[number] += 1
            conn.execute(f"SAVEPOINT s{depth + 1}".encode())
        elif action is Action.RELEASE and depth > 0:
            conn.execute(f"RELEASE s{depth}".encode())
            self._depth[number] -= 1
        elif action is Action.BACK and depth > 0:
            back = 1 + step.count % depth
            conn.execute(f"ROLLBACK TO s{back}".encode())
            self._depth[number] = back
        elif action in (Action.COMMIT, Action.ROLLBACK):
            self._end(number, action)
        elif action is Action.PREPARE and depth >= 0:
            self._end_prepared(number, "COMMIT")
            self._end(number, f"PREPARE TRANSACTION '{self._gid(number)}'")
            self._prepared.add(number)
        elif action is Action.END:
            self._end_prepared(number, "COMMIT" if step.count % 3 else "ROLLBACK")
        elif action not in (Action.BEGIN, Action.SAVEPOINT, Action.RELEASE, Action.BACK, Action.PREPARE):
            self._write(number, step)

    def _gid(self, number: int) -> str:
        return f"{self.connections[number].info.dbname} {number}"

    def _end_prepared(self, number: int, how: str) -> None:
        """Uses the second connection, since the session may have an open transaction."""
        if number in self._prepared:
            self._prepared.remove(number)
            self.beside[number].execute(f"{how} PREPARED '{self._gid(number)}'".encode())

    def _end(self, number: int, how: str) -> None:
        if self._depth[number] >= 0:
            self.connections[number].execute(how.encode())
            self._depth[number] = -1

    def _write(self, number: int, step: Step) -> None:
        first, self._next = self._next + 1, self._next + step.count
        rows, own = f"generate_series({first}, {self._next}) g", f"own{number}"
        if step.action is Action.CAUGHT:
            statement = _CAUGHT.format(own, rows)
        elif step.action is Action.DROP:
            statement = _DROP.format(own)
        else:
            statement = step.action.format(rows=rows, own=own, first=first)
        if "{own}" in step.action or step.action is Action.CAUGHT or step.action is Action.DROP:
            # The prepared transaction may hold locks on the table.
            self._end_prepared(number, "COMMIT" if step.count % 3 else "ROLLBACK")
        self.connections[number].execute(statement.encode())
