"""A source whose tables are altered all the time (a storm), an application that measures how long its queries take, and
helpers that publish and copy a table."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgcdc_assets.core.names import TableName
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.snapshot.export import Snapshot
from pgcdc_assets.source.snapshot.pieces import Piece, pieces
from pgcdc_assets.source.snapshot.reading import copy_blocks, read_whole
from tests.fix_postgres import Database

TABLES = [f"t{number}" for number in range(6)]
ROWS = 20_000
PAUSE_SECONDS = 0.03
"""Seconds between two statements of one session. The pause keeps the load on the processors low, so that queries wait
only for locks."""
_LOOK_SECONDS = 0.05
"""Seconds between two queries of pg_locks. Each query stops the lock manager for a moment, which would delay the
application if the queries had no pause."""
GIVEN_UP_SECONDS = 30
"""Seconds after which a query that waits for a lock fails. The query is then recorded with this time, so that a query
that is blocked for ever is recorded, too."""
BEARABLE_SECONDS = 1.0
"""With pgcdc's sessions, the longest query may take this many seconds more than the longest query without them."""
STORMS = 3
"""How often the test compares the times of the queries with and without pgcdc, at most. The test passes at the first
comparison in which pgcdc hardly delays the queries. A busy machine makes some queries slow in one comparison, but a
lock that pgcdc holds too long makes queries slow in every comparison."""

_CREATE = "CREATE TABLE {0} (id int PRIMARY KEY, v text, n int)"
_FILL = f"INSERT INTO {{0}} SELECT i, repeat('v', 60), i FROM generate_series(1, {ROWS}) AS i"
_ALTER = (
    "ALTER TABLE {0} ADD COLUMN more int DEFAULT 5",
    "ALTER TABLE {0} DROP COLUMN IF EXISTS more",
    f"TRUNCATE {{0}}; {_FILL}",
    f"BEGIN; DROP TABLE {{0}}; {_CREATE}; {_FILL}; COMMIT",
    "BEGIN; ALTER TABLE {0} RENAME TO {0}_away; COMMIT; ALTER TABLE {0}_away RENAME TO {0}",
    "ALTER TABLE {0} ALTER n TYPE bigint",
    "ALTER TABLE {0} ALTER n TYPE int",
    "BEGIN; LOCK TABLE {0}; SELECT count(*) FROM {0}; COMMIT",
    "CREATE INDEX ON {0} (n)",
    "VACUUM {0}",
)
_ASK = (
    "SELECT * FROM {0} ORDER BY id LIMIT 10",
    "SELECT count(*) FROM {0} WHERE id < 100",
    "UPDATE {0} SET v = 'w' WHERE id = 7",
    "DELETE FROM {0} WHERE id = 11",
)
# Sessions of pgcdc that wait for a lock on a relation while they hold a lock on a relation of the application. pgcdc's
# sessions are recognised by their application_name. Relations with an OID below 16384 are system catalogs.
_HELD_AND_WAITED_FOR = """
WITH l AS MATERIALIZED (SELECT pid, relation, mode, granted FROM pg_locks WHERE locktype = 'relation')
SELECT a.pid, a.application_name, a.query, held.relation, held.mode, wanted.relation, wanted.mode
FROM l AS wanted JOIN pg_stat_activity a USING (pid) JOIN l AS held ON held.pid = wanted.pid AND held.granted
WHERE NOT wanted.granted AND a.application_name LIKE 'pgcdc%' AND a.datname = current_database()
  AND held.relation >= 16384
"""


@dataclass
class Storm:
    """Sessions that alter tables, and sessions of an application that queries the tables. ``longest`` is the longest
    time of a query in seconds."""

    database: Database
    longest: float = 0
    queries: int = 0
    altered: int = 0
    held: list[Any] = field(default_factory=list)
    """Sessions of pgcdc that waited for a table lock while they held a lock on a table of the application."""
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def blowing(self) -> Iterator[None]:
        sessions: list[Callable[[], None]] = [self._alter, self._alter, self._ask, self._ask, self._ask, self._look]
        threads = [threading.Thread(target=session) for session in sessions]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _statements(self, templates: tuple[str, ...]) -> Iterator[tuple[psycopg.Connection, str]]:
        with self.database.connect(
            options=f"-c lock_timeout={GIVEN_UP_SECONDS}s", prepare_threshold=None
        ) as conn:  # fmt: skip
            chance = random.Random()
            while not self._over.is_set():
                yield conn, chance.choice(templates).format(chance.choice(TABLES))
                if not conn.autocommit or conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                    conn.execute("ROLLBACK")
                time.sleep(PAUSE_SECONDS)

    def _alter(self) -> None:
        for conn, text in self._statements(_ALTER):
            for statement in text.split("; "):
                with suppress(psycopg.Error):
                    conn.execute(statement.encode())
                    self.altered += 1

    def _ask(self) -> None:
        for conn, statement in self._statements(_ASK):
            started = time.monotonic()
            # Expected errors: the table was dropped or renamed, or the query was cancelled after a deadlock with DDL.
            with suppress(psycopg.errors.UndefinedTable, psycopg.errors.DeadlockDetected):
                with suppress(psycopg.errors.LockNotAvailable), _publication_dropped():
                    conn.execute(statement.encode())
                self.longest = max(self.longest, time.monotonic() - started)
            self.queries += 1

    def _look(self) -> None:
        """Adds a session to ``held`` if two queries in a row return it. The result of a single query may be wrong,
        because locks change while the server lists them."""
        before: list[Any] = []
        with self.database.connect() as conn:
            while not self._over.wait(_LOOK_SECONDS):
                now = conn.execute(_HELD_AND_WAITED_FOR).fetchall()
                self.held += [row for row in now if row in before]
                before = now


@contextmanager
def _publication_dropped() -> Iterator[None]:
    """Ignores an error that PostgreSQL raises even without pgcdc. A write to a table first lists the table's
    publications, then reads each publication. The write fails if a publication was dropped in between."""
    try:
        yield
    except psycopg.errors.InternalError_ as error:
        if not str(error).startswith("cache lookup failed for publication"):
            raise


def make_tables(conn: psycopg.Connection) -> None:
    for table in TABLES:
        for statement in (_CREATE, _FILL):
            conn.execute(statement.format(table).encode())


T = TableName("public", "t")


def scalar(conn: psycopg.Connection, query: str) -> object:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def copied(database: Database, snapshot: Snapshot, name: TableName, target: int = 1 << 30) -> list[bytes]:
    """All rows of a published table, as CSV lines."""
    return [line for piece in cut(snapshot, name, target) for block in read(database, snapshot, piece)
            for line in block.splitlines()]  # fmt: skip


def cut(snapshot: Snapshot, name: TableName = T, target: int = 1 << 30) -> list[Piece]:
    with snapshot.reading() as conn:
        (table,) = [t for t in read_tables(conn, ["p"]) if t.name == name]
        return pieces(conn, table, target)


def read(database: Database, snapshot: Snapshot, piece: Piece) -> list[bytes]:
    return read_whole(lambda: list(copy_blocks(database.conninfo, snapshot.name, piece, 1 << 16)))


def publish(conn: psycopg.Connection, columns: str = "i int PRIMARY KEY, x text") -> None:
    conn.execute(f"CREATE TABLE t ({columns}); CREATE PUBLICATION p FOR TABLE t".encode())
