"""Tracks from which position on each table has the name of its mirror.

The mirror of a table that was renamed and renamed back has the rows of every LSN in between, but the table had another
name then: no point from that time may list it. The same holds for one that was a partition for a while.
"""

from __future__ import annotations

from collections.abc import Iterable

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName


class Naming:
    """``away``: followed tables that may still have another name at the log's current position."""

    def __init__(self, away: Iterable[TableName]) -> None:
        self._away = set(away)
        self._since: dict[TableName, Lsn] = {}

    @property
    def asks(self) -> bool:
        """Whether :meth:`seen` has to be called with the source's position."""
        return bool(self._away)

    def seen(self, position: Lsn) -> None:
        """Note that the catalog showed all followed tables under their names before the source came to ``position``."""
        self._since |= dict.fromkeys(self._away, position)
        self._away.clear()

    def found(self, name: TableName) -> None:
        """Note that the table is published again, or for the first time, or may have been a partition until now."""
        self._away.add(name)

    def copied(self, name: TableName) -> None:
        """Note that the table was copied: the snapshot showed it under its name."""
        self._away.discard(name)
        self._since.pop(name, None)

    def holds(self, name: TableName, lsn: Lsn) -> bool:
        """Whether the table is known to have had its name at ``lsn``."""
        return name not in self._away and self._since.get(name, ZERO) <= lsn
