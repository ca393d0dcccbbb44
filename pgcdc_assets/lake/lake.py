"""Chooses a point, or waits for a point. ``Lake("lake").at().arrow("orders")`` needs neither Spark nor the source."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from os import PathLike
from typing import Any

import pyarrow as pa

from pgcdc_assets.core.catalog import relations_of
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError, NotReached, SetupNeeded, UsageError
from pgcdc_assets.lake.netchange import net_change
from pgcdc_assets.lake.point import LakeAt
from pgcdc_assets.lake.undo import commit_of, undo_range, undo_transaction
from pgcdc_assets.log.extent import complete_to
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store import storage

When = Lsn | str | int | datetime | LakeAt | None
"""A point, or an argument with which :meth:`Lake.at` chooses a point."""


class Lake:
    """A lake, given its root folder. Each call reads which points are published at that time."""

    def __init__(self, root: str | PathLike[str] | Location) -> None:
        self._layout = Layout.of(root)
        self._points = ConsistentPoints(self._layout)

    @property
    def tables(self) -> list[TableName]:
        """The tables of the newest consistent point, in name order; empty if there is no point yet."""
        newest = self._points.newest()
        return sorted(newest.tables.keys() - newest.changed.keys()) if newest else []

    def at(self, lsn: Lsn | str | int | datetime | None = None) -> LakeAt:
        """The lake at one point. ``lsn`` is an LSN (``X/Y`` or an integer): the newest point at or below it. Or it is a
        time: the newest point that was published at or before it. Without ``lsn``: the newest point.

        Raises LakeError if there is no such point, ValueError for a text that is not an LSN and for a time without a
        zone, and TypeError for any other argument."""
        point, where = self._point(lsn)
        if point is None:
            oldest = self._points.oldest()
            do = (
                f"the oldest point is at {oldest}; choose that point or a later point"
                if oldest is not None
                else "run `pgcdc sync` first"
            )
            raise LakeError(f"has no consistent point{where}", thing=f"lake {self._layout.root}", do=do)
        return LakeAt(self._layout, point)

    def wait(self, lsn: Lsn | str | int, timeout: float = 60.0) -> LakeAt:
        """Waits until the mirrors contain every transaction that ends at or below ``lsn``, and returns the newest
        point. Raises NotReached after ``timeout`` seconds.

        To read what your transaction committed, query ``pg_current_wal_insert_lsn()`` after its COMMIT, and pass the
        result as ``lsn``. If nothing between the point and ``lsn`` changes a table of the point, the point's own LSN is
        below ``lsn``.
        """
        wanted, arrival, deadline = Lsn.of(lsn), _Arrival(self._layout), time.monotonic() + timeout
        while True:
            # Each pass costs about seven small reads.
            point = self._points.newest()
            if point is not None and (point.replay_lsn >= wanted or arrival.contains(point, wanted)):
                return LakeAt(self._layout, point)
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._not_reached(wanted, timeout, point)
            time.sleep(min(left, storage.pace(self._layout.root)))

    def diff(self, table: TableName | str, a: When, b: When = None) -> pa.Table:
        """The rows of the table that differ between the points ``a`` and ``b`` (default: the newest point). ``a`` may
        be above ``b``.

        The result has a row for each key that differs: ``kind`` (``insert``, ``update`` or ``delete``), and the row's
        values ``before`` (at ``a``) and ``after`` (at ``b``). For a table without a key, it has a row for each row that
        was added or deleted. Raises LakeError if the table has other columns at ``a`` than at ``b``."""
        before, after = self._at(a).table_at(table), self._at(b).table_at(table)
        return net_change(before.mirror, after.mirror, after.table)

    def undo(
        self, table: TableName | str, a: When = None, b: When = None, *, key: Mapping[str, Any] | Any = None,
        commit_lsn: Lsn | str | int | None = None, xid: int | None = None,
    ) -> str:  # fmt: skip
        """SQL for the source that changes the table's rows from their state at ``b`` (default: the newest point) back
        to their state at ``a``. Empty if nothing differs.

        ``key``: revert only this row. ``commit_lsn`` or ``xid``, instead of ``a`` and ``b``: revert only the rows that
        this transaction changed. Only the lower 32 bits of a 64-bit xid are compared.

        The SQL is one statement, which reverts everything or nothing. It fails if a row has changed since ``b``. Raises
        LakeError if the change cannot be reverted exactly.
        """
        if commit_lsn is None and xid is None:
            if a is None:
                raise UsageError("undo needs one of the arguments `a`, `commit_lsn` or `xid`")
            return undo_range(self._at(a).table_at(table), self._at(b).table_at(table), key)
        if key is not None or a is not None or b is not None:
            raise UsageError(
                "undo takes a transaction (`commit_lsn` or `xid`), or points (`a`, `b`) and a `key`, not both"
            )
        at = self.at().table_at(table)
        lsn = commit_of(at, xid) if xid is not None else Lsn.of(commit_lsn or 0)
        later = self._points.above(lsn)
        if later is None:
            raise LakeError(
                "no consistent point contains the transaction to undo", thing=f"lake {self._layout.root}", lsn=lsn
            )
        return undo_transaction(self.at(lsn).table_at(table), LakeAt(self._layout, later).table_at(table), lsn)

    def _not_reached(self, lsn: Lsn, timeout: float, newest: Point | None) -> NotReached:
        has = "it has no consistent point"
        if newest is not None:
            has = f"its newest consistent point is at {newest.replay_lsn}"
        return NotReached(
            f"did not reach {lsn} within {timeout:g} s: {has}", thing=f"lake {self._layout.root}",
            do="see `pgcdc status`; changes arrive only while `pgcdc follow`, `pgcdc up` or `pgcdc sync` runs",
        )  # fmt: skip

    def _at(self, when: When) -> LakeAt:
        return when if isinstance(when, LakeAt) else self.at(when)

    def _point(self, wanted: Lsn | str | int | datetime | None) -> tuple[Point | None, str]:
        """The point (None if there is none), and the words with which an error describes what was wanted."""
        if wanted is None:
            return self._points.newest(), ""
        if isinstance(wanted, datetime):
            if wanted.tzinfo is None:
                raise ValueError(f"the time {wanted} has no time zone; write it like datetime.now(UTC)")
            return self._points.published_by(wanted), f" that was published at or before {wanted}"
        lsn = Lsn.of(wanted)
        return self._points.at(lsn), f" at or below {lsn}"


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
