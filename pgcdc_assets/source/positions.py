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

_END: Final = f"""
SELECT {INSERT_LSN}::text, current_setting('wal_block_size')::int,
       (SELECT setting::int8 FROM pg_catalog.pg_settings WHERE name = 'wal_segment_size')
"""  # noqa: S608  (put together of our own constants)
_SHORT_HEADER: Final = 24
_LONG_HEADER: Final = 40
"""Bytes in front of the first record of a page, and of a segment file's first page (xlog_internal.h)."""
_FLUSHED: Final = f"SELECT {FLUSH_LSN}::text"


def wal_writer_delay(conn: psycopg.Connection[Any]) -> float:
    """Seconds."""
    row = conn.execute("SELECT setting::float8 / 1000 FROM pg_settings WHERE name = 'wal_writer_delay'").fetchone()
    assert row is not None
    return float(row[0])


def record_end(conn: psycopg.Connection[Any]) -> Lsn:
    """The end of the source's last record: the insert position, or what lies in front of a page's header there.

    Unlike the insert position it is where a flush position can stand.
    """
    row = conn.execute(_END).fetchone()
    assert row is not None
    lsn, page, segment = Lsn.parse(row[0]), row[1], row[2]
    if lsn % segment == _LONG_HEADER:
        return Lsn(lsn - _LONG_HEADER)
    return Lsn(lsn - _SHORT_HEADER) if lsn % page == _SHORT_HEADER else lsn


def flush_lsn(conn: psycopg.Connection[Any]) -> Lsn:
    """The source's flush position now: all that is durable there ends at or before it."""
    row = conn.execute(_FLUSHED).fetchone()
    assert row is not None
    return Lsn.parse(row[0])
