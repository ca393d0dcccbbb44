"""Spark tasks of an apply: how the changes of a table are divided into units, and what a task does with a unit. A unit
has all changes of a table, the changes of one bucket of keys (keys whose hash has the same remainder), or one file of
inserts. A task writes the rows to add to a new file of the mirror, and returns the rows to delete by file and position.
The driver commits both. Imported by Spark's workers, so it must not import Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.delta.datafile import DataFile, dataset
from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.schema import (
    COMMIT_LSN,
    LEAF,
    OP,
    ORIGIN,
    TRUNCATE,
    XID,
    FeedFile,
    FeedPart,
    feed_columns,
    feed_schema,
)
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget
from pgcdc_assets.mirror.delta.rowlookup import Effect, Write, merge_keyed, merge_multiset
from pgcdc_assets.mirror.net.neteffect import ARRIVES, after_truncates, collapse, collapse_touched, net_rows

ROW_GROUP_ROWS = 1 << 20

_OF_FEEDS = (XID, ORIGIN)
"""Columns of a feed that an apply does not need, because mirrors do not have them."""


@dataclass(frozen=True)
class Collapsing:
    """One unit of an apply: events (rows of the change feed) of one table, to be merged into its mirror."""

    table: Table
    files: tuple[Location, ...]
    span: LsnRange
    target: MergeTarget
    """The folder for new files, and the mirror's files to read. There are none to read if the table was truncated, or
    if all events are inserts."""
    divided: bool = False
    """Whether the unit has only the events of some keys. An update that changes a key is two events, one for the old
    and one for the new key. One of these halves may then be in another unit."""
    arrivals: tuple[Location, ...] = ()
    """More feed files, if a table's work is divided into units. They contain the new rows of updates that changed the
    key. The old rows may be in files of other units."""
    inserts: bool = False
    """Whether the unit has only inserts of rows that the mirror does not have. Then no rows are compared."""
    masked: tuple[int, ...] = ()
    """The attnums of columns for which at least one value was not sent (unchanged TOAST)."""
    leaves: tuple[str, ...] = ()
    """Leaf partitions that were truncated."""
    bytes: int = 0
    repair: bool = False
    """Whether this is a repair. The mirror has already applied the span, so the merge cannot check which of the changed
    keys the mirror had before."""
    touched: LsnRange | None = None
    """For repairs: only the keys that changed in this range, and the keys to which their rows moved later, are merged.
    None: all keys."""


def collapse_units(units: Sequence[Collapsing]) -> list[Effect]:
    """Process several units, one after another. If the changes of a unit contradict each other, or a file cannot be
    read, only this unit fails."""
    effects = [_effect(unit) for unit in units]
    passed(FaultPoint.COLLAPSED)
    return effects


def _effect(unit: Collapsing) -> Effect:
    with DataFile(unit.target.folder, unit.target.schema) as file:
        try:
            with contained() as failed:
                merged = _merged(unit, lambda rows: _write(file, unit.target, rows))
                return replace(merged, added=file.finish())
        except MergeMismatch as error:
            return Effect(mismatch=error)
        return Effect(mismatch=MergeMismatch(failed.told))


def _merged(unit: Collapsing, write: Write) -> Effect:
    if unit.inserts:
        return _inserted(unit, write)
    events = after_truncates(_events(unit))
    columns = feed_columns(unit.table)
    if unit.table.multiset:
        net = net_rows(events, columns, by_leaf=not unit.table.via_root)
        return merge_multiset(unit.target, net, columns, unit.leaves, write)
    if unit.repair:
        rows = collapse_touched(events, columns, unit.masked, unit.touched)
    else:
        rows = collapse(events, columns, unit.masked)
    return merge_keyed(unit.target, rows, columns, unit.masked, unit.leaves, write)


def _inserted(unit: Collapsing, write: Write) -> Effect:
    """Write all rows of a unit that has only inserts, one row group of the feed at a time, because such a unit may have
    any number of rows."""
    count = 0
    for rows in _row_groups(unit):
        write(rows)
        count += rows.num_rows
    return Effect(inserted=count)


def _row_groups(unit: Collapsing) -> Iterator[pa.Table]:
    data = dataset(unit.files, feed_schema(unit.table))
    for fragment in data.get_fragments():
        for group in fragment.split_by_row_group():
            yield group.to_table(schema=data.schema, columns=_needed(data.schema), filter=_committed(unit.span))


def _events(unit: Collapsing) -> pa.Table:
    """All events of the unit. If the unit is one bucket of keys, the column ARRIVES marks the events from ``arrivals``,
    which contain the new rows of updates that changed the key."""
    events = read_events(unit.table, unit.files, unit.span) if unit.files else _none(unit)
    if not unit.divided:
        return events
    came = read_events(unit.table, unit.arrivals, unit.span) if unit.arrivals else events.slice(0, 0)
    both = pa.concat_tables([events, came])
    return both.append_column(ARRIVES, pa.array(np.arange(len(both)) >= len(events)))


def _write(file: DataFile, target: MergeTarget, rows: pa.Table) -> None:
    """Append rows to a file of the mirror. Columns of the mirror that the rows lack are NULL."""
    for name, held in zip(target.names, target.schema, strict=True):
        if name not in rows.column_names:
            rows = rows.append_column(name, pa.nulls(rows.num_rows, held.type))
    rows = rows.select(list(target.names))
    for start in range(0, rows.num_rows, ROW_GROUP_ROWS):
        file.write(rows.slice(start, ROW_GROUP_ROWS).columns)


def _none(unit: Collapsing) -> pa.Table:
    schema = feed_schema(unit.table)
    return schema.empty_table().select(_needed(schema))


def read_events(table: Table, files: Sequence[Location], span: LsnRange, names: Sequence[str] = ()) -> pa.Table:
    """The rows of feed files whose transactions lie in the span. Columns: ``names``, or all that an apply needs."""
    data = dataset(files, feed_schema(table))
    return data.to_table(columns=list(names) or _needed(data.schema), filter=_committed(span))


def _needed(schema: pa.Schema) -> list[str]:
    """The columns of a feed that an apply needs."""
    return [name for name in schema.names if name not in _OF_FEEDS]


def _committed(span: LsnRange) -> pc.Expression:
    at = pc.field(COMMIT_LSN)
    return (at >= int(span.start)) & (at < int(span.end))


@dataclass(frozen=True)
class PendingChanges:
    """The files of a feed that have changes in ``span``, the range to apply or to repair."""

    layout: Layout
    part: FeedPart
    """The feed's part, with only these files."""
    span: LsnRange

    @classmethod
    def of(cls, layout: Layout, part: FeedPart, span: LsnRange) -> PendingChanges | None:
        """The files of ``part`` with changes in ``span``; None if there are none."""
        held = tuple(f for f in part.files if f.facts.commit_min < span.end and f.facts.commit_max >= span.start)
        return cls(layout, replace(part, files=held), span) if held and span.start < span.end else None

    @property
    def table(self) -> Table:
        return self.part.table

    @property
    def files(self) -> tuple[FeedFile, ...]:
        return self.part.files

    @property
    def paths(self) -> tuple[Location, ...]:
        return tuple(self.layout.changes(self.table.name) / file.name for file in self.files)

    @property
    def whole(self) -> bool:
        """Whether all changes in the files are inside the span."""
        bounds = [bound for file in self.files for bound in (file.facts.commit_min, file.facts.commit_max)]
        return all(self.span.holds_commit(bound) for bound in bounds)

    @cached_property
    def _truncated(self) -> tuple[str | None, ...]:
        """The leaf partitions that were truncated in the span. An entry None means that the whole table was
        truncated."""
        if not self.part.truncates:
            return ()
        names = [OP, COMMIT_LSN, *([LEAF] if self.table.partitioned else [])]
        # Files without truncates may be large, and this function runs in the driver.
        paths = [path for file, path in zip(self.files, self.paths, strict=True) if TRUNCATE in file.facts.counts]
        events = read_events(self.table, paths, self.span, names)
        events = events.filter(pc.equal(events[OP], TRUNCATE))
        if not self.table.partitioned:
            return (None,) if events.num_rows else ()
        leaves: list[str | None] = pc.unique(events[LEAF]).to_pylist()
        return tuple(leaves)

    @property
    def emptied(self) -> bool:
        """Whether the whole table was truncated. The remaining changes are then the complete table."""
        return None in self._truncated

    @property
    def leaves(self) -> tuple[str, ...]:
        """The truncated leaves, if the whole table was not truncated."""
        return () if self.emptied else tuple(leaf for leaf in self._truncated if leaf is not None)

    def inserts(self, target: MergeTarget) -> list[Collapsing]:
        """Divide the work into units if all changes are inserts of rows that the mirror does not have: one unit for
        each file."""
        unit = Collapsing(self.table, (), self.span, target, inserts=True)
        held = zip(self.files, self.paths, strict=True)
        return [replace(unit, files=(path,), bytes=file.size) for file, path in held]

    def units(self, target: MergeTarget, *, together: bool = False) -> list[Collapsing]:
        """Divide the work into units, one for each bucket of keys. Returns one unit for all keys if the buckets cannot
        be merged separately, because leaves were truncated, files have keys of several buckets, or values of a row must
        be taken from events under another key. ``together``: both halves of each key change must be in one unit."""
        size = sum(file.size for file in self.files)
        unit = Collapsing(
            self.table, self.paths, self.span, target, masked=self.part.masked, leaves=self.leaves, bytes=size
        )
        if self.leaves:
            return [unit]
        buckets = {file.facts.buckets for file in self.files if file.facts.bucket is not None}
        if len(buckets) != 1 or any(_of_any_key(file) for file in self.files):
            return [unit]
        if self.part.key_changes and (together or not self._halves_stand_alone):
            return [unit]
        found = (self._bucket(unit, number) for number in range(buckets.pop()))
        return [unit for unit in found if unit.files or unit.arrivals]

    @property
    def _halves_stand_alone(self) -> bool:
        """Whether all new halves of key changes are in separate files, and have all values, so that no value must be
        taken from the row under the old key."""
        arrivals = [file.facts for file in self.files if file.facts.arrivals]
        return sum(facts.rows for facts in arrivals) == self.part.key_changes and not any(f.masked for f in arrivals)

    def _bucket(self, unit: Collapsing, number: int) -> Collapsing:
        chosen = [(file, path) for file, path in zip(self.files, self.paths, strict=True)
                  if file.facts.bucket in (None, number)]  # fmt: skip
        size = sum(file.size for file, _ in chosen)
        if not self.part.key_changes:
            return replace(unit, files=tuple(path for _, path in chosen), bytes=size)
        plain = tuple(path for file, path in chosen if not file.facts.arrivals)
        arrivals = tuple(path for file, path in chosen if file.facts.arrivals)
        return replace(unit, files=plain, arrivals=arrivals, divided=True, bytes=size)


def _of_any_key(file: FeedFile) -> bool:
    """Whether the file has rows of several buckets of keys. False for a file with only truncates, which has no rows of
    any key: the unit of every bucket reads it."""
    return file.facts.bucket is None and bool(file.facts.counts.keys() - {TRUNCATE})
