"""From which position on a table has the name that its mirror has.

A table that was renamed and renamed back has the rows of every LSN between, but not the name: no point of that time
may list it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName


class Naming:
    """``away``: followed tables that may have been away under another name where the log stands now."""

    def __init__(self, away: Iterable[TableName]) -> None:
        self._away = set(away)
        self._since: dict[TableName, Lsn] = {}

    @property
    def asks(self) -> bool:
        """Whether :meth:`seen` has to be told where the source stands."""
        return bool(self._away)

    def seen(self, position: Lsn) -> None:
        """The catalog showed all followed tables' names before the source came to ``position``."""
        self._since |= dict.fromkeys(self._away, position)
        self._away.clear()

    def found(self, name: TableName) -> None:
        """The table is published again, or for the first time."""
        self._away.add(name)

    def copied(self, name: TableName) -> None:
        """Its snapshot showed it under its name."""
        self._away.discard(name)
        self._since.pop(name, None)

    def holds(self, name: TableName, lsn: Lsn) -> bool:
        """Whether the table is known to have had its name at ``lsn``."""
        return name not in self._away and self._since.get(name, ZERO) <= lsn
