"""Finds which followed tables the newest consistent point lists, and which tables the next point may list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.structure import listing
from pgcdc_assets.structure.record import TableRecord


class ListedTables:
    """Compares the tables' records with the newest point. ``records``: the present records of all known tables."""

    def __init__(self, points: ConsistentPoints, records: Mapping[TableName, TableRecord]) -> None:
        self._points = points
        self._records = records

    @property
    def unlisted(self) -> bool:
        """Whether the newest point lacks a followed table, or is below the ``replay_lsn`` of such a table. This happens
        if an operation ended before it wrote a point."""
        newest, followed = self._points.newest(), [record for record in self._records.values() if record.followed]
        if newest is None:
            return bool(followed)
        return any(
            record.replay_lsn > newest.replay_lsn or record.table.name not in newest.tables for record in followed
        )

    @property
    def shown_from(self) -> Lsn:
        """From this LSN on, the source has the mirrors' present structures. ZERO if the newest point is not below this
        LSN."""
        newest, since = self._points.newest(), listing.structures_from(self._records.values())
        return ZERO if newest is not None and newest.replay_lsn >= since else since

    def late(self) -> list[TableRecord]:
        """The tables that are late compared with the newest point: see :func:`listing.late`."""
        newest = self._points.newest()
        return [] if newest is None else listing.late(self._records.values(), newest.replay_lsn)

    def versions_at(self, lsn: Lsn) -> dict[TableName, int]:
        """The versions of the mirrors that a point at ``lsn`` would list."""
        return listing.versions_at(self._records.values(), lsn)

    def kept_at(self, lsn: Lsn) -> Point | None:
        """The newest point's entries that a new point at ``lsn`` must repeat: the entries of tables whose structure or
        name has changed since, that are no longer known, or whose names other tables have now. None if there are no
        such entries, or if the newest point is at another LSN."""
        newest = self._points.newest()
        if newest is None or newest.replay_lsn != lsn:
            return None
        names = newest.tables.keys() - self._records.keys()
        names |= listing.left_out(self._records.values(), newest.tables, lsn)
        return replace(
            newest,
            tables={name: newest.tables[name] for name in names},
            positions={name: newest.positions[name] for name in names & newest.positions.keys()},
            changed={name: newest.changed[name] for name in names & newest.changed.keys()},
        ) if names else None  # fmt: skip
