"""Reads a mirror's Parquet files: one row group at a time, and only the requested columns. Imported by Spark's workers,
so it must not import Spark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Bools, Ints
from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.datafile import opened_parquet
from pgcdc_assets.delta.log import Added, DeltaVersion
from pgcdc_assets.delta.mapping import physical
from pgcdc_assets.delta.vectors import kept, read_vector
from pgcdc_assets.failures import unreadable

GROUP_BYTES: Final = 32 << 20
"""New row groups have about this size in memory. Many small row groups would slow down a merge as many small files
do."""

MATCHED_BYTES: Final = 48 << 20
"""How many bytes of a mirror's key columns are matched with the merge source (the net changes) at a time. Each match
hashes all keys of the merge source, which takes 22 ms for 200,000 keys. So row groups are not matched one by one. A
file of a million rows with uuid keys has 40 MB of keys."""

WantedKeys = Mapping[str, NDArray[Any]]
"""The keys that a merge looks for: the values of each key column, ascending, by the column's name in the feed. Only
integer and text columns are included, because only their bounds are used to skip row groups."""


@dataclass(frozen=True)
class MergeTarget:
    """The files of a mirror that a task reads, their columns, and the folder for new files."""

    folder: Location
    schema: pa.Schema
    """The columns, with the names and types that they have in the files."""
    names: tuple[str, ...]
    """The names of the same columns in the feed."""
    files: tuple[Added, ...] = ()

    @classmethod
    def of(cls, table: DeltaVersion) -> Self:
        """All columns and files of a table. ``names`` are then the table's own column names, not the feed's."""
        columns = table.columns
        return cls(table.folder, physical(columns, table.schema), tuple(columns.names), table.files)

    def groups(self) -> Iterator[RowGroup]:
        """All row groups of the files."""
        for groups in self.files_groups({}):
            yield from groups

    def files_groups(self, wanted: WantedKeys) -> Iterator[list[RowGroup]]:
        """The row groups that may contain a wanted key, with one list per file. A file stays open until the next list
        is requested. A row group is left out if the statistics of one column show that it contains none of the values
        of this column in ``wanted``. If ``wanted`` is empty, all row groups are returned."""
        for added in self.files:
            if all(_may_hold(values, self._bounds(added, name)) for name, values in wanted.items()):
                with _opened(self.folder / added.path) as file:
                    yield list(self._groups(added, file, wanted))

    def field(self, name: str) -> pa.Field:
        """The field of the column that the feed calls ``name``."""
        return self.schema.field(self.names.index(name))

    def _bounds(self, added: Added, name: str) -> tuple[Any, Any] | None:
        stats = json.loads(added.action.get("stats") or "{}")
        column = self.field(name).name
        bounds = (stats.get("minValues", {}).get(column), stats.get("maxValues", {}).get(column))
        return None if None in bounds else bounds

    def _groups(self, added: Added, file: pq.ParquetFile, wanted: WantedKeys) -> Iterator[RowGroup]:
        vector = added.action.get("deletionVector")
        alive = kept(file.metadata.num_rows, None if vector is None else read_vector(self.folder, vector))
        start = 0
        for number in range(file.num_row_groups):
            group = RowGroup(self, added.path, file, number, start, alive)
            start += group.rows
            if all(_may_hold(values, group.bounds(name)) for name, values in wanted.items()):
                yield group


@dataclass(frozen=True)
class RowGroups:
    """Row groups of one file that are matched together, with some of their columns. Here, a *place* is the number of a
    row, counted from 0 through all of these row groups."""

    groups: Sequence[RowGroup]
    columns: pa.Table

    @classmethod
    def read(cls, groups: Iterable[RowGroup], names: Sequence[str]) -> Iterator[Self]:
        """Read columns of row groups of one file. Consecutive row groups are joined until they have ``MATCHED_BYTES``
        in memory."""
        held: list[tuple[RowGroup, pa.Table]] = []
        for group in groups:
            held.append((group, group.read(names)))
            if sum(rows.nbytes for _, rows in held) >= MATCHED_BYTES:
                yield cls._of(held)
                held = []
        if held:
            yield cls._of(held)

    @classmethod
    def _of(cls, held: Sequence[tuple[RowGroup, pa.Table]]) -> Self:
        return cls([group for group, _ in held], pa.concat_tables([rows for _, rows in held]))

    @property
    def path(self) -> str:
        """The file's path, relative to the table's folder."""
        return self.groups[0].path

    @cached_property
    def alive(self) -> Bools:
        """For each place, whether the row is live (not deleted)."""
        return np.concatenate([group.alive for group in self.groups])

    @cached_property
    def positions(self) -> Ints:
        """For each place, the row's number in the file, as deletion vectors use it."""
        return np.concatenate([np.arange(group.start, group.start + group.rows) for group in self.groups])

    def apart(self, at: Ints) -> Iterator[tuple[RowGroup, Ints, Ints]]:
        """Split the places ``at`` by row group. For each row group that has some of them, yields the group, the indexes
        of its places in ``at``, and the row numbers within the group."""
        first = 0
        for group in self.groups:
            mine = np.flatnonzero((at >= first) & (at < first + group.rows))
            if len(mine):
                yield group, mine, at[mine] - first
            first += group.rows


class RowGroup:
    """A row group of one file. ``start``: the number of its first row in the file."""

    def __init__(
        self, target: MergeTarget, path: str, file: pq.ParquetFile, number: int, start: int, alive: Bools
    ) -> None:  # fmt: skip
        self.path = path
        self.start = start
        self._target, self._file, self._number = target, file, number
        self._facts = file.metadata.row_group(number)
        self.rows: int = self._facts.num_rows
        self.alive = alive[start : start + self.rows]
        """For each row, whether it is live: no deletion vector contains it."""

    def read(self, names: Sequence[str]) -> pa.Table:
        """Read columns by their names in the feed. The result includes deleted rows. A column that the file lacks is
        NULL."""
        fields = [self._target.field(name) for name in names]
        leaves = _leaves(self._file.schema_arrow)
        places = sorted(place for field in fields for place in leaves.get(field.name, ()))
        try:
            found = self._file.reader.read_row_group(self._number, column_indices=places, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise unreadable(self._target.folder / self.path, error) from None
        columns = [
            found[field.name].cast(field.type) if field.name in leaves else pa.nulls(self.rows, field.type)
            for field in fields
        ]
        return pa.table(columns, names=list(names))

    def bounds(self, name: str) -> tuple[Any, Any] | None:
        place = _leaves(self._file.schema_arrow).get(self._target.field(name).name, ())
        facts = self._facts.column(place[0]).statistics if len(place) == 1 else None
        return (facts.min, facts.max) if facts is not None and facts.has_min_max else None


def _opened(path: Location) -> pq.ParquetFile:
    try:
        # A user's OPTIMIZE with Spark writes INT96 timestamps by default. If they were read as nanoseconds, timestamps
        # before 1678 and after 2261 would be wrong.
        return opened_parquet(path, coerce_int96_timestamp_unit="us")
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from None


def wanted(keys: Mapping[str, pa.ChunkedArray | pa.Array]) -> WantedKeys:
    """The key columns whose statistics can exclude row groups, with their distinct values. A column with a NULL is left
    out, because the NULL stands for a value that does not fit, which bounds cannot exclude."""
    return {
        # Arrow sorts, because numpy sorts texts slowly, as Python objects. Both sort by code points.
        name: pc.unique(values).sort().to_numpy(zero_copy_only=False)
        for name, values in keys.items()
        if (pa.types.is_integer(values.type) or pa.types.is_string(values.type)) and not values.null_count
    }


def _may_hold(values: NDArray[Any], bounds: tuple[Any, Any] | None) -> bool:
    if bounds is None:
        return True
    at = int(np.searchsorted(values, bounds[0]))
    return at < len(values) and bool(values[at] <= bounds[1])


def _leaves(schema: pa.Schema) -> dict[str, range]:
    """For each column, the indexes of its leaf columns in a Parquet file. They are computed here, because pyarrow's
    lookup by name fails for names with dots."""
    found: dict[str, range] = {}
    place = 0
    for field in schema:
        found[field.name] = range(place, place + _width(field.type))
        place += _width(field.type)
    return found


def _width(type_: pa.DataType) -> int:
    if not pa.types.is_nested(type_):
        return 1
    return sum(_width(type_.field(number).type) for number in range(type_.num_fields))


def gathered(groups: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join small row groups, so that a new file gets row groups of about ``GROUP_BYTES``."""
    held: list[pa.Table] = []
    for group in groups:
        held.append(group)
        if sum(rows.nbytes for rows in held) >= GROUP_BYTES:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def live_rows(table: DeltaVersion) -> Iterator[pa.Table]:
    """All live rows, by row groups, under the table's own column names. LakeError if a file is missing or damaged."""
    source = MergeTarget.of(table)
    for group in source.groups():
        rows = group.read(source.names)
        yield rows if group.alive.all() else rows.filter(pa.array(group.alive))
