"""What one task of the apply does: the changes of a table (or of one bucket of its keys) to their net effect.

Either a merge source, or, where nothing of the target is left or nothing in it changes, files of the
mirror itself. Imported by Spark's workers: no Spark, no Delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.lake.collapse import UPSERT, Remaining, after_truncates, collapse, collapse_touched
from pgcdc_assets.lake.feed import COMMIT_LSN, OP, XID, feed_columns, feed_schema
from pgcdc_assets.lake.files import DataFile, FileReport
from pgcdc_assets.lake.multiset import net_rows

ROW_GROUP_ROWS = 1 << 20


@dataclass(frozen=True)
class Collapsing:
    """One unit of work. ``target`` is the folder that the files go to."""

    table: Table
    files: tuple[Path, ...]
    span: LsnRange
    target: Path
    masked: tuple[int, ...] = ()
    mirror: pa.Schema | None = None
    """Names and types of the mirror's files, to write these; None: write a merge source."""
    mirror_names: tuple[str, ...] = ()
    """What feeds call the columns of ``mirror``, in its order."""
    repair: bool = False
    """The mirror has applied the span already: what it holds of a key is not known."""
    touched: LsnRange | None = None
    """Repairs: only keys that were changed in it, and those that their rows went on to. None: all."""


@dataclass(frozen=True)
class Effect:
    """The files of a unit, and what its MERGE is to count."""

    upserts: FileReport | None = None
    """Merge source, or file of the mirror; None where there are no rows."""
    removed: FileReport | None = None
    """Multisets: the rows to take away."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    lookups: int = 0
    mismatch: MergeMismatch | None = None
    """The changes contradict each other: nothing was written."""


def collapse_units(units: Sequence[Collapsing]) -> list[Effect]:
    """Do several units, one after the other. A contradiction is the unit's own affair."""
    effects = [_effect(unit) for unit in units]
    passed(FaultPoint.COLLAPSED)
    return effects


def _effect(unit: Collapsing) -> Effect:
    left = after_truncates(read_events(unit.table, unit.files, unit.span))
    try:
        if unit.table.multiset:
            return _multiset(unit, left)
        if unit.table.key:
            return _keyed(unit, left)
    except MergeMismatch as error:
        return Effect(mismatch=error)
    added = _written(unit, left.events)
    return Effect(added, inserted=added.rows if added else 0)


def read_events(table: Table, files: Sequence[Path], span: LsnRange, names: Sequence[str] = ()) -> pa.Table:
    """The rows of feed files whose transactions lie in the span; of ``names``, or all that an apply needs."""
    data = ds.dataset([str(file) for file in files], feed_schema(table), format="parquet")
    columns = list(names) or [name for name in data.schema.names if name != XID]
    at = pc.field(COMMIT_LSN)
    return data.to_table(columns=columns, filter=(at >= int(span.start)) & (at < int(span.end)))


def _keyed(unit: Collapsing, left: Remaining) -> Effect:
    columns = feed_columns(unit.table)
    if unit.repair and unit.mirror is None:
        return Effect(_written(unit, collapse_touched(left.events, columns, unit.masked, unit.touched)))
    result = collapse(left.events, columns, unit.masked)
    rows = result.rows
    if unit.mirror is not None:
        rows = rows.filter(pc.equal(rows[OP], UPSERT))
    return Effect(
        _written(unit, rows),
        inserted=result.inserted,
        updated=result.updated,
        deleted=result.deleted,
        lookups=result.lookups,
    )


def _multiset(unit: Collapsing, left: Remaining) -> Effect:
    net = net_rows(left.events, feed_columns(unit.table))
    return Effect(
        _written(unit, net.added),
        None if unit.mirror is not None else _file(unit.target, net.removed),
        inserted=net.added.num_rows,
        deleted=net.deleted,
    )


def _written(unit: Collapsing, rows: pa.Table) -> FileReport | None:
    if unit.mirror is None:
        return _file(unit.target, rows)
    return _file(unit.target, rows.select(list(unit.mirror_names)), unit.mirror)


def _file(folder: Path, rows: pa.Table, schema: pa.Schema | None = None) -> FileReport | None:
    with DataFile(folder, schema or rows.schema) as file:
        for start in range(0, rows.num_rows, ROW_GROUP_ROWS):
            file.write(rows.slice(start, ROW_GROUP_ROWS).columns)
        return file.finish()
