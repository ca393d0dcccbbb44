"""Interrupts our readings of tables that other sessions of the source wait for, so that these sessions can go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.source.connect.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.snapshot.reading import READING

LOOK_SECONDS = 0.2
"""Seconds between two searches for waiting sessions. Applications that queue behind such a session lose that time."""
_CONNECT_SECONDS = 3

# ACCESS SHARE conflicts only with ACCESS EXCLUSIVE. We do not use pg_blocking_pids: it stops the lock manager for a
# moment, and it does not show the replay process of a standby. Sessions in ``asked`` are terminated, because a cancel
# request has not ended them.
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
    """During the block, a session that waits for a table that we are reading gets the table within half a second."""
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(conninfo, ended), name="waiters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_CONNECT_SECONDS)


def _watch(conninfo: str, ended: threading.Event) -> None:
    """Connects again when its connection is lost. The holder of the snapshot notices when the source is gone."""
    while not ended.wait(LOOK_SECONDS):
        with suppress(PgcdcError, psycopg.Error), _connected(conninfo) as conn:
            asked: set[int] = set()
            while not ended.wait(LOOK_SECONDS):
                asked = interrupt(conn, asked)


def _connected(conninfo: str) -> SourceConnection:
    return connect(conninfo, application_name=f"{APPLICATION}/watch", connect_timeout=_CONNECT_SECONDS)


def interrupt(conn: SourceConnection, asked: set[int]) -> set[int]:
    """Cancels our readings that other sessions wait for, and returns their pids.

    Readings in ``asked``, which were cancelled before, are terminated. A backend that waits until we read its rows does
    not react to a cancel request.
    """
    return {pid for pid, _ in conn.execute(_INTERRUPT, {"asked": sorted(asked), "reading": READING})}
