"""The apply: what the feeds hold of a turn, into the mirrors, one atomic commit per table.

Inserts alone are appended: the feed's own files become files of the mirror, in a commit of milliseconds.
After a truncate of the whole table what is left is complete by itself and overwrites the mirror. All
else is collapsed and merged in Spark's tasks: rows that change or go are taken away by deletion vectors,
rows that come make a new file. Spark's own MERGE does the same to a table, but costs seconds of CPU time
however little there is to do. Each commit carries the position with the data.

A merge fails before its commit where the mirror lacks a row that changed or holds one that was
inserted, or where the changes contradict each other. Then the mirror stays as it was, and the table is
to be set aside: going on would hide that it differs from the source.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyroaring import BitMap64
from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Identity, Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.collapsing import Collapsing, Effect, collapse_units
from pgcdc_assets.lake.compaction import compact_file, small_files
from pgcdc_assets.lake.deltacommit import Change, Mode, commit_change, commit_compaction, commit_files, unfit
from pgcdc_assets.lake.deltalog import Added, DeltaVersion
from pgcdc_assets.lake.feed import FeedFile, FeedPart, feed_columns, verbatim
from pgcdc_assets.lake.files import FileReport
from pgcdc_assets.lake.mirrors import Mirror, MirrorSchema, needs_column_mapping, refusal, sql_name, sql_path, sql_type
from pgcdc_assets.lake.pending import Pending
from pgcdc_assets.lake.targets import Target
from pgcdc_assets.lake.tasks import run_tasks

LOOK_EVERY = 10
"""Versions of a mirror."""


@dataclass(frozen=True)
class Applied:
    """What an apply did to one table; counts are rows of the mirror."""

    table: Table
    """As in the feed's part: with the columns that appeared."""
    version: int
    replay_lsn: Lsn
    """Where the mirror stands now: the end of what was applied, or where it stood if set aside."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    seconds: float = 0.0
    set_aside: tuple[Lsn, str] | None = None
    """The mirror and the changes disagree: from which LSN on, and how."""

    @property
    def looked_at(self) -> bool:
        """Whether it is the mirror's turn to be looked at for small files: their number grows by one a version."""
        return self.set_aside is None and self.version % LOOK_EVERY == 0


def apply_tables(
    spark: SparkSession, layout: Layout, identity: Identity, parts: Sequence[FeedPart], upto: Lsn
) -> list[Applied]:
    """Bring the mirrors of ``parts`` to ``upto`` (a transaction boundary), each from where it stands.

    Tables without changes are left out of the result. A table that fails for itself comes back with
    ``set_aside``; any other error ends the apply, and what was committed stands and is skipped next time.
    """
    works = [work for part in parts if (work := Work.of(layout, identity, part, upto)) is not None]
    done = [work.set_aside(work.refused) for work in works if work.refused is not None]
    ready = [work for work in works if work.refused is None]
    for work in ready:
        work.widen(spark)
    done += [work.link() for work in ready if work.linkable]
    rest = [work for work in ready if not work.linkable]
    started = time.monotonic()
    effects = collapsed(spark, [work.units() for work in rest])
    share = (time.monotonic() - started) / max(1, len(rest))
    done += [work.commit(found, share) for work, found in zip(rest, effects, strict=True)]
    return _compacted(spark, layout, identity, done)


@dataclass(frozen=True)
class Counts:
    """Rows of the mirror."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0

    @property
    def metrics(self) -> dict[str, int]:
        """As the table's history calls them."""
        return {
            "numTargetRowsInserted": self.inserted,
            "numTargetRowsUpdated": self.updated,
            "numTargetRowsDeleted": self.deleted,
        }


@dataclass(frozen=True)
class Work:
    """One table's part of an apply."""

    pending: Pending
    mirror: Mirror
    refused: str | None

    @classmethod
    def of(cls, layout: Layout, identity: Identity, part: FeedPart, upto: Lsn) -> Work | None:
        """None where the mirror has passed all of the part already, or the part holds nothing."""
        mirror = Mirror(layout, identity, part.table.name)
        stands = mirror.replay_lsn
        if stands is None:
            raise LakeError("has no copy that changes could be applied to", thing=f"mirror {part.table.name}")
        start = max(part.span.start, stands)
        pending = Pending.of(layout, part, LsnRange(start, max(start, min(part.span.end, upto))))
        return cls(pending, mirror, _unmirrorable(part.table, mirror)) if pending else None

    @property
    def table(self) -> Table:
        return self.pending.table

    @property
    def linkable(self) -> bool:
        """Whether the feed's files can be the mirror's: inserts alone, all of them wanted, names alike."""
        alike = verbatim(feed_columns(self.table)) and not MirrorSchema.of(self.table).mapped
        return alike and self.pending.part.insert_only and self.pending.whole

    @property
    def _position(self) -> dict[str, int]:
        app_id = self.mirror.generation_app_id
        assert app_id is not None
        return {app_id: self.pending.span.end}

    def widen(self, spark: SparkSession) -> None:
        """Give the mirror the columns that appeared. Done before the data: alone it changes no row."""
        columns = [f"{sql_name(name)} {sql_type(kind)}" for name, kind in _missing(self.table, self.mirror)]
        if not columns:
            return
        alter = f"ALTER TABLE {sql_path(self.mirror.path)}"
        if any("TIMESTAMP_NTZ" in column for column in columns):
            # A new table gets this feature with its columns; one that is altered has to be told.
            spark.sql(f"{alter} SET TBLPROPERTIES ('delta.feature.timestampNtz' = 'supported')").collect()
        spark.sql(f"{alter} ADD COLUMNS ({', '.join(columns)})").collect()
        passed(FaultPoint.MIRROR_WIDENED)
        del self.mirror.delta

    def link(self) -> Applied:
        started = time.monotonic()
        held = zip(self.pending.paths, self.pending.files, strict=True)
        reports = [_linked(path, self.mirror.path, file) for path, file in held]
        passed(FaultPoint.LINK_COMMITTING)
        version = commit_files(self._delta, reports, "append", self._position)
        passed(FaultPoint.LINK_COMMITTED)
        counts = Counts(sum(report.rows for report in reports))
        return self._applied(version, counts, time.monotonic() - started)

    def units(self) -> list[Collapsing]:
        return self.pending.units(self.mirror.target(self.table, () if self._alone else self._delta.files))

    @property
    def _alone(self) -> bool:
        """Whether nothing of the mirror is left, or nothing in it changes."""
        return self.pending.emptied or self.pending.part.insert_only

    @property
    def _delta(self) -> DeltaVersion:
        assert self.mirror.delta is not None
        return self.mirror.delta

    def commit(self, effects: Sequence[Effect], seconds: float) -> Applied:
        """Commit what the units found, after ``seconds`` of work."""
        started = time.monotonic()
        for effect in effects:
            if effect.mismatch is not None:
                lsn = effect.mismatch.lsn
                return self.set_aside(effect.mismatch.what, lsn if isinstance(lsn, Lsn) else None)
        counts = total(effects)
        version = self._overwritten(effects) if self._alone else self._merged(effects, counts)
        return self._applied(version, counts, seconds + time.monotonic() - started)

    def _overwritten(self, effects: Sequence[Effect]) -> int:
        reports = [effect.added for effect in effects if effect.added is not None]
        mode: Mode = "overwrite" if self.pending.emptied else "append"
        passed(FaultPoint.OVERWRITE_COMMITTING)
        version = commit_files(self._delta, reports, mode, self._position)
        passed(FaultPoint.OVERWRITE_COMMITTED)
        return version

    def _merged(self, effects: Sequence[Effect], counts: Counts) -> int:
        if counts == Counts():
            return self.mirror.version
        passed(FaultPoint.MERGE_COMMITTING)
        version = merged(self._delta, effects, self._position)
        passed(FaultPoint.MERGE_COMMITTED)
        return version

    def _applied(self, version: int, counts: Counts, seconds: float) -> Applied:
        numbers = (counts.inserted, counts.updated, counts.deleted)
        return Applied(self.table, version, self.pending.span.end, *numbers, seconds)

    def set_aside(self, reason: str, lsn: Lsn | None = None) -> Applied:
        start = self.pending.span.start
        return Applied(self.table, self.mirror.version, start, set_aside=(start if lsn is None else lsn, reason))


def merged(mirror: DeltaVersion, effects: Sequence[Effect], position: Mapping[str, int]) -> int:
    """Commit effects on the files of this version of a mirror; the new one."""
    gone: dict[str, BitMap64] = {}
    for effect in effects:
        for path, positions in effect.gone.items():
            gone[path] = gone.get(path, BitMap64()) | positions
    change = Change([effect.added for effect in effects if effect.added is not None], gone)
    return commit_change(mirror, change, position, total(effects).metrics)


def _compacted(spark: SparkSession, layout: Layout, identity: Identity, done: Sequence[Applied]) -> list[Applied]:
    """Make the small files of mirrors that gathered many one; what was applied, with the versions then."""
    versions = {result.table.name: result.version for result in done}
    works: list[tuple[TableName, DeltaVersion, tuple[Added, ...]]] = []
    targets: list[Target] = []
    for result in done:
        mirror = Mirror(layout, identity, result.table.name)
        if result.looked_at and mirror.delta is not None and (small := small_files(mirror.delta.files)):
            works.append((mirror.name, mirror.delta, small))
            targets.append(mirror.target(result.table, small))
    for (name, delta, small), report in zip(works, run_tasks(spark, compact_file, targets), strict=True):
        versions[name] = commit_compaction(delta, small, report)
        passed(FaultPoint.MIRROR_FILES_COMMITTED)
    return [replace(result, version=versions[result.table.name]) for result in done]


def collapsed(spark: SparkSession, works: Sequence[Sequence[Collapsing]]) -> list[list[Effect]]:
    """Collapse the units of several tables in one job, many small ones to a task; effects in the same order."""
    units = [(place, unit) for place, work in enumerate(works) for unit in work]
    workers = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    groups: list[list[tuple[int, Collapsing]]] = [[] for _ in range(min(2 * workers, len(units)))]
    sizes = [0] * len(groups)
    for place, unit in sorted(units, key=lambda item: -_size(item[1])):
        lightest = sizes.index(min(sizes))
        groups[lightest].append((place, unit))
        sizes[lightest] += _size(unit)
    results = run_tasks(spark, collapse_units, [[unit for _, unit in group] for group in groups])
    effects: list[list[Effect]] = [[] for _ in works]
    for group, found in zip(groups, results, strict=True):
        for (place, _), effect in zip(group, found, strict=True):
            effects[place].append(effect)
    return effects


def _size(unit: Collapsing) -> int:
    return sum(path.stat().st_size for path in unit.files) + 1


def total(effects: Sequence[Effect]) -> Counts:
    return Counts(
        sum(effect.inserted for effect in effects),
        sum(effect.updated for effect in effects),
        sum(effect.deleted for effect in effects),
    )


def _linked(path: Path, folder: Path, file: FeedFile) -> FileReport:
    """The feed's file under a name in the mirror's folder: the same bytes, where the file system can."""
    target = folder / f"part-{uuid.uuid4().hex}.parquet"
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
    return replace(file.report, path=target.name)


def _missing(table: Table, mirror: Mirror) -> list[tuple[str, object]]:
    """Columns that the mirror has to get, with their types."""
    if mirror.delta is None:
        return []
    have = {field.name for field in mirror.delta.schema.fields}
    return [(field.name, field.type) for field in MirrorSchema.of(table).arrow if field.name not in have]


def _unmirrorable(table: Table, mirror: Mirror) -> str | None:
    """Why the mirror cannot take the changes, or the columns that appeared."""
    reason = refusal(table)
    if reason is not None or mirror.delta is None:
        return reason
    reason = unfit(mirror.delta)
    if reason is not None:
        return f"its mirror {reason}"
    names = [name for name, _ in _missing(table, mirror)]
    mapped = mirror.delta.configuration.get("delta.columnMapping.mode") == "name"
    if names and needs_column_mapping(names) and not mapped:
        return f"column {names[0]!r} appeared, whose name the mirror can hold only after a new copy"
    return None
