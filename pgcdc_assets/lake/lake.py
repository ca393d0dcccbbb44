"""Chooses a point. ``Lake("lake").at().arrow("orders")`` needs neither Spark nor the source."""

from __future__ import annotations

from datetime import datetime
from os import PathLike

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.point import LakeAt
from pgcdc_assets.points.points import ConsistentPoints, Point


class Lake:
    """A lake, given its root folder. Nothing is kept open: every call reads what is published at that time."""

    def __init__(self, root: str | PathLike[str] | Location) -> None:
        self._layout = Layout.of(root)
        self._points = ConsistentPoints(self._layout)

    @property
    def tables(self) -> list[TableName]:
        """The tables of the newest consistent point, in name order; empty if there is no point yet."""
        newest = self._points.newest()
        return sorted(newest.tables.keys() - newest.changed.keys()) if newest else []

    def at(self, lsn: Lsn | str | int | datetime | None = None) -> LakeAt:
        """The lake at the newest point at or below ``lsn`` (``X/Y`` or an integer), or at the newest point that was
        published at or before a time. Without ``lsn``: at the newest point. LakeError if there is no such point;
        ValueError for a text that is not an LSN, and for a time without a zone."""
        point, where = self._point(lsn)
        if point is None:
            oldest = self._points.oldest()
            do = f"the oldest is {oldest}" if oldest is not None else "run `pgcdc sync` first"
            raise LakeError(f"has no consistent point{where}", thing=f"lake {self._layout.root}", do=do)
        return LakeAt(self._layout, point)

    def _point(self, wanted: Lsn | str | int | datetime | None) -> tuple[Point | None, str]:
        """The point, and how an error describes it."""
        if wanted is None:
            return self._points.newest(), ""
        if isinstance(wanted, datetime):
            if wanted.tzinfo is None:
                raise ValueError(f"{wanted} has no time zone; write it like datetime.now(UTC)")
            return self._points.published_by(wanted), f" published by {wanted}"
        lsn = Lsn.parse(wanted) if isinstance(wanted, str) else Lsn(wanted)
        return self._points.at(lsn), f" at or below {lsn}"
