"""Lets sessions of the source that wait for a table which one of our copies is reading have it at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.source.connect.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.snapshot.reading import READING

LOOK_SECONDS = 0.2
"""Seconds between two looks for waiters. An application that queues behind such a waiter loses that time."""
_CONNECT_SECONDS = 3

# ACCESS SHARE conflicts with ACCESS EXCLUSIVE alone. We do not use pg_blocking_pids: it stops the lock manager for a
# moment, and does not know a standby's replay. Those who were asked before are terminated.
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
    """While the block lasts, whoever waits for a table that one of our copies is reading gets it within half a
    second."""
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(conninfo, ended), name="waiters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_CONNECT_SECONDS)


def _watch(conninfo: str, ended: threading.Event) -> None:
    """Goes on when its connection is lost: noticing a lost source is left to the holder of the snapshot."""
    while not ended.wait(LOOK_SECONDS):
        with suppress(PgcdcError, psycopg.Error), _connected(conninfo) as conn:
            asked: set[int] = set()
            while not ended.wait(LOOK_SECONDS):
                asked = interrupt(conn, asked)


def _connected(conninfo: str) -> SourceConnection:
    return connect(conninfo, application_name=f"{APPLICATION}/watch", connect_timeout=_CONNECT_SECONDS)


def interrupt(conn: SourceConnection, asked: set[int]) -> set[int]:
    """Cancel our copies that somebody waits for; returns their pids.

    Those that were ``asked`` before are terminated: a backend that waits for us to read its rows reacts to nothing
    else.
    """
    return {pid for pid, _ in conn.execute(_INTERRUPT, {"asked": sorted(asked), "reading": READING})}
