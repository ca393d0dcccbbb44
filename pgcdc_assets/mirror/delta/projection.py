"""The Spark task of a change of structure: writes the rows of a mirror's files to a new file, with the new columns.
Imported by Spark's workers, so it must not import Spark."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Column
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.feed.schema import RAW
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget, RowGroup, gathered
from pgcdc_assets.mirror.net.neteffect import map_keys, raw_maps, raw_texts
from pgcdc_assets.protocol.text.typed import typed
from pgcdc_assets.store import storage


@dataclass(frozen=True)
class Sourced:
    """A column of the new rows, with the source of its values: the mirror's present column ``held``; or, if ``held`` is
    None, one value for all rows."""

    name: str
    type: pa.DataType
    """Name and type in the mirror."""
    held: str | None
    column: Column | None = None
    """The column in PostgreSQL. If ``held`` is None, all rows get its ``missing`` value: the value that PostgreSQL
    shows in rows that are older than the column. None for a column that pgcdc or another writer has added."""

    @property
    def unchanged(self) -> bool:
        return self.held == self.name

    @property
    def null(self) -> bool:
        """Whether no row has a value in this column."""
        return self.held is None and (self.column is None or self.column.missing is None)


@dataclass(frozen=True)
class Projection:
    """One task: the files whose live rows (rows that no deletion vector deletes) are written again, and the new
    columns."""

    held: MergeTarget
    """The files to read, and the mirror's names for their columns."""
    columns: tuple[Sourced, ...]
    files: pa.Schema
    """The columns under the names that the new files use."""
    raw_names: Mapping[str, str | None] = field(default_factory=dict)
    """The column names that change in ``_pgcdc_raw`` (the texts of values that do not fit, by column name), with their
    new names; None for a dropped column."""


def project(work: Projection) -> FileReport | None:
    """Write the rows to one file; None if there are no rows. Needs memory for about one row group."""
    with DataFile(work.held.folder, work.files) as file:
        for rows in gathered(_projected(work, group) for group in work.held.groups({})):
            file.write(rows.columns)
        report = file.finish()
    passed(FaultPoint.RESHAPED_FILE_WRITTEN)
    return report


def has_texts(held: MergeTarget, names: Collection[str]) -> bool:
    """Whether a live row of the files has a text under one of these names in ``_pgcdc_raw``."""
    files = [partial(_file_has_texts, replace(held, files=(file,)), frozenset(names)) for file in held.files]
    return any(storage.together(held.folder, files))


def _file_has_texts(held: MergeTarget, names: frozenset[str]) -> bool:
    for group in held.groups({}):
        raw = group.read([RAW])[RAW]
        if raw.null_count < group.rows and names & set(map_keys(raw.filter(pa.array(group.alive))).to_pylist()):
            return True
    return False


def _projected(work: Projection, group: RowGroup) -> pa.Table:
    held = [column.held for column in work.columns if column.held is not None]
    rows = group.read(list(dict.fromkeys(held)))
    if not group.alive.all():
        rows = rows.filter(pa.array(group.alive))
    misfits: dict[str, str] = {}
    found = [_values(column, rows, misfits) for column in work.columns]
    names = [column.name for column in work.columns]
    place = names.index(RAW)
    found[place] = _raw(found[place], work.raw_names, misfits)
    return pa.table(found, names=names)


def _values(column: Sourced, rows: pa.Table, misfits: dict[str, str]) -> pa.Array | pa.ChunkedArray:
    """The values of a column for these rows. If all rows get one value, and it does not fit the column's type, its text
    is added to ``misfits``."""
    if column.held is not None:
        held = rows[column.held]
        return held if held.type == column.type else held.cast(column.type)
    if column.column is None or column.column.missing is None:
        return pa.nulls(rows.num_rows, column.type)
    text = column.column.missing
    done = typed([pa.array([text], pa.string())], [column.column], 1)
    if done.raw.null_count == 0:
        misfits[column.name] = text
    return pa.repeat(done.values[0][0], rows.num_rows).cast(column.type)


def _raw(
    held: pa.ChunkedArray, names: Mapping[str, str | None], misfits: Mapping[str, str]
) -> pa.Array | pa.ChunkedArray:
    """The column ``_pgcdc_raw`` with the new column names. Each row also gets the texts of ``misfits``."""
    if not misfits and (not names or held.null_count == len(held)):
        return held
    texts: dict[str, pa.Array] = {}
    for name in pc.unique(map_keys(held)).to_pylist():
        new = names.get(name, name)
        if new is not None:
            texts[new] = raw_texts(held, name)
    texts |= {name: pa.repeat(pa.scalar(text, pa.string()), len(held)) for name, text in misfits.items()}
    return raw_maps(texts, len(held), held.type) if texts else pa.nulls(len(held), held.type)
