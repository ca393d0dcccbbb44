"""Sessions of the source that wait for a table that a copy of ours is reading: they get it at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.source.connect.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.snapshot.reading import READING

LOOK_SECONDS = 0.2
"""Seconds between two looks for waiters. An application that waits behind the waiting session loses a fifth of a second
by it."""
_CONNECT_SECONDS = 3

# ACCESS SHARE is in the way of ACCESS EXCLUSIVE alone. Not by pg_blocking_pids, which stops the lock manager for a
# moment, and knows nothing of a standby's replay. Those who were asked before are terminated.
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
    """While the block lasts, whoever waits for a table that one of our copies reads gets it within half a second."""
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(conninfo, ended), name="waiters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_CONNECT_SECONDS)


def _watch(conninfo: str, ended: threading.Event) -> None:
    """Goes on whatever becomes of its connection: the holder of the snapshot is who notices a lost source."""
    while not ended.wait(LOOK_SECONDS):
        with suppress(PgcdcError, psycopg.Error), _connected(conninfo) as conn:
            asked: set[int] = set()
            while not ended.wait(LOOK_SECONDS):
                asked = interrupt(conn, asked)


def _connected(conninfo: str) -> SourceConnection:
    return connect(conninfo, application_name=f"{APPLICATION}/watch", connect_timeout=_CONNECT_SECONDS)


def interrupt(conn: SourceConnection, asked: set[int]) -> set[int]:
    """Cancel our copies that somebody waits for; their pids.

    Those who were ``asked`` before are terminated: a backend that waits for us to read its rows heeds nothing else.
    """
    return {pid for pid, _ in conn.execute(_INTERRUPT, {"asked": sorted(asked), "reading": READING})}
