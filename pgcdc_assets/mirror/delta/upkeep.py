"""Upkeep of mirrors: merges small files and deletion vectors, and protects the versions that readers are promised.

Spark's tasks write the files. Whether there is anything to do is decided without Spark. The protection is against other
writers, whose VACUUM could delete those versions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.checkpoint import make_checkpoint
from pgcdc_assets.delta.commit import commit_rewritten
from pgcdc_assets.delta.definition import commit_properties
from pgcdc_assets.delta.log import Added, DeltaVersion
from pgcdc_assets.delta.logfiles import VERSIONED
from pgcdc_assets.delta.tombstones import lacking
from pgcdc_assets.errors import LakeError
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.mirror.delta.compaction import compact_mirror
from pgcdc_assets.mirror.delta.mirror import STRUCTURE, Mirror
from pgcdc_assets.spark.tasks import run_tasks
from pgcdc_assets.store import storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE_BYTES: Final = 128 << 20
"""The target size of a file, the same as in a copy. Files of one gigabyte, Delta's own default, would be rewritten too
often."""
SMALL_BYTES: Final = FILE_BYTES // 4
MOST_SMALL: Final = 20
"""Up to this many small files are left alone: each costs a reader a millisecond."""
DELETED_SHARE: Final = 5
"""Files are worth rewriting if one row in this many is deleted but still in them; see FEWEST_DELETED."""
FEWEST_DELETED: Final = 100_000
"""Files with fewer deleted rows are not worth rewriting, at any share."""
QUIET: Final = timedelta(days=10)
"""A third of the time that Delta keeps its log: see :func:`keep_readable`."""


def worth_optimizing(live: Sequence[Added]) -> bool:
    """Whether readers gain from OPTIMIZE: many small files, or many deleted rows that are still in the files."""
    small = sum(file.size < SMALL_BYTES for file in live)
    deleted, rows = sum(file.deleted for file in live), sum(file.rows or 0 for file in live)
    return small > MOST_SMALL or (deleted >= FEWEST_DELETED and deleted * DELETED_SHARE >= rows)


def optimize(session: SparkSession, mirror: Mirror, table: Table) -> int:
    """Merge the mirror's small files, and rewrite files with many deleted rows; returns the mirror's version after
    that.

    No row and no position changes: the new version is at the same position as the previous version.
    """

    def attempt() -> int:
        now = mirror.again()
        delta = _version(now)
        groups = worth_merging(delta.files)
        made = run_tasks(session, compact_mirror, [now.target(table, group) for group in groups])
        if failed := [one.failure for one in made if one.failure is not None]:
            raise LakeError(f"could not be optimized: {failed[0]}", thing=f"mirror {mirror.name}")
        files = [file for group in groups for file in group]
        return commit_rewritten(delta, files, [one.report for one in made if one.report is not None])

    return again_after_lost_races(attempt)


def worth_merging(live: Sequence[Added]) -> list[list[Added]]:
    """Groups of files; each group is written as one file. They are small files, and files with many deleted rows, which
    may also be alone in a group."""
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


def keep_promised(mirror: Mirror, retention: timedelta) -> bool:
    """Set the mirror's properties so that no VACUUM by any writer deletes what is promised for ``retention``. Returns
    whether the properties had to be changed."""
    assert mirror.delta is not None
    properties = lacking(mirror.delta.configuration, retention)
    if properties:
        again_after_lost_races(lambda: commit_properties(_version(mirror.again()), properties))
    return bool(properties)


def stands_as(mirror: Mirror, version: int) -> bool:
    """Whether the mirror has taken nothing from the source since that version: it has the same copy, ``replay_lsn`` and
    structure.

    This is true after an OPTIMIZE or a repair. False also if the version can no longer be opened.
    """
    older = mirror.at(version)
    if older is None or mirror.snapshot_lsn is None:
        return False
    return _standing(older) == _standing(mirror)


def _standing(mirror: Mirror) -> tuple[Lsn | None, Lsn | None, str | None]:
    assert mirror.delta is not None
    return mirror.snapshot_lsn, mirror.replay_lsn, mirror.delta.configuration.get(STRUCTURE)


def keep_readable(mirror: Mirror, quiet: timedelta = QUIET) -> bool:
    """Write a checkpoint of the newest version if it has been the newest for long; returns whether that was needed.

    Delta deletes commits and checkpoints older than ``delta.logRetentionDuration`` when it writes the next checkpoint.
    A version that was the newest for longer would be deleted with the first changes after it, although the points of
    the last days name it. A recent checkpoint of that version is not deleted.
    """
    before = time.time() - quiet.total_seconds()
    of_version = (entry for entry in storage.list_after(mirror.path / DELTA_LOG)
                  if (match := VERSIONED.match(entry.name)) and int(match[1]) == mirror.version)  # fmt: skip
    if any(entry.written > before for entry in of_version):
        return False
    make_checkpoint(mirror.path, mirror.version)
    return True


def _version(mirror: Mirror) -> DeltaVersion:
    assert mirror.delta is not None
    return mirror.delta
