"""Reads the source's positions by SQL, during the stream."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import psycopg

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.source.positions import FLUSH_LSN, INSERT_LSN, wal_writer_delay

_POSITIONS = f"SELECT {INSERT_LSN}::text, {FLUSH_LSN}::text"


class SourceClock:
    """Reads the source's positions. The connection is not the stream's connection."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn

    @cached_property
    def wal_writer_delay(self) -> float:
        """The setting wal_writer_delay in seconds."""
        return wal_writer_delay(self._conn)

    def positions(self) -> tuple[Lsn, Lsn]:
        """Returns the current insert position and flush position."""
        row = self._conn.execute(_POSITIONS).fetchone()
        assert row is not None
        return Lsn.parse(row[0]), Lsn.parse(row[1])
