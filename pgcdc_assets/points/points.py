"""Consistent points: an LSN, and the Delta version that each mirror has at that LSN. Each turn adds one row.

A table without changes gets no new version, and is complete up to the newest point that lists it. A version with the
right number is not always the published version, for example if the folder was restored from a backup. So a point also
has the LSN that the version itself records. Readers refuse a version that records a different LSN.
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
    """One consistent point. ``tables``: the Delta version that each mirror has at ``replay_lsn``. ``positions``: the
    LSN that this version records, which is the LSN of the mirror's last change. ``changed``: mirrors with rows that
    another writer changed, with a description of the change. These mirrors have all changes up to ``replay_lsn``, but
    some of their rows differ from the source."""

    replay_lsn: Lsn
    at: datetime
    tables: Mapping[TableName, int]
    positions: Mapping[TableName, Lsn]
    changed: Mapping[TableName, str] = field(default_factory=dict)
    messages: Lsn | None = None
    """The LSN that the feed of logical messages records. None if the feed was not complete up to ``replay_lsn``."""


@dataclass(frozen=True)
class Listing:
    """A table's entry in the newest point that lists it. ``position`` is the LSN that the version records.
    ``changed``: how another writer has changed rows of the mirror; None if no row was changed."""

    replay_lsn: Lsn
    version: int
    position: Lsn
    changed: str | None = None


class ConsistentPoints:
    """The ledger of consistent points. Every call reads the ledger, and so finds points that other processes have
    published."""

    def __init__(self, layout: Layout, merging: Merging | None = None) -> None:
        self._ledger = Ledger(layout.consistent_points, SCHEMA, merging)
        self._listed: dict[str, Listing] = {}
        self._listed_at = -1
        self._unread: Iterator[pa.Table] = iter(())

    def publish(
        self, lsn: Lsn, versions: Mapping[TableName, int], positions: Mapping[TableName, Lsn],
        changed: Mapping[TableName, str] | None = None, messages: Lsn | None = None,
    ) -> None:  # fmt: skip
        """Adds a point, which is durable when this returns. Raises LakeError if ``lsn`` is below the newest point. The
        Delta commits of ``versions`` must already be durable. ``positions`` are the LSNs that these versions record."""
        newest = self.newest()
        if newest is not None and lsn < newest.replay_lsn:
            what = f"cannot be published below the newest point, which is at {newest.replay_lsn}"
            raise LakeError(what, thing="consistent point", lsn=lsn)
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
        """Returns the newest point at or below ``lsn``."""
        for file in self._ledger.files():
            if file.lowest("replay_lsn") > lsn:
                continue
            rows = file.rows()
            below = [place for place, found in enumerate(rows["replay_lsn"].to_pylist()) if found <= lsn]
            if below:
                return _points(rows.slice(below[-1], 1))[0]
        return None

    def above(self, lsn: Lsn) -> Point | None:
        """Returns the oldest point above ``lsn``."""
        found = None
        for file in self._ledger.files():
            rows = file.rows()
            above = [place for place, at in enumerate(rows["replay_lsn"].to_pylist()) if at > lsn]
            if above:
                found = _points(rows.slice(above[0], 1))[0]
            if file.lowest("replay_lsn") <= lsn:
                break
        return found

    def published_by(self, time: datetime) -> Point | None:
        """Returns the newest point that was published at or before ``time``."""
        wanted = _microseconds(time)
        for file in self._ledger.files():
            rows = file.rows()
            before = np.flatnonzero(whole(rows[AT.name]).cast(pa.int64()).to_numpy() <= wanted)
            if len(before):
                return _points(rows.slice(int(before[-1]), 1))[0]
        return None

    def has(self, lsn: Lsn) -> bool:
        """Whether there is a point at exactly ``lsn``."""
        found = self.at(lsn)
        return found is not None and found.replay_lsn == lsn

    def all(self) -> list[Point]:
        """Returns all points, oldest first. There may be many."""
        return _points(self._ledger.rows())

    def oldest(self) -> Lsn | None:
        """Returns the LSN of the oldest point. It is the lowest LSN that ``Lake.at`` can read."""
        files = self._ledger.files()
        return Lsn(files[-1].rows("replay_lsn")["replay_lsn"][0].as_py()) if files else None

    def listing(self, table: TableName) -> Listing | None:
        """Returns a table's entry in the newest point that lists the table; None if there is no such point. If the
        table was copied again, the caller sees by the entry's version whether the point lists the present copy or an
        older copy."""
        version = self._ledger.version()
        if version != self._listed_at:
            self._listed, self._listed_at = {}, version
            self._unread = self._ledger.newest_first()
        # The newest file usually lists all followed tables. All files are read only for a table that no point lists.
        while str(table) not in self._listed:
            rows = next(self._unread, None)
            if rows is None:
                return None
            self._listed = _listings(rows) | self._listed
        return self._listed[str(table)]

    def prune(self, oldest: datetime, needed: Iterable[TableName], now: datetime, in_use: Lsn | None = None) -> int:
        """Removes the points older than ``oldest``, and some of the newer points
        (:func:`pgcdc_assets.core.retention.sparse`). Returns the number of removed points. After this, maintenance may
        delete versions that only removed points list.

        Keeps the newest point of all. Also keeps, for each ``needed`` table, the newest point that lists the table:
        a followed table is complete up to that point. ``in_use``: also keeps the points at this LSN.
        """
        return self._ledger.keep(_Pruning(oldest, {str(name) for name in needed}, now, in_use).staying)

    def versions(self, tables: Iterable[TableName]) -> dict[TableName, frozenset[int]]:
        """Returns the versions of these tables that a point lists. Maintenance must keep them, because readers may read
        them."""
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
    """Decides which points stay, file by file, from the newest file to the oldest."""

    oldest: datetime
    wanted: set[str]
    """Tables whose newest listing has not been found yet."""
    now: datetime
    in_use: Lsn | None
    """The LSN of points that stay; None if there are none."""
    _newer: int | None = None
    """The time of the oldest point in the file of the previous call, which is the next newer file. None before the
    first call."""

    def staying(self, file: LedgerFile) -> pa.BooleanArray:
        times = file.rows(AT.name)[AT.name].combine_chunks().cast(pa.int64()).to_numpy()
        stays = (times >= _microseconds(self.oldest)) & sparse(times, self._newer, _microseconds(self.now))
        stays[-1] |= self._newer is None
        if self.in_use is not None:
            stays |= file.rows("replay_lsn")["replay_lsn"].to_numpy() == int(self.in_use)
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
    last = _last_mentions(rows)
    columns = (last["name"], last["version"], last["row"], rows["replay_lsn"].take(last["row"]))
    own, changed = ([dict(one) for one in rows[column].to_pylist()] for column in ("positions", "changed"))
    return {
        name: Listing(Lsn(lsn), version, Lsn(own[row][name]), changed[row].get(name))
        for name, version, row, lsn in zip(*(column.to_pylist() for column in columns), strict=True)
    }


def _last_mentions(rows: pa.Table) -> pa.Table:
    """Returns each table's last row of :func:`_mentions`. ``group_by`` would import pandas (see ``entries``)."""
    mentions = _mentions(rows)
    names = whole(mentions["name"]).dictionary_encode()
    codes = in_numpy(names.indices)
    last = np.zeros(len(names.dictionary), dtype=np.int64)
    last[codes] = np.arange(len(codes))
    return mentions.take(in_arrow(last))


def _mentions(rows: pa.Table) -> pa.Table:
    """Returns one row per table of each point: ``name``, ``version``, and the number of the point's row."""
    column = rows["tables"].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    lists = column.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.int64())])))
    parents, entries = pc.list_parent_indices(lists), lists.flatten()
    return pa.table({"name": entries.field("key"), "version": entries.field("value"), "row": parents})
