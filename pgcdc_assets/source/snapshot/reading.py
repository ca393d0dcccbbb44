"""Reads one piece of a table under a snapshot, while other sessions use the table.

A copy must not delay other sessions. So our session requests the table's lock with NOWAIT, again and again, while it
holds no other lock. It releases the lock as soon as the piece was read. If another session waits for the table during
the reading, the process that holds the snapshot interrupts the reading (:func:`giving_way`). The piece is then read
again.

So between two readings, no lock keeps the table as the snapshot shows it. After a TRUNCATE or a rewrite, a reading
would return no rows, without an error. If two columns have swapped names, each column would get the values of the other
column. All these changes leave a new relfilenode or a new row of pg_attribute. So both are compared before and after
the piece is read.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psycopg
from psycopg import OperationalError, pq, sql

from pgcdc_assets.errors import CopyBlocked, CopyOutdated, PgcdcError, SourceUnavailable
from pgcdc_assets.source.connect.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.connect.failures import ServerError, first_line, of_exception, result_error
from pgcdc_assets.source.slot.blockers import lockers
from pgcdc_assets.source.snapshot.pieces import Piece

READING: Final = f"{APPLICATION}/copy"
"""application_name of the sessions that read pieces. :func:`interrupt` cancels only sessions with this name."""
READINGS: Final = 6
"""The most times that one piece is read. A migration alters a table a few times. DDL that never ends must not delay a
run for ever."""
PATIENCE_SECONDS: Final = 10.0
"""The most seconds that one attempt waits until the table is free. One of Spark's cores is idle during this time."""
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Seconds to wait after the first, second, third ... refused request for the lock. The last pause is repeated."""
_POLL_MILLISECONDS: Final = 500
_LOCK_TIMEOUT: Final = "100ms"
"""lock_timeout for the indexes and the TOAST table, which COPY locks too. REINDEX may have locked them."""
INTERRUPTED: Final = {
    "57014",  # cancelled
    "57P01",  # terminated
    "55P03",  # COPY did not get a lock within lock_timeout
    "40001",  # a standby's replay takes precedence
    "40P01",  # a deadlock about a lock that COPY takes besides the table's lock
    "42P01", "3F000", "42703",  # the table was renamed or dropped; the next reading shows which of the two
}  # fmt: skip
_STORAGE: Final = """
SELECT format('%%I.%%I', n.nspname, c.relname), c.relfilenode,
       ARRAY(SELECT a.attnum::text || ':' || a.xmin::text FROM pg_catalog.pg_attribute a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = %s AND c.relkind = 'r'
"""
T = TypeVar("T")


class Interrupted(Exception):
    """Raised when a piece was not read to its end. The rows that were read must be discarded."""

    def __init__(self, why: PgcdcError) -> None:
        self.why = why
        super().__init__(str(why))


@dataclass(frozen=True)
class _Storage:
    """A relation as one snapshot shows it: its name as SQL, its file, and ``attnum:xmin`` of each column's row in
    pg_attribute."""

    name: str
    relfilenode: int
    columns: frozenset[str]

    def still_holds(self, then: _Storage) -> bool:
        """Whether a reading now still returns all columns and rows of ``then``. Columns added since do not matter."""
        return self.relfilenode == then.relfilenode and then.columns <= self.columns


def read_whole(read: Callable[[], T]) -> T:
    """Returns the result of ``read``, which reads pieces. Calls it again after an interruption, at most READINGS times
    in all. Raises CopyBlocked if the last reading was interrupted too."""
    for reading in range(1, READINGS + 1):
        try:
            return read()
        except Interrupted as interruption:
            if reading == READINGS:
                raise _given_up(interruption.why) from None
    raise AssertionError("unreachable")


def copy_blocks(conninfo: str, snapshot_name: str, piece: Piece, block_bytes: int) -> Iterator[bytes]:
    """Yields the piece's CSV under the snapshot, in the piece's encoding, in blocks of whole rows.

    Each block but the last has at least ``block_bytes``. Runs on any machine that reaches the source. Call it within
    :func:`read_whole`, because it raises Interrupted if another session wants the table. Raises CopyOutdated if the
    table is no longer as the snapshot shows it, CopyBlocked if it stays locked, and RightLacking if our role may not
    read it or row-level security would hide rows.
    """
    conn = connect(conninfo, application_name=READING, row_security=False, options={"lock_timeout": _LOCK_TIMEOUT})
    try:
        with _typed(piece):
            name, then = _begin(conn, snapshot_name, piece)
            last = yield from _blocks(conn, piece, name, block_bytes)
            conn.execute("COMMIT")
            now = _storage(conn, piece)
            if now is None or not now.still_holds(then):
                raise _outdated(piece)
            if now.name != name:
                raise Interrupted(_outdated(piece))
        if last:
            yield last
    finally:
        conn.close()


def _begin(conn: SourceConnection, snapshot_name: str, piece: Piece) -> tuple[str, _Storage]:
    """Begins the piece's transaction and locks the table. Returns the table's current name, and the table as the
    snapshot shows it."""
    started, tries = time.monotonic(), 0
    while True:
        now = _storage(conn, piece)
        import_snapshot(conn, snapshot_name)
        then = _storage(conn, piece)
        if now is None or then is None or not now.still_holds(then):
            raise _outdated(piece)
        try:
            # NOWAIT also fails while another session waits for a conflicting lock.
            conn.execute(f"LOCK TABLE ONLY {now.name} IN ACCESS SHARE MODE NOWAIT".encode())
            return now.name, then
        except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            conn.execute("ROLLBACK")
        if time.monotonic() - started > PATIENCE_SECONDS:
            who = ", ".join(str(one) for one in lockers(conn, [piece.oid])) or "a session that has just ended"
            raise CopyBlocked(f"cannot be read, because it is locked by {who}", thing=f"table {piece.relation}",
                              do="run the command again when that transaction has ended")  # fmt: skip
        time.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
        tries += 1


def import_snapshot(conn: SourceConnection, snapshot_name: str | None) -> None:
    """Begins a transaction under a snapshot. Raises SourceUnavailable if the session that exported it was lost."""
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(snapshot_name))
    except psycopg.Error as error:
        raise _SnapshotGone(f"the snapshot is gone: {of_exception(error).message}", thing=conn.endpoint) from None


class _SnapshotGone(SourceUnavailable):
    """The snapshot no longer exists, so reading the piece again cannot succeed."""


def _storage(conn: SourceConnection, piece: Piece) -> _Storage | None:
    """Returns the relation as the imported snapshot shows it, or as it is now if no snapshot was imported."""
    row = conn.execute(_STORAGE, [piece.oid]).fetchone()
    return None if row is None else _Storage(row[0], row[1], frozenset(row[2]))


def _outdated(piece: Piece) -> CopyOutdated:
    return CopyOutdated("was truncated, rewritten, altered or dropped since the snapshot",
                        thing=f"table {piece.relation}",
                        do="run the command again, which takes a new snapshot")  # fmt: skip


def _given_up(why: PgcdcError) -> PgcdcError:
    if isinstance(why, CopyOutdated):
        return why
    # The connection may have been lost because giving_way() terminated our session for a waiting session. So this is
    # CopyBlocked too. If the source is gone, the next connection reports this.
    return CopyBlocked(f"was not copied: {READINGS} attempts were interrupted, because a session waited to lock it",
                       thing=why.thing, do="run the command again when these sessions have finished")  # fmt: skip


@contextmanager
def _typed(piece: Piece) -> Iterator[None]:
    """Converts errors of the server and of the connection to Interrupted, or to errors that name the piece's table."""
    try:
        yield
    except psycopg.Error as error:
        raise _meaning(of_exception(error), piece) from None
    except _SnapshotGone:
        raise
    except SourceUnavailable as error:
        # giving_way() may have terminated our session. The next connection shows whether the source is gone.
        raise Interrupted(SourceUnavailable(error.what, thing=f"table {piece.relation}")) from None


def _meaning(error: ServerError, piece: Piece) -> Exception:
    typed = error.of_table(piece.relation)
    if error.state in INTERRUPTED or isinstance(typed, SourceUnavailable):
        return Interrupted(typed)
    return typed


def _blocks(conn: SourceConnection, piece: Piece, name: str, block_bytes: int) -> Generator[bytes, None, bytes]:
    """Yields all blocks but the last, and returns the last block. ``name``: the table's current name. Calls libpq
    directly, because psycopg's own loop needs two thirds more CPU. Each CopyData message is one row."""
    pgconn = conn.pgconn
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN)
    silence = conn.silence()

    def more() -> None:
        if poll.poll(_POLL_MILLISECONDS):
            silence.heard()
            pgconn.consume_input()
        else:
            silence.listened()

    try:
        pgconn.send_query(conn.encoding.encode(piece.statement(name)))
        while pgconn.is_busy():
            more()
        _expect(pgconn, pq.ExecStatus.COPY_OUT, piece)
        # Joining the rows' memoryviews at the end would take three times the CPU.
        block = bytearray()
        while (got := pgconn.get_copy_data(1))[0] >= 0:
            if got[0] == 0:
                more()
                continue
            if len(block) >= block_bytes:
                yield bytes(block)
                block.clear()
            block += got[1]
        _expect(pgconn, pq.ExecStatus.COMMAND_OK, piece)
        while pgconn.get_result() is not None:
            pass
        return bytes(block)
    except OperationalError as error:
        raise SourceUnavailable(first_line(str(error)), thing=conn.endpoint) from None


def _expect(pgconn: pq.abc.PGconn, status: pq.ExecStatus, piece: Piece) -> None:
    result: Any = pgconn.get_result()
    if result is None:
        raise SourceUnavailable("the server returned no result", thing="COPY")
    if result.status != status:
        raise _meaning(result_error(result, pgconn), piece)


# Sessions that wait for a table -----------------------------------------------------------------

_SEARCH_SECONDS = 0.2
"""Seconds between two searches for sessions that wait for a table. Applications that queue behind such a session wait
up to this time longer."""
_CONNECT_SECONDS = 3
# Our readings hold ACCESS SHARE, which conflicts only with ACCESS EXCLUSIVE. We do not call pg_blocking_pids, because
# it stops the lock manager for a moment and does not show a standby's replay process. Sessions in ``asked`` were
# cancelled before and still run, so they are terminated.
_INTERRUPT = """
SELECT a.pid, CASE WHEN a.pid = ANY(%(asked)s::int[]) THEN pg_catalog.pg_terminate_backend(a.pid)
                   ELSE pg_catalog.pg_cancel_backend(a.pid) END
FROM pg_catalog.pg_stat_activity a
WHERE a.application_name = %(reading)s AND a.datname = current_database() AND a.usename = session_user AND a.pid IN (
  SELECT held.pid FROM pg_catalog.pg_locks held
  JOIN pg_catalog.pg_locks wanted ON wanted.database = held.database AND wanted.relation = held.relation
  WHERE held.granted AND NOT wanted.granted AND wanted.mode = 'AccessExclusiveLock')
"""


@contextmanager
def giving_way(conninfo: str) -> Iterator[None]:
    """Interrupts our readings during the block, so that a session that waits for a table gets it within half a
    second."""
    ended = threading.Event()
    thread = threading.Thread(target=_interrupt_readings, args=(conninfo, ended), name="waiters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_CONNECT_SECONDS)


def _interrupt_readings(conninfo: str, ended: threading.Event) -> None:
    """Interrupts readings that other sessions wait for, until ``ended`` is set. Connects again if the connection is
    lost. If the source is gone, the connection that holds the snapshot reports this."""
    while not ended.wait(_SEARCH_SECONDS):
        with (
            suppress(PgcdcError, psycopg.Error),
            connect(conninfo, application_name=f"{APPLICATION}/watch", connect_timeout=_CONNECT_SECONDS) as conn,
        ):
            asked: set[int] = set()
            while not ended.wait(_SEARCH_SECONDS):
                asked = interrupt(conn, asked)


def interrupt(conn: SourceConnection, asked: set[int]) -> set[int]:
    """Cancels our readings that other sessions wait for, and returns their pids. ``asked``: the pids that the previous
    call returned. Readings among them are terminated, because a backend ignores a cancel request while it waits for us
    to read from its socket."""
    return {pid for pid, _ in conn.execute(_INTERRUPT, {"asked": sorted(asked), "reading": READING})}
