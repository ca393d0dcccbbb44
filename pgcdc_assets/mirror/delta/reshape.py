"""Changes the structure of a mirror from its own rows: the source is not read.

One commit changes the columns, replaces the rows by rows with these columns, and records the table's structure
(:data:`STRUCTURE`), so that a run after a crash knows it. The position stays. If the commit only adds columns that are
NULL in all rows, the files stay. With ``by_metadata``, the files also stay if columns are renamed, dropped, or get a
wider type; fewer readers can then read the mirror. The rows of removed partitions are deleted by deletion vectors.

Spark's workers import this module for the task that writes the new rows, so it must not import Spark.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import Schema as DeltaSchema
from pyroaring import BitMap64

from pgcdc_assets.core.catalog import Column, Leaf, Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import ZERO, LsnRange
from pgcdc_assets.delta.commit import FileChange, commit_change, unfit
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.delta.definition import commit_columns, replace_table
from pgcdc_assets.delta.log import Added, DeltaVersion
from pgcdc_assets.delta.mapping import HIGHEST, Columns, physical, stated
from pgcdc_assets.errors import LakeError
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.feed.schema import RAW
from pgcdc_assets.mirror.delta.applytask import Collapsing, collapse_units
from pgcdc_assets.mirror.delta.mirror import Mirror, Mirrors, structured
from pgcdc_assets.mirror.delta.mirrorschema import OWN_COLUMNS, mirror_columns, needs_column_mapping, own_fields
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget, RowGroup, gathered
from pgcdc_assets.mirror.net.neteffect import map_keys, raw_maps, raw_texts
from pgcdc_assets.protocol.text.typed import typed
from pgcdc_assets.protocol.text.types import may_not_fit
from pgcdc_assets.spark.tasks import cores, run_tasks
from pgcdc_assets.store import storage
from pgcdc_assets.structure.successor import holds

if TYPE_CHECKING:
    from pgcdc_assets.spark.session import SparkOnDemand

TASK_BYTES: Final = 64 << 20
"""One task merges files up to about this total size into one file. A larger file has its own task."""
LEFT_CORES: Final = 1
"""The number of cores that stay free for turns of other tables. The tasks run in waves on the other cores, and each
wave is a Spark job. With one large job, turns would wait for its end, because Spark runs earlier jobs first."""


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
    raw_names: Mapping[str, str | None]
    """The column names that change in ``_pgcdc_raw`` (the texts of values that do not fit, by column name), with their
    new names; None for a dropped column."""


def reshape_mirror(
    spark: SparkOnDemand, mirrors: Mirrors, before: Table, after: Table, *, by_metadata: bool = False
) -> int:
    """Change the mirror from the structure ``before`` to ``after``: see
    :meth:`pgcdc_assets.mirror.target.Target.reshape`. The mirror may already have the new structure, if an earlier run
    died. If ``after`` lacks leaf partitions, their rows are deleted, and the columns do not change. ``by_metadata``: no
    file is rewritten if Delta's column mapping and type widening can express the change."""
    found = mirrors.open(after.name)
    if found.snapshot_lsn is None:
        raise LakeError("contains no copy of the table, so its structure cannot change", thing=f"mirror {after.name}")
    return again_after_lost_races(partial(_reshaped, spark, found, before, after, by_metadata))


def _reshaped(spark: SparkOnDemand, found: Mirror, before: Table, after: Table, by_metadata: bool) -> int:
    mirror = found.again()
    delta = mirror.delta
    if delta is None or mirror.snapshot_lsn != found.snapshot_lsn:
        raise LakeError("was copied again while its structure was changed", thing=f"mirror {after.name}")
    if (reason := unfit(delta)) is not None:
        raise LakeError(reason, thing=f"mirror {after.name}")
    columns = _sourced(delta, _taken_by(mirror, before), after)
    structure = structured(after, mirror.snapshot_lsn)
    passed(FaultPoint.RESHAPE_COMMITTING)
    stay = {leaf.oid for leaf in after.leaves}
    if gone := [leaf for leaf in before.leaves if leaf.oid not in stay]:
        version = _without_leaves(spark, mirror, before, gone, structure)
    elif _same_rows(delta, columns) and not (needs_column_mapping([c.name for c in columns]) and not mirror.mapped):
        more = _schema([one for one in columns if not one.unchanged])
        version = commit_columns(delta, stated(delta.metadata).with_more(more), structure)
    elif by_metadata and _same_values(delta, columns):
        version = _with_names(mirror, columns, structure)
    else:
        version = _with_rows(spark, mirror, columns, structure)
    passed(FaultPoint.RESHAPE_COMMITTED)
    return version


def _taken_by(mirror: Mirror, known: Table) -> Mapping[int, str]:
    """The names of the table's columns in the mirror, by attnum. Includes the columns that the mirror itself records,
    because a turn may have added columns to the mirror, and failed before the table's new structure was stored."""
    told = mirror.followed
    columns = (*(told.columns if told is not None else ()), *known.columns)
    return {column.attnum: column.name for column in columns}


def _sourced(delta: DeltaVersion, names: Mapping[int, str], after: Table) -> tuple[Sourced, ...]:
    """The mirror's new columns: the table's columns, the columns that pgcdc adds, and columns that other writers added.
    ``names``: the mirror's present names of the table's columns, by attnum."""
    held = {field.name: field.type for field in delta.columns}
    found: list[Sourced] = []
    own = {field.name for field in own_fields(after)}
    columns = {column.name: column for column in after.columns}
    for field in mirror_columns(after):
        if field.name in own:
            found.append(Sourced(field.name, field.type, field.name))
            continue
        column = columns[field.name]
        source = names.get(column.attnum)
        if source is not None and source not in held:
            raise LakeError(f"no longer has column {source!r}, because another writer dropped or renamed it",
                            thing=f"mirror {after.name}")  # fmt: skip
        if source is None and column.missing is None and field.name not in names.values():
            # Another writer may have added a column of this name to the mirror. A turn uses such a column, too.
            source = field.name if held.get(field.name) == field.type else None
        found.append(Sourced(field.name, field.type, source, column))
    attnums = {column.attnum for column in after.columns}
    dropped = {name for attnum, name in names.items() if attnum not in attnums}
    elsewhere = {one.held for one in found} | dropped
    used = {one.name.lower() for one in found}
    rest = [name for name in held if name not in elsewhere | OWN_COLUMNS and name.lower() not in used]
    return (*found, *(Sourced(name, held[name], name) for name in rest))


def _same_rows(delta: DeltaVersion, columns: Sequence[Sourced]) -> bool:
    """Whether all files can stay, because the only changes are new columns that are NULL in all rows."""
    held = {field.name: str(field.type) for field in delta.schema.fields}
    wanted = {field.name: str(field.type) for field in DeltaSchema.from_arrow(_schema(columns)).fields}
    if not held.keys() <= wanted.keys():
        return False
    return all(
        held.get(one.name) == wanted[one.name] if one.unchanged else one.null and one.name not in held
        for one in columns
    )


def _schema(columns: Sequence[Sourced]) -> pa.Schema:
    return pa.schema([pa.field(one.name, one.type) for one in columns])


def _sources(columns: Sequence[Sourced]) -> dict[str, str]:
    return {one.name: one.held for one in columns if one.held is not None}


def _same_values(delta: DeltaVersion, columns: Sequence[Sourced]) -> bool:
    """Whether all files can stay if the metadata maps the columns: new columns are NULL, each other column keeps or
    widens its type, and ``_pgcdc_raw`` has no text of a renamed or dropped column."""
    held = delta.columns
    if not all(one.null if one.held is None else holds(held.field(one.held).type, one.type) for one in columns):
        return False
    names = [name for name in _raw_names(held, columns) if may_not_fit(held.field(name).type)]
    return not (names and has_texts(MergeTarget.of(delta), names))


def _with_names(mirror: Mirror, columns: Sequence[Sourced], structure: dict[str, str]) -> int:
    """Change the columns, and keep the files. Column mapping is turned on only if it is needed, because some readers do
    not support it."""
    delta, sources = mirror.existing, _sources(columns)
    stay = all(one.unchanged or one.held is None for one in columns) and set(delta.columns.names) == set(sources)
    mapped = mirror.mapped or not stay or needs_column_mapping([one.name for one in columns])
    wanted = stated(delta.metadata).followed_by(_schema(columns), sources, mapped=mapped)
    return commit_columns(delta, wanted, structure)


def _with_rows(spark: SparkOnDemand, mirror: Mirror, columns: Sequence[Sourced], structure: dict[str, str]) -> int:
    delta, schema = mirror.existing, _schema(columns)
    highest = int(delta.configuration.get(HIGHEST, 0))
    mapped = mirror.mapped or needs_column_mapping(schema.names)
    wanted = Columns.of(schema, mapped=mapped, highest=highest).commented_as(stated(delta.metadata), _sources(columns))
    target = physical(schema, wanted.schema)
    work = Projection(MergeTarget.of(delta), tuple(columns), target, _raw_names(delta.columns, columns))
    reports = _projected(spark, work, delta.files) if delta.files else []
    left = sum((file.rows or 0) - file.deleted for file in delta.files)
    if sum(report.rows for report in reports) != left:
        raise LakeError(
            f"has {left} rows, but the files with its new structure have another number of rows",
            thing=f"mirror {mirror.name}",
        )
    passed(FaultPoint.RESHAPED_FILES_WRITTEN)
    return replace_table(delta, wanted, reports, {}, structure)


def _projected(spark: SparkOnDemand, work: Projection, files: Sequence[Added]) -> list[FileReport]:
    at_a_time = max(1, cores(spark()) - LEFT_CORES)
    parts = [replace(work, held=replace(work.held, files=group)) for group in _groups(files, 2 * at_a_time)]
    waves = [parts[start : start + at_a_time] for start in range(0, len(parts), at_a_time)]
    made = [report for wave in waves for report in run_tasks(spark(), project, wave)]
    return [report for report in made if report is not None]


def _raw_names(held: pa.Schema, columns: Sequence[Sourced]) -> Mapping[str, str | None]:
    """The column names in ``_pgcdc_raw`` that change, with their new names (None for a dropped column)."""
    now = {one.held: one.name for one in columns if one.held is not None}
    return {name: now.get(name) for name in held.names if now.get(name) != name}


def _groups(files: Sequence[Added], fewest: int) -> list[tuple[Added, ...]]:
    """Group the files, one group for each task. Small files share a group, but there are at least ``fewest`` groups if
    there are enough files, so that all cores have work."""
    full = min(TASK_BYTES, sum(file.size for file in files) // fewest)
    groups: list[tuple[Added, ...]] = []
    group: tuple[Added, ...] = ()
    for file in sorted(files, key=lambda file: -file.size):
        group = (*group, file)
        if sum(one.size for one in group) >= full:
            groups.append(group)
            group = ()
    return [*groups, group] if group else groups


def _without_leaves(
    spark: SparkOnDemand, mirror: Mirror, table: Table, leaves: Sequence[Leaf], structure: dict[str, str]
) -> int:
    """Delete the rows of these leaves from the mirror. The same commit records the structure. Returns the new version.
    ``table``: the table as the mirror has it, including the leaves."""
    delta = mirror.existing
    names = tuple(str(leaf.name) for leaf in leaves)
    shares = max(1, cores(spark())) if delta.files else 0
    units = [Collapsing(table, (), LsnRange(ZERO, ZERO), mirror.target(table, delta.files[share::shares]), leaves=names)
             for share in range(min(shares, len(delta.files)))]  # fmt: skip
    effects = [effect for done in run_tasks(spark(), collapse_units, [[unit] for unit in units]) for effect in done]
    for effect in effects:
        if effect.mismatch is not None:
            raise LakeError(effect.mismatch.what, thing=f"mirror {mirror.name}")
    gone: dict[str, BitMap64] = {path: rows for effect in effects for path, rows in effect.gone.items()}
    metrics = {"numTargetRowsDeleted": sum(effect.deleted for effect in effects)}
    return commit_change(delta, FileChange([], gone), {}, metrics, structure)


# The task ---------------------------------------------------------------------------------------------


def project(work: Projection) -> FileReport | None:
    """Write the rows to one file; None if there are no rows. Needs memory for about one row group."""
    with DataFile(work.held.folder, work.files) as file:
        for rows in gathered(_rows(work, group) for group in work.held.groups()):
            file.write(rows.columns)
        report = file.finish()
    passed(FaultPoint.RESHAPED_FILE_WRITTEN)
    return report


def has_texts(held: MergeTarget, names: Collection[str]) -> bool:
    """Whether a live row of the files has a text under one of these names in ``_pgcdc_raw``."""
    files = [partial(_file_has_texts, replace(held, files=(file,)), frozenset(names)) for file in held.files]
    return any(storage.together(held.folder, files))


def _file_has_texts(held: MergeTarget, names: frozenset[str]) -> bool:
    for group in held.groups():
        raw = group.read([RAW])[RAW]
        if raw.null_count < group.rows and names & set(map_keys(raw.filter(pa.array(group.alive))).to_pylist()):
            return True
    return False


def _rows(work: Projection, group: RowGroup) -> pa.Table:
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
