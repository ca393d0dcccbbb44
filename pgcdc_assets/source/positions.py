"""Where the source's WAL stands, as SQL says it.

A standby replays only what is flushed: all positions are one there.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

from pgcdc_assets.core.lsn import Lsn

INSERT_LSN: Final = "(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END)"
"""SQL: the end of what has been written, flushed or not. May stand behind a page header that no record follows."""

FLUSH_LSN: Final = "(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)"
"""SQL: the end of what is durable. May stand inside a record."""

_FLUSHED: Final = f"SELECT {FLUSH_LSN}::text"


def flush_lsn(conn: psycopg.Connection[Any]) -> Lsn:
    """The source's flush position now: all that is durable there ends at or before it."""
    row = conn.execute(_FLUSHED).fetchone()
    assert row is not None
    return Lsn.parse(row[0])
