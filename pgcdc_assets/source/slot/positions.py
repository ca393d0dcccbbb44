"""Reads the source's current WAL positions by SQL. On a standby, each of them is the replay position, and the WAL up to
this position is always flushed."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import psycopg

from pgcdc_assets.core.lsn import Lsn

INSERT_LSN: Final = "(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END)"
"""SQL: the end of the written WAL, flushed or not. It may include a page header that no record follows."""
FLUSH_LSN: Final = "(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)"
"""SQL: the end of the durable WAL. It may lie inside a record, but only at the end of a page (:data:`WITHIN`)."""
WITHIN: Final = f"({FLUSH_LSN} < {INSERT_LSN} AND ({FLUSH_LSN} - '0/0') % current_setting('wal_block_size')::int8 = 0)"
"""SQL: whether the flush position may lie inside a record. A commit flushes WAL up to the end of a record. Without a
commit, the WAL writer flushes only whole pages (XLogBackgroundFlush), and a page may end inside a record."""
_SHORT_HEADER: Final = 24
_LONG_HEADER: Final = 40
"""Bytes of the header of a page, and of the header of a segment file's first page (xlog_internal.h)."""
RECORD_END: Final = f"""
SELECT (lsn - CASE WHEN (lsn - '0/0') % segment = {_LONG_HEADER} THEN {_LONG_HEADER}
                   WHEN (lsn - '0/0') % page = {_SHORT_HEADER} THEN {_SHORT_HEADER} ELSE 0 END)::text
FROM (SELECT {INSERT_LSN} AS lsn, current_setting('wal_block_size')::int AS page,
             (SELECT setting::int8 FROM pg_catalog.pg_settings WHERE name = 'wal_segment_size') AS segment) AS w
"""  # noqa: S608  (put together of our own constants)
"""SQL: a query for the end of the last record. The flush position always reaches this LSN at some time. It may never
reach the insert position, which can lie after a page header that no record follows."""


def flush_lsn(conn: psycopg.Connection[Any]) -> Lsn:
    """Returns the source's flush position, which is the end of the durable WAL."""
    return Lsn.parse(_row(conn, f"SELECT {FLUSH_LSN}::text")[0])


def boundary(conn: psycopg.Connection[Any]) -> Lsn:
    """Returns an LSN at which a range of the change log may end, because no record crosses it. This is the flush
    position or, if the flush position may lie inside a record, the end of the last written record."""
    return Lsn.parse(_row(conn, f"SELECT CASE WHEN {WITHIN} THEN ({RECORD_END}) ELSE {FLUSH_LSN}::text END")[0])


class SourceClock:
    """Reads the source's positions on an SQL connection, while the replication connection is busy with the stream."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn

    @cached_property
    def wal_writer_delay(self) -> float:
        """The setting wal_writer_delay in seconds."""
        query = "SELECT setting::float8 / 1000 FROM pg_settings WHERE name = 'wal_writer_delay'"
        return float(_row(self._conn, query)[0])

    def positions(self) -> tuple[Lsn, Lsn]:
        """Returns the current insert position and flush position."""
        inserted, flushed = _row(self._conn, f"SELECT {INSERT_LSN}::text, {FLUSH_LSN}::text")
        return Lsn.parse(inserted), Lsn.parse(flushed)


def _row(conn: psycopg.Connection[Any], query: str) -> tuple[Any, ...]:
    (row,) = conn.execute(query.encode())
    return tuple(row)
