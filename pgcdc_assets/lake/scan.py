"""Reads one version of a mirror as a stream of rows: only the requested columns and rows, one row group at a time. Rows
in a deletion vector are left out. Renamed columns have their current names, and widened columns their current types.

A filter is an expression of ``pyarrow.compute``, with pyarrow's rules: NULL matches no comparison, and NaN is neither
below nor above a number. A row group is skipped if its statistics show that no row can match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.errors import LakeError, UsageError
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget, RowGroup


@dataclass(frozen=True)
class MirrorScan:
    """The rows of one version of a mirror."""

    name: TableName
    table: DeltaVersion

    @cached_property
    def schema(self) -> pa.Schema:
        """The mirror's columns without Delta's metadata of fields. If a reader wrote a new Delta table with this
        metadata, the table would have wrong column names."""
        return pa.schema([field.remove_metadata() for field in self.table.columns])

    def batches(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> pa.RecordBatchReader:  # fmt: skip
        """The rows in no particular order. At most one row group is in memory. Raises LakeError if the version cannot
        be read, and UsageError for an unknown column."""
        chosen = self.schema.names if columns is None else list(columns)
        if unknown := [name for name in chosen if name not in self.schema.names]:
            raise UsageError(f"has no column {unknown[0]!r}", thing=f"table {self.name} at this point",
                             do=f"its columns are {', '.join(self.schema.names)}")  # fmt: skip
        schema = pa.schema([self.schema.field(name) for name in chosen])
        return pa.RecordBatchReader.from_batches(schema, self._read(chosen, filter))

    def _read(self, columns: list[str], filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        compared = [] if filter is None else compared_columns(filter, self.schema)
        # Read at least one column, because Arrow tables without columns have no number of rows.
        names = list(dict.fromkeys([*columns, *compared])) or self.schema.names[:1]
        try:
            for group in MergeTarget.of(self.table).groups():
                if filter is not None and not self._may_match(group, filter, compared):
                    continue
                rows = group.read(names)
                rows = rows if group.alive.all() else rows.filter(pa.array(group.alive))
                rows = rows if filter is None else rows.filter(filter)
                yield from rows.select(columns).to_batches()
        except (LakeError, OSError) as error:
            said = error.what if isinstance(error, LakeError) else type(error).__name__
            do = "its files may have been deleted after the mirror's retention; use a newer LSN"
            raise LakeError(
                f"version {self.table.number} cannot be read: {said}", thing=f"mirror {self.name}", do=do
            ) from error

    def _may_match(self, group: RowGroup, filter: pc.Expression, compared: Sequence[str]) -> bool:
        # Imported only here, because this module imports pandas, which is slow.
        import pyarrow.dataset as ds

        known = pc.scalar(True)
        for name in compared:
            known &= _known(group, self.schema.field(name))
        # pyarrow can compare a filter with known bounds only through a dataset, which leaves out fragments whose rows
        # cannot match. So the row group is represented by an empty fragment with its bounds.
        form = ds.ParquetFileFormat()
        fragment = form.make_fragment(pa.BufferReader(b""), partition_expression=known)
        return any(True for _ in ds.FileSystemDataset([fragment], self.schema, form).get_fragments(filter))


def compared_columns(filter: pc.Expression, schema: pa.Schema) -> list[str]:
    """The columns that an expression names. Raises ArrowInvalid if the schema lacks one of them."""
    schema.empty_table().filter(filter)
    return _needed(filter, schema.empty_table(), schema.names)


def _needed(filter: pc.Expression, rows: pa.Table, names: list[str]) -> list[str]:
    """The columns among ``names`` without which the expression cannot be evaluated. pyarrow does not list the columns
    of an expression, so they are found by leaving out half of ``names``, again and again."""
    try:
        rows.drop_columns(names).filter(filter)
    except pa.ArrowInvalid:
        if len(names) == 1:
            return names
        half = len(names) // 2
        return [*_needed(filter, rows, names[:half]), *_needed(filter, rows, names[half:])]
    return []


def _known(group: RowGroup, field: pa.Field) -> pc.Expression:
    """The bounds of a column's values in the file's statistics, as an expression. It is always true for a
    floating-point column, because the bounds do not include NaN."""
    if pa.types.is_nested(field.type) or pa.types.is_floating(field.type):
        return pc.scalar(True)
    try:
        bounds = group.bounds(field.name)
        low, high = (pa.scalar(bound, field.type) for bound in bounds or ())
    except (pa.ArrowException, TypeError, ValueError):
        # There are no bounds, or the file has another type than the table.
        return pc.scalar(True)
    column = pc.field(field.name)
    return ((column >= low) | column.is_null()) & ((column <= high) | column.is_null())
