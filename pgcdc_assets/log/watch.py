"""The source's own positions, asked by SQL beside the stream."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import psycopg

from pgcdc_assets.core.lsn import Lsn

_POSITIONS = """
SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END::text,
       CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END::text
"""


class SourceClock:
    """Where the source's WAL stands. A standby replays only what is flushed: both positions are one there."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn

    @cached_property
    def wal_writer_delay(self) -> float:
        """Seconds."""
        row = self._conn.execute(
            "SELECT setting::float8 / 1000 FROM pg_settings WHERE name = 'wal_writer_delay'"
        ).fetchone()
        assert row is not None
        return float(row[0])

    def positions(self) -> tuple[Lsn, Lsn]:
        """Insert and flush position now."""
        row = self._conn.execute(_POSITIONS).fetchone()
        assert row is not None
        return Lsn.parse(row[0]), Lsn.parse(row[1])
