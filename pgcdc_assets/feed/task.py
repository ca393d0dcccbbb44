"""The work of one Spark task of the transform: reads segments of the log, and writes feed files.

A segment is read in slices of bounded size. Each slice is split into groups by relation shape and kind of change. Each
group is decoded column by column, converted to the table's types, and written to the file of its table. Spark's workers
import this module, so it does not import Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Bools, Ints
from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.events import Route, RowChanges, Unfollowable, changes, unchanged_lists
from pgcdc_assets.feed.file import FeedWriter
from pgcdc_assets.feed.schema import (
    COMMIT_LSN,
    COMMIT_TS,
    HASH,
    LEAF,
    OP,
    ORDINAL,
    ORIGIN,
    POSTIMAGE,
    PREIMAGE,
    RAW,
    ROW,
    TRUNCATE,
    UNCHANGED,
    XID,
    FeedEnd,
    FeedFile,
    feed_name,
    feed_schema,
)
from pgcdc_assets.log.segment import SegmentFile, read_slices
from pgcdc_assets.protocol.layouts import RowKind
from pgcdc_assets.protocol.text.strings import reread
from pgcdc_assets.protocol.text.typed import row_hash, typed

SLICE_BYTES = 8 << 20
"""How many bytes of payload are decoded at once. Their text, typed values and Parquet buffers take about ten times as
much memory."""

HELD_BYTES = 128 << 20
"""How many bytes of unwritten rows a task may have in memory for all its files together. This limit is needed because
the changes of a large transaction are divided among hundreds of files."""

_COLUMNS = ["kind", "commit_lsn", "tx_ordinal", "xid", "commit_ts", "origin", "relation_id", "schema_id", "payload"]
_KINDS = ("I", "U", "D", "T")


@dataclass(frozen=True)
class FeedTarget:
    """A table whose changes the task writes."""

    table: Table
    """The table, including columns that were added up to the end of the span."""
    folder: Location
    span: LsnRange
    """Only changes of transactions that commit in this span are written."""
    buckets: int = 1
    """Number of buckets into which the table's keys are divided."""


@dataclass(frozen=True)
class Derivation:
    """The input of one task: the segments to read, and the facts that are needed to decode their rows."""

    segments: tuple[SegmentFile, ...]
    targets: dict[TableName, FeedTarget]
    routes: dict[int, Route]
    """By schema_id: how rows with this shape become rows of a mirror."""
    unread: dict[int, dict[TableName, str]] = field(default_factory=dict)
    """By schema_id: the tables whose feeds must end at rows with this shape, each with the reason."""


@dataclass(frozen=True)
class Derived:
    """The result of one task, or of all tasks of a transform."""

    files: dict[TableName, list[FeedFile]] = field(default_factory=dict)
    ended: dict[TableName, FeedEnd] = field(default_factory=dict)
    """Tables whose changes could not be derived to the end of their span."""
    taken: Counter[TableName] = field(default_factory=Counter)
    """By table: the number of rows of the log whose changes are in the files."""


def derive(task: Derivation) -> Derived:
    """Runs one task. If Spark runs the task several times, only the files that its successful attempt returns are
    used."""
    work = _Work(task)
    try:
        for file in task.segments:
            for rows in _slices(file, set(task.routes) | set(task.unread)):
                work.take(rows)
        files = work.close()
        passed(FaultPoint.FEED_FILES_WRITTEN)
        return Derived(files, work.ended, work.taken)
    except BaseException:
        work.abandon()
        raise


def _slices(file: SegmentFile, schema_ids: set[int]) -> Iterator[pa.Table]:
    wanted = pa.array(sorted(schema_ids), pa.int64())
    for rows in read_slices(file, _COLUMNS, SLICE_BYTES):
        known = pc.and_(pc.is_in(rows["schema_id"], wanted), pc.is_in(rows["kind"], pa.array(_KINDS)))
        kept = rows.filter(known)
        if kept.num_rows:
            yield kept


class _Work:
    def __init__(self, task: Derivation) -> None:
        self._task = task
        self._writers: dict[tuple[TableName, int | None, bool], FeedWriter] = {}
        """Keys: table, bucket, and whether the file is for the new images of updates that changed the key."""
        self.ended: dict[TableName, FeedEnd] = {}
        self.taken: Counter[TableName] = Counter()

    def take(self, rows: pa.Table) -> None:
        for schema_id, kind, group in _groups(rows):
            for name, reason in self._task.unread.get(schema_id, {}).items():
                unread = self._within(name, group)
                if unread.num_rows:
                    self._end(name, pc.min(unread["commit_lsn"]).as_py(), reason, unread=True)
            route = self._task.routes.get(schema_id)
            kept = self._within(route.table.name, group) if route else group
            if route is not None and kept.num_rows:
                self._decode(kind, kept.combine_chunks(), route)

    def _within(self, name: TableName, group: pa.Table) -> pa.Table:
        span = self._task.targets[name].span
        if name in self.ended:
            # The table's feed ends below this LSN, so changes at or above it are not needed.
            span = LsnRange(span.start, max(span.start, min(span.end, self.ended[name].lsn)))
        bounds = pc.min_max(group["commit_lsn"]).as_py()
        if span.holds_commit(bounds["min"]) and span.holds_commit(bounds["max"]):
            return group
        at = group["commit_lsn"]
        return group.filter(pc.and_(pc.greater_equal(at, int(span.start)), pc.less(at, int(span.end))))

    def _decode(self, kind: str, group: pa.Table, route: Route) -> None:
        """Decodes a group and writes its changes. If the group cannot be decoded, divides it into halves, again and
        again, until the first bad row is found. The table's feed then ends before this row's transaction."""
        name = route.table.name
        with contained() as failed:
            found = list(_decoded(kind, group, route))
        if failed.reason is not None:
            if group.num_rows == 1:
                self._end(name, group["commit_lsn"][0].as_py(), failed.reason)
                return
            half = group.num_rows // 2
            for part in (group.slice(0, half), group.slice(half)):
                if (kept := self._within(name, part)).num_rows:
                    self._decode(kind, kept, route)
            return
        if self._ended(name, group, [change for change, _ in found]):
            # Decode again the rows below this end: a change that cannot be followed hides those of its whole group.
            if (kept := self._within(name, group)).num_rows:
                self._decode(kind, kept.combine_chunks(), route)
            return
        left = np.zeros(0, dtype=np.int64)
        for change, rows in found:
            if isinstance(change, RowChanges):
                if change.op == PREIMAGE:
                    left = change.rows
                self._write(change, rows, route, np.isin(change.rows, left))
                # Count an update that is stored as two rows only once, with its new image.
                self.taken[name] += len(change.rows) if change.half else 0

    def _ended(self, name: TableName, group: pa.Table, found: Iterable[RowChanges | Unfollowable]) -> bool:
        """Ends the table's feed before each change that cannot be followed. Returns whether there is one."""
        wrong = [change for change in found if isinstance(change, Unfollowable)]
        for change in wrong:
            self._end(name, group["commit_lsn"][change.row].as_py(), change.reason, unread=change.unread)
        return bool(wrong)

    def _write(self, change: RowChanges, rows: pa.Table, route: Route, moved: Bools) -> None:
        """``moved``: which rows belong to updates that changed the key."""
        with contained() as failed:
            self._write_to_files(change, rows, route, moved)
            self._write_fullest()
        if failed.reason is not None:
            self._abandon(route.table.name, failed.reason)

    def _abandon(self, name: TableName, failure: str) -> None:
        """Ends a table's feed at the start of the span, because its files cannot be written. The changes are still in
        the log."""
        for key in [key for key in self._writers if key[0] == name]:
            with suppress(OSError):
                self._writers.pop(key).abandon()
        self._end(name, self._task.targets[name].span.start, failure)

    def _write_fullest(self) -> None:
        """If more than HELD_BYTES are in memory, writes row groups of the files with the most bytes in memory, until
        half of HELD_BYTES is left."""
        fullest = sorted(self._writers.values(), key=lambda writer: -writer.held_bytes)
        over = sum(writer.held_bytes for writer in fullest) - HELD_BYTES
        for writer in fullest if over > 0 else ():
            over -= writer.held_bytes
            writer.flush()
            if over <= -HELD_BYTES // 2:
                break

    def _write_to_files(self, change: RowChanges, rows: pa.Table, route: Route, moved: Bools) -> None:
        if change.op == TRUNCATE:
            # A TRUNCATE affects all keys, so it belongs to no bucket.
            self._writer(route, None).write(rows)
            return
        # Key values are never NULL in the source, so a typed key value that is NULL did not fit its type.
        odd_keys = any(rows[feed_name(column.name)].null_count for column in route.table.key_columns if change.text)
        buckets = self._task.targets[route.table.name].buckets
        if buckets == 1:
            self._writer(route, None).write(rows, odd_keys=odd_keys)
            return
        bucket = _key_hash(change, route, rows).view(np.uint64) % np.uint64(buckets)
        arrives = moved & (change.op == POSTIMAGE and not route.table.multiset)
        place = 2 * bucket.astype(np.int64) + arrives
        for number in np.unique(place).tolist():
            part = rows.filter(pa.array(place == number))
            self._writer(route, number // 2, arrivals=bool(number % 2)).write(part, odd_keys=odd_keys)

    def _writer(self, route: Route, bucket: int | None, *, arrivals: bool = False) -> FeedWriter:
        target = self._task.targets[route.table.name]
        key = (route.table.name, bucket, arrivals)
        if key not in self._writers:
            self._writers[key] = FeedWriter(target.folder, bucket, target.buckets, arrivals=arrivals)
        return self._writers[key]

    def _end(self, name: TableName, lsn: int, reason: str, *, unread: bool = False) -> None:
        if name not in self.ended or lsn < self.ended[name].lsn:
            self.ended[name] = FeedEnd(Lsn(lsn), reason, unread)

    def close(self) -> dict[TableName, list[FeedFile]]:
        files: dict[TableName, list[FeedFile]] = {}
        for (name, _, _), writer in list(self._writers.items()):
            with contained() as failed:
                files.setdefault(name, []).append(writer.close())
            if failed.reason is not None:
                self._abandon(name, failed.reason)
        return {name: written for name, written in files.items() if any(key[0] == name for key in self._writers)}

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abandon()


def _decoded(kind: str, group: pa.Table, route: Route) -> Iterator[tuple[RowChanges | Unfollowable, pa.Table]]:
    if kind == "T":
        everything = RowChanges(TRUNCATE, np.arange(group.num_rows, dtype=np.int64), 1, {})
        yield everything, feed_rows(everything, group, route)
        return
    payload, lsns = (group[name].combine_chunks() for name in ("payload", "commit_lsn"))
    for found in changes(cast(RowKind, kind), payload, route, lsns):
        yield found, pa.table({}) if isinstance(found, Unfollowable) else feed_rows(found, group, route)


def _groups(rows: pa.Table) -> Iterator[tuple[int, str, pa.Table]]:
    kind = pc.index_in(rows["kind"], pa.array(_KINDS)).to_numpy()
    shapes, shape = np.unique(rows["schema_id"].to_numpy(), return_inverse=True)
    group = shape * len(_KINDS) + kind
    numbers = np.unique(group)
    for number in numbers:
        part = rows if len(numbers) == 1 else rows.take(pa.array(np.flatnonzero(group == number)))
        yield int(shapes[number // len(_KINDS)]), _KINDS[number % len(_KINDS)], part


def feed_rows(change: RowChanges, group: pa.Table, route: Route) -> pa.Table:
    """Converts changes to rows of the table's feed. ``group``: the log's rows from which the changes were decoded."""
    table, count = route.table, len(change.rows)
    at = pa.array(change.rows)
    head = {name: group[name].take(at) for name in ("commit_lsn", "tx_ordinal", "commit_ts", "xid", "origin")}
    head["origin"] = reread(head["origin"], Encoding.of(route.shape.encoding))
    ordinal = pc.add(pc.multiply(head["tx_ordinal"].cast(pa.int64()), 2), change.half)
    columns = [column for column in table.columns if column.attnum in change.text]
    texts = [change.text[column.attnum] for column in columns]
    done = typed(texts, columns, count)
    data: dict[str, Any] = {
        OP: pa.repeat(pa.scalar(change.op, pa.string()), count),
        COMMIT_LSN: head["commit_lsn"],
        ORDINAL: ordinal,
        COMMIT_TS: head["commit_ts"],
        XID: head["xid"],
        ORIGIN: head["origin"],
        UNCHANGED: unchanged_lists(change, [column.attnum for column in table.columns]),
        RAW: done.raw,
    }
    if table.partitioned:
        data[LEAF] = pa.repeat(pa.scalar(str(route.leaf) if route.leaf else None, pa.string()), count)
    if table.multiset and columns:
        data[ROW] = pc.binary_join_element_wise(head["commit_lsn"].cast(pa.string()), ordinal.cast(pa.string()), ".")
        data[HASH] = row_hash(texts, [column.name for column in columns], count)
    data |= {feed_name(column.name): array for column, array in zip(columns, done.values, strict=True)}
    schema = feed_schema(table)
    return pa.table({entry.name: data.get(entry.name, pa.nulls(count, entry.type)) for entry in schema}, schema=schema)


def _key_hash(change: RowChanges, route: Route, rows: pa.Table) -> Ints:
    """Computes a number for each row. Rows with the same key have the same number. If the table has no key (a
    multiset), equal rows have the same number."""
    if route.table.multiset:
        hashes: Ints = rows[HASH].to_numpy()
        return hashes
    key = route.table.key_columns
    texts = [_one_zero(change.text[column.attnum], rows[feed_name(column.name)].type) for column in key]
    numbers: Ints = row_hash(texts, [column.name for column in key], rows.num_rows).to_numpy()
    return numbers


def _one_zero(texts: pa.ChunkedArray, typed_as: pa.DataType) -> pa.ChunkedArray:
    """Replaces the text -0 by 0, alone or in an array, if ``typed_as`` is a floating point type or a list of one. The
    server and the merge find both equal."""
    while pa.types.is_list(typed_as):
        typed_as = typed_as.value_type
    return pc.replace_substring_regex(texts, r"-0([,}]|$)", r"0\1") if pa.types.is_floating(typed_as) else texts
