"""Sessions of the source that wait for a table that a copy of ours is reading: they get it at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.source.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.copies import READING

LOOK_SECONDS = 0.2
"""How often it is looked who waits. A fifth of a second is what an application behind the waiting one loses by it."""
_CONNECT_SECONDS = 3

# Those who wait for our snapshot, as CREATE INDEX CONCURRENTLY does, wait for a virtual transaction, not a relation.
_IN_THE_WAY = """
SELECT a.pid FROM pg_catalog.pg_stat_activity a
WHERE a.application_name = %s AND a.datname = current_database() AND a.usename = current_user AND a.pid IN (
  SELECT unnest(pg_catalog.pg_blocking_pids(w.pid))
  FROM (SELECT DISTINCT l.pid FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database
        WHERE NOT l.granted AND l.locktype = 'relation' AND d.datname = current_database()) w)
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
    found = {pid for (pid,) in conn.execute(_IN_THE_WAY, [READING])}
    for pid in found:
        end = "pg_terminate_backend" if pid in asked else "pg_cancel_backend"
        conn.execute(f"SELECT pg_catalog.{end}(%s)".encode(), [pid])
    return found
