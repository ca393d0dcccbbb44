"""One table at one point: its structure, its change feed up to the point, and the history of a row (every change of the
row that the feed still contains). The feed is read in order, and in batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import dataset
from pgcdc_assets.delta.log import Added, DeltaLog, DeltaVersion
from pgcdc_assets.errors import FeedGap, LakeError, UnknownTable, UsageError
from pgcdc_assets.feed.messages import read_messages
from pgcdc_assets.feed.schema import (
    COMMIT_LSN,
    COMMIT_TS,
    INSERT,
    OP,
    ORDINAL,
    ORIGIN,
    POSTIMAGE,
    RAW,
    TRUNCATE,
    UNCHANGED,
    XID,
    feed_columns,
    feed_name,
)  # fmt: skip
from pgcdc_assets.feed.table import bounds_of, derived_for
from pgcdc_assets.mirror.delta.mirror import IDENTITY
from pgcdc_assets.points.points import Point
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.protocol.text.typed import RAW_TYPE

BATCH_BYTES: Final = 8 << 20
"""A batch that a reader gets contains the rows of about this many (compressed) bytes of the feed's files."""
_ORDER: Final = [(COMMIT_LSN, "ascending"), (ORDINAL, "ascending")]


@dataclass(frozen=True)
class ChangeFeed:
    """The changes of a table's feed below a consistent point."""

    name: TableName
    covered: LsnRange
    """The range for which the feed contains all changes of the table. Its end is the point's LSN."""
    _folder: Location
    _delta: DeltaVersion | None

    @classmethod
    def at(cls, layout: Layout, table: Table, mirror: DeltaVersion, owner: str, upto: Lsn) -> Self:
        """``mirror``: the table's mirror at the point. ``owner``: :meth:`Identity.app_id`. ``upto``: the point."""
        name, folder = table.name, layout.changes(table.name)
        copied = Lsn(mirror.positions.get(f"{owner}/snapshot/{name.folder}", 0))
        delta = DeltaLog(folder).newest()
        positions = {} if delta is None else delta.positions
        start, end = (Lsn(positions.get(f"{owner}/{part}/{name.folder}", 0)) for part in ("changes_since", "changes"))
        if delta is not None and not end:
            # The feed was emptied, because its rows will be derived again for another structure of the table.
            return cls(name, LsnRange(upto, upto), folder, None)
        if delta is None or end < copied or not derived_for(delta, table):
            # The feed has no usable row. Either nothing was added to it since the copy, because the table has not
            # changed since. Or its rows have the columns of another structure: their names and attnums cannot be
            # related to the table's columns. Above its end, the table has not changed.
            return cls(name, LsnRange(min(max(copied, end), upto), upto), folder, None)
        return cls(name, LsnRange(min(start, upto), upto), folder, delta)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([]) if self._delta is None else self._delta.columns

    def require(self, after: Lsn) -> None:
        """Raises FeedGap if the feed lacks changes at or above ``after``."""
        if after < self.covered.start:
            raise FeedGap(
                f"lacks the changes between {after} and {self.covered.start}",
                thing=f"change feed of {self.name}", lsn=after,
                do="retention deleted them, the structure of the table changed, or the table was copied again; read "
                   "the whole mirror at a consistent point, then the changes above that point",
            )  # fmt: skip

    def rows(self, span: LsnRange, only: pc.Expression | None = None) -> Iterator[pa.Table]:
        """The changes of the span in order, as tables of about ``BATCH_BYTES``. ``only``: only rows for which this is
        true."""
        for files in self._overlapping(span):
            yield from self._ordered(files, span, only)

    def _overlapping(self, span: LsnRange) -> Iterator[list[Added]]:
        """The files with rows of the span, in groups. The LSN ranges of two groups do not overlap. Files of one group
        overlap, for example because several Spark tasks wrote them for one transform."""
        found = [(*bounds_of(file), file) for file in (self._delta.files if self._delta is not None else ())]
        found = sorted((one for one in found if one[0] < span.end and one[1] >= span.start), key=lambda one: one[0])
        held: list[Added] = []
        end = -1
        for low, high, file in found:
            if held and low > end:
                yield held
                held = []
            held.append(file)
            end = max(end, high)
        if held:
            yield held

    def _ordered(self, files: Sequence[Added], span: LsnRange, only: pc.Expression | None) -> Iterator[pa.Table]:
        lsn = pc.field(COMMIT_LSN)
        wanted = (lsn >= int(span.start)) & (lsn < int(span.end))
        wanted = wanted if only is None else wanted & only
        order = self._read(files, wanted, [COMMIT_LSN, ORDINAL]).sort_by(_ORDER)
        rows, size = sum(file.rows or 0 for file in files), sum(file.size for file in files)
        step = max(1, BATCH_BYTES * rows // max(size, 1))
        for first in range(0, order.num_rows, step):
            part = order.slice(first, step)
            if part.num_rows == order.num_rows:
                yield self._read(files, wanted).sort_by(_ORDER)
                return
            ends = [[part[name][at].as_py() for name in (COMMIT_LSN, ORDINAL)] for at in (0, -1)]
            yield self._read(files, wanted & _from(*ends[0]) & _upto(*ends[1])).sort_by(_ORDER)

    def _read(self, files: Sequence[Added], wanted: pc.Expression, names: list[str] | None = None) -> pa.Table:
        try:
            found: pa.Table = dataset([self._folder / file.path for file in files], self.schema).to_table(
                columns=names, filter=wanted
            )
        except (OSError, pa.ArrowException) as error:
            raise LakeError(f"cannot be read: {type(error).__name__}", thing=f"change feed of {self.name}",
                            do="maintenance may have replaced a file: try again") from error  # fmt: skip
        return found


def _from(lsn: int, ordinal: int) -> pc.Expression:
    return (pc.field(COMMIT_LSN) > lsn) | ((pc.field(COMMIT_LSN) == lsn) & (pc.field(ORDINAL) >= ordinal))


def _upto(lsn: int, ordinal: int) -> pc.Expression:
    return (pc.field(COMMIT_LSN) < lsn) | ((pc.field(COMMIT_LSN) == lsn) & (pc.field(ORDINAL) <= ordinal))


@dataclass(frozen=True)
class TableAt:
    layout: Layout
    point: Point
    name: TableName
    mirror: DeltaVersion

    @cached_property
    def table(self) -> Table:
        """The table with the newest recorded structure, which may be newer than the mirror's version."""
        row = TableStates(self.layout).get(self.name)
        if row is None or row.table is None:
            raise UnknownTable("the lake has no record of its columns", thing=f"table {self.name}")
        return row.table

    @cached_property
    def feed(self) -> ChangeFeed:
        owner = self.mirror.configuration.get(IDENTITY, "")
        return ChangeFeed.at(self.layout, self.table, self.mirror, owner, self.point.replay_lsn)

    def changes(self, after: Lsn) -> Iterator[pa.Table]:
        """The changes at or above ``after`` and below the point, in order. Raises FeedGap if the feed lacks some of
        them."""
        feed = self.feed
        feed.require(after)
        for rows in feed.rows(LsnRange(min(after, feed.covered.end), feed.covered.end)):
            named = _named(rows[UNCHANGED].combine_chunks(), self.table)
            yield rows.set_column(rows.schema.get_field_index(UNCHANGED), UNCHANGED, named)

    def history(self, key: Mapping[str, Any] | Any) -> RowHistory:
        versions = row_history(self.feed, self.table, keyed(self.table, key))
        commits, messages = versions["lsn"].to_pylist(), None
        if self.point.messages is not None:
            span = LsnRange(Lsn(min(commits, default=0)), Lsn(max(commits, default=0) + 1))
            messages = read_messages(self.layout, span, self.point.messages, commits)
        return RowHistory(self.feed.covered.start, with_messages(versions, messages))


def _named(attnums: pa.ListArray, table: Table) -> pa.ListArray:
    """Replaces each attnum by the column's name in the feed, whose rows were derived for this structure of the
    table."""
    names = {column.attnum: column.name for column in feed_columns(table)}
    found = pa.array([names.get(attnum, str(attnum)) for attnum in attnums.flatten().to_pylist()], pa.string())
    lengths = pc.fill_null(pc.list_value_length(attnums), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    return pa.ListArray.from_arrays(offsets, found, mask=attnums.is_null())


MESSAGE = pa.struct([("prefix", pa.string()), ("content", pa.binary()), ("lsn", pa.int64())])
VERSIONS = (
    pa.field("lsn", pa.int64()), pa.field("commit_ts", pa.timestamp("us", "UTC")), pa.field("xid", pa.int64()),
    pa.field("origin", pa.string()), pa.field("kind", pa.string()),
)  # fmt: skip
"""The first columns of :attr:`RowHistory.versions`; ``row``, ``unknown`` and ``messages`` follow."""


@dataclass(frozen=True)
class RowHistory:
    """The changes of one row, up to a point. ``complete_from``: every change at or above this LSN is listed. Changes
    below it are no longer in the feed."""

    complete_from: Lsn
    versions: pa.Table
    """The changes, oldest first. ``kind``: an operation of the change feed. ``row``: the values that the feed has for
    the change, in the columns of the mirror. ``unknown``: columns whose value is not known, because it was sent neither
    with this change nor with an earlier change in the feed. ``messages``: the logical messages of the transaction; NULL
    if the point has no messages."""


def keyed(table: Table, key: Mapping[str, Any] | Any) -> dict[str, Any]:
    """The value of each key column by name. ``key``: a mapping from names to values, or, for a key of one column, only
    its value. Raises UsageError if ``key`` does not give exactly the key's columns, or if the table has no key."""
    names = [column.name for column in table.key_columns]
    given = dict(key) if isinstance(key, Mapping) else dict(zip(names, [key], strict=False))
    if not names:
        raise UsageError("has no key, so the history of a row cannot be read", thing=f"table {table.name}")
    if sorted(given) != sorted(names):
        raise UsageError(f"has the key {', '.join(names)}, but the call gives {', '.join(given)}",
                         thing=f"table {table.name}")  # fmt: skip
    return given


def has_key(schema: pa.Schema, key: Mapping[str, Any]) -> pc.Expression:
    """An expression that is true for the feed's rows with this key. Raises UsageError for a value that the column's
    type cannot represent."""
    conditions = []
    for name, value in key.items():
        kind = schema.field(feed_name(name)).type
        conditions.append(pc.field(feed_name(name)) == key_scalar(name, value, kind))
    return reduce(and_, conditions)


def key_scalar(name: str, value: Any, kind: pa.DataType) -> pa.Scalar:
    """A key's value in the type of its column. Raises UsageError for a value that the type cannot represent exactly,
    such as 2.5 for an integer, and for NaN and None, which are equal to no key."""
    try:
        found = pa.scalar(value, kind)
        exact = found.as_py() == value or (pa.types.is_floating(kind) and value == value)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        exact = False
    if value is None or not exact:
        raise UsageError(f"the value given for key column {name} is not a value of type {kind}")
    return found


def row_history(feed: ChangeFeed, table: Table, key: Mapping[str, Any]) -> pa.Table:
    """The changes of one row, in the columns of :attr:`RowHistory.versions` except ``messages``. A TRUNCATE of the
    table counts as a change of each row."""
    values = [(column.attnum, column.name, feed_name(column.name)) for column in table.columns
              if feed_name(column.name) in feed.schema.names]  # fmt: skip
    image = pa.struct([*(pa.field(name, feed.schema.field(held).type) for _, name, held in values), (RAW, RAW_TYPE)])
    schema = pa.schema([*VERSIONS, ("row", image), ("unknown", pa.list_(pa.string()))])
    if not feed.schema.names:
        return schema.empty_table()
    only = has_key(feed.schema, key) | (pc.field(OP) == TRUNCATE)
    rows = pa.concat_tables([feed.schema.empty_table(), *feed.rows(feed.covered, only)]).combine_chunks()
    sources = _sources(rows[OP].to_pylist(), rows[UNCHANGED].to_pylist())
    texts = [dict(entry or ()) for entry in rows[RAW].to_pylist()]
    columns, raw = [], [dict(entry) for entry in texts]
    unknown: list[list[str]] = [[] for _ in texts]
    for attnum, name, held in values:
        at = [source.get(attnum, place) for place, source in enumerate(sources)]
        columns.append(rows[held].combine_chunks().take(pa.array(at, pa.int64())))
        for place, source in enumerate(at):
            if source is None:
                unknown[place].append(name)
            elif name in texts[source]:
                raw[place][name] = texts[source][name]
    columns.append(pa.array([list(entry.items()) or None for entry in raw], RAW_TYPE))
    facts = [rows[name].cast(field.type) for name, field in zip(
        (COMMIT_LSN, COMMIT_TS, XID, ORIGIN, OP), VERSIONS, strict=True)]  # fmt: skip
    row = pa.StructArray.from_arrays(columns, fields=list(image))
    return pa.table([*facts, row, pa.array(unknown, schema.field("unknown").type)], schema=schema)


def _sources(ops: Sequence[str], unchanged: Sequence[list[int] | None]) -> list[dict[int, int | None]]:
    """For each change of a row, a mapping of the columns whose values were not sent with the change. It maps the
    column's attnum to the index of the earlier change that has the value, or to None if no change in the feed has
    it."""
    found: list[dict[int, int | None]] = []
    for place, attnums in enumerate(unchanged):
        follows = place > 0 and ops[place - 1] in (INSERT, POSTIMAGE)
        before = found[place - 1] if follows else {}
        found.append({attnum: before.get(attnum, place - 1) if follows else None for attnum in attnums or ()})
    return found


def with_messages(versions: pa.Table, messages: pa.Table | None) -> pa.Table:
    """Adds to each change the messages of its transaction."""
    by_commit: dict[int, list[dict[str, Any]]] = {}
    for message in [] if messages is None else messages.select(["commit_lsn", "prefix", "content", "lsn"]).to_pylist():
        by_commit.setdefault(message.pop("commit_lsn"), []).append(message)
    found = None if messages is None else [by_commit.get(lsn, []) for lsn in versions["lsn"].to_pylist()]
    told = pa.nulls(versions.num_rows, pa.list_(MESSAGE)) if found is None else pa.array(found, pa.list_(MESSAGE))
    return versions.append_column("messages", told)
