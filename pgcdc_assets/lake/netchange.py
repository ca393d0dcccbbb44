"""The net change of a table between two points: the rows that differ, with their values at both points (images).

Two versions of a mirror share most of their files. Only two kinds of rows are read: rows in files that only one version
has, and rows that only one version's deletion vectors delete. First the keys of these rows are read, then the whole
rows that differ. So the cost depends on what was written between the points, and REPLICA IDENTITY FULL is not needed.
The keys and the result must fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Bools, Ints, first_of_groups, in_arrow, whole
from pgcdc_assets.core.catalog import Table
from pgcdc_assets.delta.log import DeltaVersion, file_key
from pgcdc_assets.delta.mapping import physical
from pgcdc_assets.delta.vectors import kept, read_vector
from pgcdc_assets.errors import LakeError
from pgcdc_assets.feed.schema import COMMIT_LSN, COMMIT_TS, HASH, LEAF, RAW, ROW, FeedColumn
from pgcdc_assets.mirror.delta.mirror import IDENTITY, STRUCTURE, recorded
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget, RowGroup
from pgcdc_assets.mirror.net.neteffect import key_numbers

INSERT, UPDATE, DELETE = "insert", "update", "delete"
NOT_COMPARED: Final = frozenset({COMMIT_LSN, COMMIT_TS, LEAF, ROW, HASH})
"""Columns that pgcdc adds, and that are not values of the row. They differ after a new copy, even if the row does
not."""


def net_change(before: DeltaVersion, after: DeltaVersion, table: Table) -> pa.Table:
    """The rows that differ between two versions of a mirror, with the columns ``kind``, ``before`` and ``after``.
    ``before`` and ``after`` are structs with the mirror's columns. ``table``: the table in its current structure.
    Raises LakeError if the two versions have different columns."""
    _refuse_other_columns(before, after, table)
    sides = _Side(before, after), _Side(after, before)
    if table.key:
        key = _key(table, before)
        narrow = [side.narrow([*key, RAW, COMMIT_LSN]) for side in sides]
        places = _differing(narrow, key, table, known=structure_of(before) == structure_of(after))
        rows = [side.rows(at) for side, at in zip(sides, places, strict=True)]
        return _paired(rows, key, table)
    rows = [side.rows(at) for side, at in zip(sides, _moved(sides, table), strict=True)]
    return _counted(rows, table)


def _refuse_other_columns(before: DeltaVersion, after: DeltaVersion, table: Table) -> None:
    if _columns(before) != _columns(after):
        raise LakeError(
            f"does not have the same columns in versions {before.number} and {after.number}",
            thing=f"mirror {table.name}", do="compare points that are both before or both after the structure change",
        )  # fmt: skip


def _columns(of: DeltaVersion) -> list[tuple[str, pa.DataType, str]]:
    """The table's own columns, each with its name in the data files. That name is compared, too, because after a rename
    another column may have the same name."""
    columns = of.columns
    stored = physical(columns, of.schema)
    found = zip(columns, stored, strict=True)
    return [(column.name, column.type, field.name) for column, field in found if column.name not in NOT_COMPARED]


def has_columns_of(table: Table, version: DeltaVersion) -> bool:
    """Whether a version of the mirror has exactly the columns of the table, under their current names.

    The names at an earlier copy are not recorded. So the order is compared, too: a mirror has its columns in attnum
    order, and the order of the names differs if columns have exchanged them."""
    held = [name for name, _, _ in _columns(version) if name != RAW]
    names = {attnum: name for attnum, name in _names(table, version).items() if name in held}
    now = {column.attnum: column.name for column in table.columns}
    return names == now and held == list(now.values())


def structure_of(of: DeltaVersion) -> str | None:
    """The text that a mirror's version records of its structure. It differs after each change of columns or
    partitions."""
    return of.configuration.get(STRUCTURE)


def _key(table: Table, version: DeltaVersion) -> list[str]:
    """The names of the key's columns in a version of the mirror. They may differ from the current names."""
    names = _names(table, version)
    found = [names[attnum] for attnum in table.key if names.get(attnum) in version.columns.names]
    if len(found) < len(table.key):
        raise LakeError(f"the names that its key columns had in version {version.number} are not known",
                        thing=f"mirror {table.name}", do="use newer points")  # fmt: skip
    return found


def _names(table: Table, version: DeltaVersion) -> dict[int, str]:
    """The names that the table's columns had in a version of the mirror, by attnum. A version that records no structure
    has the names of the copy."""
    # The former columns are in the order of their changes, so a column's first entry has its first name.
    first = {column.attnum: column.name for column in reversed((*table.descent.former, *table.columns))}
    copy = version.positions.get(f"{version.configuration.get(IDENTITY, '')}/snapshot/{table.name.folder}")
    if (then := recorded(version, copy)) is None:
        return first
    # Rows may have added columns since. Their attnums are higher.
    later = {attnum: name for attnum, name in first.items() if attnum > then.highest_attnum}
    return later | {column.attnum: column.name for column in then.columns}


class _Side:
    """The stored rows that ``this`` version has and the other version does not have. A row's place is its index among
    these rows."""

    def __init__(self, this: DeltaVersion, other: DeltaVersion) -> None:
        same = {file_key(file.action) for file in other.files}
        self._others = {file.path: file for file in other.files}
        self._target = replace(
            MergeTarget.of(this), files=tuple(file for file in this.files if file_key(file.action) not in same)
        )
        self._folder = this.folder
        self.columns = list(self._target.names)

    @property
    def count(self) -> int:
        return sum(int(alone.sum()) for _, alone in self._groups())

    def narrow(self, names: Sequence[str]) -> pa.Table:
        """Some columns of all rows, in the order of their places."""
        schema = pa.schema([self._field(name) for name in names])
        parts = [group.read(names).filter(pa.array(alone)) for group, alone in self._groups()]
        return pa.concat_tables([schema.empty_table(), *parts])

    def rows(self, places: Ints) -> pa.Table:
        """The whole rows at these places, which must be in ascending order."""
        parts = [pa.schema([self._field(name) for name in self.columns]).empty_table()]
        first = 0
        for group, alone in self._groups():
            at = np.flatnonzero(alone)
            mine = places[(places >= first) & (places < first + len(at))] - first
            first += len(at)
            if len(mine):
                parts.append(group.read(self.columns).take(pa.array(at[mine])))
        return pa.concat_tables(parts)

    def _field(self, name: str) -> pa.Field:
        return pa.field(name, self._target.field(name).type)

    def _groups(self) -> Iterator[tuple[RowGroup, Bools]]:
        """The row groups that have rows of this side, each with a mask of these rows."""
        for groups in self._target.files_groups({}):
            gone = self._gone_elsewhere(groups)
            for group in groups:
                alone = group.alive if gone is None else group.alive & gone[group.start : group.start + group.rows]
                if alone.any():
                    yield group, alone

    def _gone_elsewhere(self, groups: Sequence[RowGroup]) -> Bools | None:
        """For each row of a file, whether the other version has deleted it; None if the other version does not have the
        file."""
        twin = self._others.get(groups[0].path) if groups else None
        if twin is None:
            return None
        vector = twin.action.get("deletionVector")
        rows = groups[-1].start + groups[-1].rows
        return ~kept(rows, None if vector is None else read_vector(self._folder, vector))


def _differing(narrow: Sequence[pa.Table], key: Sequence[str], table: Table, *, known: bool) -> tuple[Ints, Ints]:
    """The places of the rows that may differ. If the same transaction changed a row last in both versions, the row is
    the same, and was only moved to another file. This conclusion needs equal structures (``known``), because after a
    structure change a new column may have the name of an old column."""
    if not known:
        return np.arange(narrow[0].num_rows), np.arange(narrow[1].num_rows)
    at = _by_key(narrow, key, table)
    both = np.flatnonzero((at[0] >= 0) & (at[1] >= 0))
    lsns = [whole(side[COMMIT_LSN]).to_numpy(zero_copy_only=False) for side in narrow]
    same = both[lsns[0][at[0][both]] == lsns[1][at[1][both]]]
    for found in at:
        found[same] = -1
    left = [np.sort(found[found >= 0]) for found in at]
    return left[0], left[1]


def _by_key(rows: Sequence[pa.Table], key: Sequence[str], table: Table) -> list[Ints]:
    """For each side, the place of each key's row; -1 if the side does not have the key."""
    number = key_numbers(pa.concat_tables(rows), _named(key))
    at = [np.full(int(number.max(initial=-1)) + 1, -1, dtype=np.int64) for _ in rows]
    for found, mine in zip(at, np.split(number, [rows[0].num_rows]), strict=True):
        found[mine] = np.arange(len(mine))
        if (found >= 0).sum() != len(mine):
            raise LakeError("has two rows with equal values of the table's key columns", thing=f"mirror {table.name}",
                            do="these columns became the key later: use newer points")  # fmt: skip
    return at


def _named(columns: Sequence[str]) -> list[FeedColumn]:
    return [FeedColumn(name, name, 0, True) for name in columns]


def _paired(rows: Sequence[pa.Table], key: Sequence[str], table: Table) -> pa.Table:
    """The result for a table with a key: one row for each key whose rows differ, or that only one side has."""
    at = _by_key(rows, key, table)
    both = np.flatnonzero((at[0] >= 0) & (at[1] >= 0))
    differs = np.ones(len(at[0]), dtype=bool)
    differs[both] = ~_equal(*(side.take(in_arrow(found[both])) for side, found in zip(rows, at, strict=True)))
    kinds = np.where(at[0] < 0, INSERT, np.where(at[1] < 0, DELETE, UPDATE))[differs]
    return _result(kinds.tolist(), [_image(side, found[differs]) for side, found in zip(rows, at, strict=True)])


def _moved(sides: Sequence[_Side], table: Table) -> tuple[Ints, Ints]:
    """For a table without a key: the places of the rows that are only on one side. If the rows have an identity
    (``_pgcdc_row``), rows that a compaction moved to another file are left out."""
    if not table.multiset:
        return np.arange(sides[0].count), np.arange(sides[1].count)
    return _uncancelled([side.narrow([ROW, RAW]) for side in sides], [ROW])


def _counted(rows: Sequence[pa.Table], table: Table) -> pa.Table:
    """The result for a table without a key: one row for each row that was added or deleted. Equal rows on both sides
    cancel each other."""
    values = [name for name in rows[0].column_names if name not in NOT_COMPARED and name != RAW]
    went, came = _uncancelled(rows, [*values, HASH] if table.multiset else values)
    nothing = np.full(1, -1, dtype=np.int64)
    at = np.concatenate([went, nothing.repeat(len(came))]), np.concatenate([nothing.repeat(len(went)), came])
    return _result([DELETE] * len(went) + [INSERT] * len(came),
                   [_image(side, found) for side, found in zip(rows, at, strict=True)])  # fmt: skip


def _uncancelled(rows: Sequence[pa.Table], columns: Sequence[str]) -> tuple[Ints, Ints]:
    """The rows of each side that are left when rows with equal values in ``columns`` cancel each other."""
    number = key_numbers(pa.concat_tables(rows), _named(columns))
    went, came = np.split(number, [rows[0].num_rows])
    count = int(number.max(initial=-1)) + 1
    excess = np.bincount(went, minlength=count) - np.bincount(came, minlength=count)
    return (np.sort(first_of_groups(went, np.maximum(excess, 0))),
            np.sort(first_of_groups(came, np.maximum(-excess, 0))))  # fmt: skip


def _equal(left: pa.Table, right: pa.Table) -> Bools:
    """For each row, whether both sides have the same values. 0 and -0 differ here, although they are equal as keys."""
    same = np.ones(left.num_rows, dtype=bool)
    for name in left.column_names:
        if name not in NOT_COMPARED:
            same &= _same(whole(left[name]), whole(right[name]))
    return same


def _same(left: pa.Array, right: pa.Array) -> Bools:
    kind = left.type
    if pa.types.is_nested(kind):
        pairs = zip(*([_text(value, kind) for value in side.to_pylist()] for side in (left, right)), strict=True)
        return np.array([one == other for one, other in pairs], dtype=bool)
    if pa.types.is_floating(kind):
        nan, bits = pa.scalar(float("nan"), kind), pa.int64() if kind.bit_width == 64 else pa.int32()
        left, right = (pc.if_else(pc.is_nan(side), nan, side).view(bits) for side in (left, right))
    equal = pc.fill_null(pc.equal(left, right), pc.and_(pc.is_null(left), pc.is_null(right)))
    return np.asarray(equal)


def _text(value: Any, kind: pa.DataType) -> str:
    """A text that is the same for two values exactly if the values are equal. The entries of a map are sorted, because
    their order has no meaning."""
    return repr(sorted(value) if value and pa.types.is_map(kind) else value)


def _image(rows: pa.Table, at: Ints) -> pa.StructArray:
    """The rows at these places as structs; NULL where the place is -1."""
    lacking = at < 0
    taken = rows.take(pa.array(at, mask=lacking))
    fields = [field.with_nullable(True) for field in taken.schema]
    return pa.StructArray.from_arrays(
        [whole(column) for column in taken.columns], fields=fields, mask=pa.array(lacking)
    )


def _result(kinds: list[str], images: Sequence[pa.StructArray]) -> pa.Table:
    return pa.table({"kind": pa.array(kinds, pa.string()), "before": images[0], "after": images[1]})
