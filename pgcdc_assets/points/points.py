"""Consistent points: at which LSN which version of each mirror stands. One row a turn.

The newest point that lists a table also says how far a quiet table is known to be complete. A version's number says
little by itself: a point also holds the position that the mirror itself recorded at that version, and whoever reads the
version compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import in_arrow, in_numpy, whole
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.formats import EPOCH
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.retention import sparse
from pgcdc_assets.errors import LakeError
from pgcdc_assets.points.ledger import AT, Ledger, LedgerFile, Merging, entries

_BY_TABLE = pa.map_(pa.string(), pa.int64())
_TEXTS = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    [
        ("replay_lsn", pa.int64()),
        AT,
        ("tables", _BY_TABLE),
        ("positions", _BY_TABLE),
        ("changed", _TEXTS),
        ("messages", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Point:
    """``tables``: the Delta version that each mirror has at ``replay_lsn``; ``positions``: the LSN that this version
    itself records, of its last change. ``changed``: those of the tables whose rows another writer has changed, in
    words: they are brought to ``replay_lsn`` like the others, but are not what the source has."""

    replay_lsn: Lsn
    at: datetime
    tables: Mapping[TableName, int]
    positions: Mapping[TableName, Lsn]
    changed: Mapping[TableName, str] = field(default_factory=dict)
    messages: Lsn | None = None
    """The position that the feed of messages itself recorded, if it was complete to ``replay_lsn``; None otherwise, for
    example if no messages were asked for."""


@dataclass(frozen=True)
class Listing:
    """The newest mention of a table. ``position`` is the version's own."""

    replay_lsn: Lsn
    version: int
    position: Lsn


class ConsistentPoints:
    """Read afresh at every call, so that another process's points are seen."""

    def __init__(self, layout: Layout, merging: Merging | None = None) -> None:
        self._ledger = Ledger(layout.consistent_points, SCHEMA, merging)
        self._listed: dict[str, Listing] = {}
        self._listed_at = -1
        self._unread: Iterator[pa.Table] = iter(())

    def publish(
        self, lsn: Lsn, versions: Mapping[TableName, int], positions: Mapping[TableName, Lsn],
        changed: Mapping[TableName, str] | None = None, messages: Lsn | None = None,
    ) -> None:  # fmt: skip
        """Add a point; durable when this returns. Points never go down: LakeError for one below the newest.

        ``versions`` are durable; ``positions`` are those that these versions themselves record.
        """
        newest = self.newest()
        if newest is not None and lsn < newest.replay_lsn:
            raise LakeError(f"would fall from {newest.replay_lsn}", thing="consistent point", lsn=lsn)
        tables = {str(name): version for name, version in versions.items()}
        own = {str(name): int(position) for name, position in positions.items()}
        passed(FaultPoint.POINT_PUBLISHING)
        told = {str(name): what for name, what in (changed or {}).items() if name in versions}
        row = {"replay_lsn": int(lsn), "tables": tables, "positions": own, "changed": told, "messages": messages}
        self._ledger.append([row])
        passed(FaultPoint.POINT_PUBLISHED)

    def newest(self) -> Point | None:
        rows = next(self._ledger.newest_first(), None)
        return None if rows is None else _points(rows.slice(len(rows) - 1))[0]

    def at(self, lsn: Lsn) -> Point | None:
        """The newest point at or below ``lsn``."""
        for file in self._ledger.files():
            if file.lowest("replay_lsn") > lsn:
                continue
            rows = file.rows()
            below = [place for place, found in enumerate(rows["replay_lsn"].to_pylist()) if found <= lsn]
            if below:
                return _points(rows.slice(below[-1], 1))[0]
        return None

    def has(self, lsn: Lsn) -> bool:
        """Whether a point stands at exactly ``lsn``."""
        found = self.at(lsn)
        return found is not None and found.replay_lsn == lsn

    def all(self) -> list[Point]:
        """All points, which may be many, oldest first."""
        return _points(self._ledger.rows())

    def oldest(self) -> Lsn | None:
        """The LSN from which on ``Lake.at`` has a point."""
        files = self._ledger.files()
        return Lsn(files[-1].rows("replay_lsn")["replay_lsn"][0].as_py()) if files else None

    def listing(self, table: TableName) -> Listing | None:
        """What the newest point that lists the table says of it; None if none does.

        The version is part of that, because a point of an older copy of the table says nothing of this one.
        """
        version = self._ledger.version()
        if version != self._listed_at:
            self._listed, self._listed_at = {}, version
            self._unread = self._ledger.newest_first()
        # The newest file lists what is followed; only a table without any point is looked for in all of them.
        while str(table) not in self._listed:
            rows = next(self._unread, None)
            if rows is None:
                return None
            self._listed = _listings(rows) | self._listed
        return self._listed[str(table)]

    def prune(self, oldest: datetime, followed: Iterable[TableName], now: datetime) -> int:
        """Take back the promise of points older than ``oldest``, and thin out the others; returns how many went.

        The newest point stays, and the newest that lists each followed table: it says how far a quiet one is complete.
        """
        return self._ledger.keep(_Pruning(oldest, {str(name) for name in followed}, now).staying)

    def versions(self, tables: Iterable[TableName]) -> dict[TableName, frozenset[int]]:
        """The versions of each of these tables that some point names: readers are promised these."""
        asked = pa.array(sorted({str(name) for name in tables}), pa.string())
        named: dict[str, set[int]] = {}
        for file in self._ledger.files():
            found = _mentions(file.rows("tables"))
            found = found.filter(pc.is_in(found["name"], value_set=asked)).group_by(["name", "version"]).aggregate([])
            for name, version in zip(found["name"].to_pylist(), found["version"].to_pylist(), strict=True):
                named.setdefault(name, set()).add(version)
        return {TableName.parse(name): frozenset(versions) for name, versions in named.items()}


@dataclass
class _Pruning:
    """Goes through the points from the newest to the oldest, a file at a time."""

    oldest: datetime
    wanted: set[str]
    """Tables whose newest mention has not come yet."""
    now: datetime
    _newer: int | None = None
    """The time of the first point after those of the file."""

    def staying(self, file: LedgerFile) -> pa.BooleanArray:
        times = file.rows(AT.name)[AT.name].combine_chunks().cast(pa.int64()).to_numpy()
        stays = (times >= _microseconds(self.oldest)) & sparse(times, self._newer, _microseconds(self.now))
        stays[-1] |= self._newer is None
        self._newer = int(times[0])
        if self.wanted:
            last = _last_mentions(file.rows("tables"))
            said = last.filter(pc.is_in(last["name"], value_set=pa.array(sorted(self.wanted), pa.string())))
            stays[said["row"].to_numpy()] = True
            self.wanted -= set(said["name"].to_pylist())
        return pa.array(stays)


def _microseconds(of: datetime) -> int:
    return (of - EPOCH) // timedelta(microseconds=1)


def _points(rows: pa.Table) -> list[Point]:
    return [_point(row) for row in entries(rows)]


def _point(row: dict[str, Any]) -> Point:
    tables = {TableName.parse(name): version for name, version in row["tables"]}
    positions = {TableName.parse(name): Lsn(position) for name, position in row["positions"]}
    changed = {TableName.parse(name): what for name, what in row["changed"]}
    messages = None if row["messages"] is None else Lsn(row["messages"])
    return Point(Lsn(row["replay_lsn"]), row[AT.name], tables, positions, changed, messages)


def _listings(rows: pa.Table) -> dict[str, Listing]:
    """The listing of every table in the rows. Rows come in order, so the last mention is the newest."""
    last = _last_mentions(rows)
    columns = (last["name"], last["version"], last["row"], rows["replay_lsn"].take(last["row"]))
    own = [dict(one) for one in rows["positions"].to_pylist()]
    return {
        name: Listing(Lsn(lsn), version, Lsn(own[row][name]))
        for name, version, row, lsn in zip(*(column.to_pylist() for column in columns), strict=True)
    }


def _last_mentions(rows: pa.Table) -> pa.Table:
    """Of the mentions, each table's last. Done by hand, because ``group_by`` imports pandas (see ``entries``)."""
    mentions = _mentions(rows)
    names = whole(mentions["name"]).dictionary_encode()
    codes = in_numpy(names.indices)
    last = np.zeros(len(names.dictionary), dtype=np.int64)
    last[codes] = np.arange(len(codes))
    return mentions.take(in_arrow(last))


def _mentions(rows: pa.Table) -> pa.Table:
    """A row for each table of each point: ``name``, ``version``, and the number of the point's row."""
    column = rows["tables"].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    lists = column.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.int64())])))
    parents, entries = pc.list_parent_indices(lists), lists.flatten()
    return pa.table({"name": entries.field("key"), "version": entries.field("value"), "row": parents})
