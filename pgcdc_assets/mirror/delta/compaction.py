"""Rewrites files of mirrors without a change of rows or position: during sync, and by ``pgcdc maintain`` (OPTIMIZE).

Each turn of a sync (one apply) leaves a small file in each mirror that changed. During sync, many small files are
merged into one, so that a turn's cost does not grow with the number of turns. Each turn also rewrites the whole
deletion vector of every file in which it deletes rows. So during sync, a large file with many deleted rows is rewritten
without these rows, one file at a time. Files of medium size slow down only readers: ``pgcdc maintain`` merges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.delta.commit import commit_rewritten
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.delta.log import Added, DeltaVersion
from pgcdc_assets.errors import LakeError
from pgcdc_assets.failures import again_after_lost_races, contained
from pgcdc_assets.mirror.delta.mirror import Mirror, Mirrors
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget, gathered
from pgcdc_assets.mirror.target import Applied
from pgcdc_assets.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TURN_SMALL_BYTES: Final = 4 << 20
"""Files smaller than this may be merged during sync."""
FILE_BYTES: Final = 128 << 20
"""The target size of a file of OPTIMIZE, as in a copy. With Delta's default of one gigabyte, a few deleted rows could
cause the rewrite of a very large file."""
SMALL_BYTES: Final = FILE_BYTES // 4
MOST_SMALL: Final = 20
"""OPTIMIZE runs if a mirror has more small files than this. A small file costs a reader only about a millisecond."""
DELETED_SHARE: Final = 5
"""OPTIMIZE also runs if a mirror's files have at least FEWEST_DELETED deleted rows, and at least one of this many rows
is deleted."""
FEWEST_DELETED: Final = 100_000


@dataclass(frozen=True)
class Compaction:
    """The limits that decide which files of a mirror are rewritten during sync."""

    look_every: int = 10
    """Versions of a mirror between two checks of its files. Each version may add a small file, and deleted rows."""
    most_small: int = 32
    """Small files are merged if a mirror has more of them than this. Opening a file costs an apply less than a
    millisecond."""
    worn_share: int = 32
    """A file is worn if at least one in this many of its rows is deleted. Each turn that deletes rows of a file writes
    its deletion vector again, with about two bytes for each deleted row."""
    fewest_worn: int = 10_000
    """A file with fewer deleted rows than this is never worn."""

    def worth_rewriting(self, live: Sequence[Added]) -> tuple[Added, ...]:
        """The files to rewrite as one file now: all small files if there are many, otherwise the worn file with the
        most deleted rows. Empty if there is neither."""
        return self.small_files(live) or self.worn_file(live)

    def small_files(self, live: Sequence[Added]) -> tuple[Added, ...]:
        small = tuple(file for file in live if file.size < TURN_SMALL_BYTES and file.rows is not None)
        return small if len(small) > self.most_small else ()

    def worn_file(self, live: Sequence[Added]) -> tuple[Added, ...]:
        counted = [(file, file.rows) for file in live if file.rows is not None]
        worn = [file for file, rows in counted if file.deleted >= max(self.fewest_worn, rows / self.worn_share)]
        return tuple(sorted(worn, key=lambda file: -file.deleted)[:1])


COMPACTION: Final = Compaction()


@dataclass(frozen=True)
class Compacted:
    """The result of rewriting a mirror's files. ``failure``: why a file could not be read."""

    reports: tuple[FileReport, ...] = ()
    """The new file; empty if all rows of the old files are deleted."""
    failure: str | None = None


def compact_mirror(target: MergeTarget) -> Compacted:
    """Write the live rows of the target's files to one new file. If a file cannot be read, only this mirror's rewrite
    fails. Runs in a Spark task."""
    with contained() as failed:
        return Compacted(compact_file(target))
    return Compacted(failure=failed.told)


def compact_file(target: MergeTarget) -> tuple[FileReport, ...]:
    """Write the live rows (rows that no deletion vector deletes) of the target's files to one file, if there are
    any."""
    with DataFile(target.folder, target.schema) as file:
        for rows in gathered(group.read(target.names).filter(pa.array(group.alive)) for group in target.groups()):
            file.write(rows.columns)
        report = file.finish()
    passed(FaultPoint.MIRROR_FILES_WRITTEN)
    return () if report is None else (report,)


def compact_applied(
    spark: SparkSession, mirrors: Mirrors, compaction: Compaction, done: Sequence[Applied]
) -> list[Applied]:
    """Rewrite files of the mirrors in ``done``, the results of an apply, that have many small files, or a file with
    many deleted rows. Returns ``done`` with the new versions. A table whose files cannot be read is set aside."""
    outcomes = {result.table.name: result for result in done}
    works: list[tuple[Applied, DeltaVersion, tuple[Added, ...]]] = []
    targets: list[MergeTarget] = []
    for result in done:
        if result.set_aside is not None or result.outrun or result.version % compaction.look_every:
            continue
        mirror = mirrors.open(result.table.name)
        if mirror.delta is not None and (files := compaction.worth_rewriting(mirror.delta.files)):
            works.append((result, mirror.delta, files))
            targets.append(mirror.target(result.table, files))
    for (result, delta, files), made in zip(works, run_tasks(spark, compact_mirror, targets), strict=True):
        outcomes[result.table.name] = _with_compacted(result, delta, files, made)
    return list(outcomes.values())


def _with_compacted(result: Applied, delta: DeltaVersion, files: Sequence[Added], made: Compacted) -> Applied:
    """Commit the new file in place of the old files. If another writer's commit came first, nothing is replaced, and a
    later check tries again."""
    if made.failure is not None:
        return replace(result, set_aside=(result.replay_lsn, made.failure))
    with contained() as failed:
        version = commit_rewritten(delta, files, made.reports)
    if failed.outrun:
        return result
    if failed.reason is not None:
        return replace(result, set_aside=(result.replay_lsn, failed.reason))
    passed(FaultPoint.MIRROR_FILES_COMMITTED)
    return replace(result, version=version)


def worth_optimizing(live: Sequence[Added]) -> bool:
    """Whether OPTIMIZE helps readers: the mirror has many small files, or its files have many deleted rows."""
    small = sum(file.size < SMALL_BYTES for file in live)
    deleted, rows = sum(file.deleted for file in live), sum(file.rows or 0 for file in live)
    return small > MOST_SMALL or (deleted >= FEWEST_DELETED and deleted * DELETED_SHARE >= rows)


def optimize(session: SparkSession, mirror: Mirror, table: Table) -> int:
    """Merge the mirror's small files, and rewrite files with many deleted rows. Returns the mirror's new version. Rows
    and position do not change."""

    def attempt() -> int:
        now = mirror.again()
        delta = now.existing
        groups = worth_merging(delta.files)
        made = run_tasks(session, compact_mirror, [now.target(table, group) for group in groups])
        if failed := [one.failure for one in made if one.failure is not None]:
            raise LakeError(f"could not be optimized: {failed[0]}", thing=f"mirror {mirror.name}")
        files = [file for group in groups for file in group]
        return commit_rewritten(delta, files, [report for one in made for report in one.reports])

    return again_after_lost_races(attempt)


def worth_merging(live: Sequence[Added]) -> list[list[Added]]:
    """The files that OPTIMIZE rewrites: small files, and files with many deleted rows. Each group becomes one file. A
    group may have only one file, if many of its rows are deleted."""
    chosen = [file for file in live if file.rows is not None and (file.size < SMALL_BYTES or _many_gone(file))]
    groups: list[list[Added]] = []
    size = float(FILE_BYTES)
    for file in sorted(chosen, key=lambda file: file.size):
        left = file.size * (1 - file.deleted / file.rows) if file.rows else 0.0
        if size + left > FILE_BYTES:
            groups.append([])
            size = 0.0
        groups[-1].append(file)
        size += left
    return [group for group in groups if len(group) > 1 or _many_gone(group[0])]


def _many_gone(file: Added) -> bool:
    return file.deleted * DELETED_SHARE >= (file.rows or 0) > 0
