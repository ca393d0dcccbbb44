"""Waits until the mirrors contain everything that was committed below an LSN."""

from __future__ import annotations

import time
from functools import cached_property

from pgcdc_assets.core.catalog import relations_of
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import NotReached, SetupNeeded
from pgcdc_assets.log.announcements import complete_to
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store import storage


def wait_for_point(layout: Layout, points: ConsistentPoints, lsn: Lsn, timeout: float) -> Point:
    """Waits until the mirrors contain every transaction that ends at or below ``lsn``, and returns the newest
    consistent point. Raises NotReached after ``timeout`` seconds. Each check costs about seven small reads. The pause
    between two checks depends on the store."""
    arrival, deadline = _Arrival(layout), time.monotonic() + timeout
    while True:
        point = points.newest()
        if point is not None and (point.replay_lsn >= lsn or arrival.contains(point, lsn)):
            return point
        left = deadline - time.monotonic()
        if left <= 0:
            newest = (
                "it has no consistent point"
                if point is None
                else f"its newest consistent point is at {point.replay_lsn}"
            )
            raise NotReached(
                f"did not reach {lsn} within {timeout:g} s: {newest}", thing=f"lake {layout.root}",
                do="see `pgcdc status`; changes arrive only while `pgcdc follow`, `pgcdc up` or `pgcdc sync` runs",
            )  # fmt: skip
        time.sleep(min(left, storage.pace(layout.root)))


class _Arrival:
    """Decides whether the mirrors already contain everything up to an LSN, although the newest consistent point is
    below it. This is possible, because no point is published for WAL that changes no mirror."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._log = ChangeLog(layout)
        self._states = TableStates(layout)

    def contains(self, point: Point, lsn: Lsn) -> bool:
        """Whether the log is complete to ``lsn``, and has no change above the point for a table that the point
        lists."""
        try:
            position = Lsn(self._log.version().positions.get(self._position_id, 0))
        except SetupNeeded:
            return False
        if complete_to(self._layout, position) < lsn:
            return False
        batches = self._log.batches(point.replay_lsn)
        if point.messages is not None and any("M" in batch.others for batch in batches):
            return False
        changed = {relation for batch in batches for relation, kinds in batch.rows.items() if kinds}
        return not changed or changed <= self._unlisted(point)

    @cached_property
    def _position_id(self) -> str:
        return self._log.identity.app_id()

    def _unlisted(self, point: Point) -> set[int]:
        """The OIDs of the relations of known tables that the point does not list. Changes of these relations need not
        be in the point. An unknown relation is not included, because it may be a new partition of a listed table. A
        renamed table may also have a recorded state under its former name, which the point does not list. So the OIDs
        of listed tables are removed from the result."""
        tables = [
            (name in point.tables, row.table) for name, row in self._states.all().items() if row.table is not None
        ]
        listed, unlisted = ([table for here, table in tables if here is wanted] for wanted in (True, False))
        return relations_of(unlisted) - relations_of(listed)
