"""Chooses a point. ``Lake("lake").at().arrow("orders")`` needs neither Spark nor the source."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from os import PathLike
from typing import Any

import pyarrow as pa

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError, UsageError
from pgcdc_assets.lake.arrival import wait_for_point
from pgcdc_assets.lake.netchange import net_change
from pgcdc_assets.lake.point import LakeAt
from pgcdc_assets.lake.undo import commit_of, undo_range, undo_transaction
from pgcdc_assets.points.points import ConsistentPoints, Point

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
        return LakeAt(self._layout, wait_for_point(self._layout, self._points, Lsn.of(lsn), timeout))

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
