"""What of the followed tables the newest consistent point lists, and what the next one may.

A point may list a table only if the source certainly had it at the point's LSN: under its name, and in the structure of
its mirror.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.naming import Naming
from pgcdc_assets.flow.standing import TableProgress
from pgcdc_assets.mirror.target import Target
from pgcdc_assets.points.points import ConsistentPoints, Point


class ListedTables:
    """``entries``: all known tables, by name, as they stand at any time."""

    def __init__(
        self,
        points: ConsistentPoints,
        entries: Mapping[TableName, TableProgress],
        target: Target,
        unseen: Container[TableName],
    ) -> None:
        """``unseen``: tables of which nothing stored says since when the source has them under their names."""
        self._points = points
        self._entries = entries
        renamed = {name for name, entry in entries.items() if entry.former is not None or name in unseen}
        self.naming = Naming(self._left_behind(target) | renamed)

    @property
    def unlisted(self) -> bool:
        """Whether the newest point lacks a followed table, or is below its mirror: an operation ended after the copy or
        the apply, and before a point of it."""
        newest, followed = self._points.newest(), self._followed()
        if newest is None:
            return bool(followed)
        above = any(entry.replay_lsn > newest.replay_lsn for entry in followed.values())
        return above or not followed.keys() <= newest.tables.keys()

    @property
    def shown_from(self) -> Lsn:
        """The LSN from which on all followed tables have the structures of their mirrors, if no point has come so far;
        ZERO otherwise."""
        newest = self._points.newest()
        lineages = [entry.table.lineage for entry in self._followed().values()]
        highest = Lsn(max((lineage.since for lineage in lineages if lineage is not None), default=0))
        return ZERO if newest is not None and newest.replay_lsn >= highest else highest

    def late(self) -> list[TableProgress]:
        """Followed tables that are below the newest point although others are not: they were copied while the others
        went on."""
        followed, newest = self._followed().values(), self._points.newest()
        late = [entry for entry in followed if newest is not None and entry.replay_lsn < newest.replay_lsn]
        return late if len(late) < len(followed) else []

    def versions_at(self, lsn: Lsn) -> dict[TableName, int]:
        """The versions of the mirrors that a point at ``lsn`` would list."""
        return {name: entry.version for name, entry in self._followed().items()
                if entry.replay_lsn == lsn and self._shows(entry, lsn)}  # fmt: skip

    def kept_at(self, lsn: Lsn) -> Point | None:
        """The newest point, if it is of this LSN, with the tables alone that have another structure or name since, are
        not followed any more, or whose names others have by now: there they are as they were before."""
        newest = self._points.newest()
        if newest is None or newest.replay_lsn != lsn:
            return None
        left = newest.tables.keys() - self._entries.keys()
        changed = {name for name, entry in self._followed().items() if not self._shows(entry, lsn)}
        changed |= {name for name, entry in self._entries.items() if entry.former is not None}
        names = left | (changed & newest.tables.keys())
        return replace(
            newest,
            tables={name: newest.tables[name] for name in names},
            positions={name: newest.positions[name] for name in names & newest.positions.keys()},
            changed={name: newest.changed[name] for name in names & newest.changed.keys()},
        ) if names else None  # fmt: skip

    def _shows(self, entry: TableProgress, lsn: Lsn) -> bool:
        """Whether the source certainly had the table under its name, and in its structure, at ``lsn``."""
        return self.naming.holds(entry.table.name, lsn) and not entry.changes_after(lsn)

    def _followed(self) -> dict[TableName, TableProgress]:
        return {name: entry for name, entry in self._entries.items() if entry.state.readable}

    def _left_behind(self, target: Target) -> set[TableName]:
        """Followed tables that older points list and the newest does not: they were away under another name. A table
        that no point has listed since its copy was not away: its run ended early."""
        newest = self._points.newest()
        if newest is None:
            return set()
        return {name for name in self._followed().keys() - newest.tables.keys() if self._was_listed(name, target)}

    def _was_listed(self, name: TableName, target: Target) -> bool:
        """Whether a point has listed the table since its copy."""
        listing, held = self._points.listing(name), target.standing(name)
        return listing is not None and held is not None and listing.replay_lsn >= held.snapshot_lsn
