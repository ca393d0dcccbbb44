"""Upkeep of mirrors: small files and deletion vectors merged, and what readers are promised kept from other hands.

Mirrors are optimized by Spark alone; whether there is anything to do is seen without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.delta.commit import commit_properties, commit_rewritten, make_checkpoint
from pgcdc_assets.delta.datafile import in_int96, read_footer
from pgcdc_assets.delta.failures import again_after_lost_races
from pgcdc_assets.delta.log import Added, DeltaVersion
from pgcdc_assets.delta.tombstones import lacking
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta.compaction import compact_file
from pgcdc_assets.mirror.delta.mirror import Mirror, sql_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE_BYTES: Final = 128 << 20
"""The size that OPTIMIZE aims at, as the copy does; Delta's own gigabyte would be written again too often."""
SMALL_BYTES: Final = FILE_BYTES // 4
MOST_SMALL: Final = 20
"""This many small files are left alone: each costs a reader a millisecond, and an OPTIMIZE costs seconds."""
DELETED_SHARE: Final = 5
"""A fifth of the rows deleted, but still in the files, is worth writing them again,"""
FEWEST_DELETED: Final = 100_000
"""unless they are few."""
QUIET: Final = timedelta(days=10)
"""A third of the time that Delta keeps its log: see :func:`keep_readable`."""

_OPTIMIZE_SETTINGS: Final = {
    "spark.databricks.delta.optimize.maxFileSize": str(FILE_BYTES),
    "spark.databricks.delta.optimize.minFileSize": str(SMALL_BYTES),
}


def worth_optimizing(live: Sequence[Added]) -> bool:
    """Whether readers gain: many small files, or many rows that are deleted and still there."""
    small = sum(file.size < SMALL_BYTES for file in live)
    deleted, rows = sum(file.deleted for file in live), sum(file.rows or 0 for file in live)
    return small > MOST_SMALL or (deleted >= FEWEST_DELETED and deleted * DELETED_SHARE >= rows)


def optimize(session: SparkSession, mirror: Mirror) -> int:
    """Merge the mirror's small files, and write anew those with many deleted rows; its version then.

    No row changes, and no position: the new version stands where the one before did.
    """
    with _failing_as("optimized", mirror):
        _own_session(session, _OPTIMIZE_SETTINGS).sql(f"OPTIMIZE {sql_path(mirror.path)}").collect()
    return mirror.again().version


def keep_promised(mirror: Mirror, retention: timedelta) -> bool:
    """Have the mirror's properties spare what is promised for ``retention`` from anybody's VACUUM; whether they had to
    be changed. Lakes of earlier versions kept deleted files for an hour."""
    assert mirror.delta is not None
    properties = lacking(mirror.delta.configuration, retention)
    if properties:
        again_after_lost_races(lambda: commit_properties(_version(mirror.again()), properties))
    return bool(properties)


def without_int96(mirror: Mirror, table: Table) -> int:
    """Write the files anew whose timestamps are INT96, which other readers than Spark read wrong before 1678 and after
    2261; how many there were. Spark writes such files unless it is told otherwise, as in a user's OPTIMIZE.

    One file at a time, a row group's worth in memory.
    """

    def attempt() -> int:
        now = mirror.again()
        delta = _version(now)
        odd = [(file, footer) for file in delta.files if in_int96(footer := read_footer(now.path / file.path))]
        counted = [replace(file, rows=footer.num_rows) for file, footer in odd]
        reports = [compact_file(now.target(table, (file,))) for file in counted]
        if counted:
            commit_rewritten(delta, counted, [report for report in reports if report is not None])
        return len(counted)

    return again_after_lost_races(attempt)


def stands_as(mirror: Mirror, version: int) -> bool:
    """Whether the mirror has, since that version, taken nothing from the stream: the same copy and ``replay_lsn``.

    So it is after an OPTIMIZE or a repair. False also where the version can no longer be opened.
    """
    older = mirror.at(version)
    if older is None or mirror.snapshot_lsn is None:
        return False
    return (older.snapshot_lsn, older.replay_lsn) == (mirror.snapshot_lsn, mirror.replay_lsn)


def keep_readable(mirror: Mirror, quiet: timedelta = QUIET) -> bool:
    """Make a checkpoint of a version that has stood for long; whether that was needed.

    Delta deletes commits and checkpoints older than ``delta.logRetentionDuration`` at the next checkpoint.
    A version that stood for longer would be gone with the first changes after it, though the points of
    the last days name it. A young checkpoint of it stays.
    """
    log = mirror.path / DELTA_LOG
    before = time.time() - quiet.total_seconds()
    files = list(log.glob(f"{mirror.version:020}.*json")) + list(log.glob(f"{mirror.version:020}.checkpoint*.parquet"))
    if any(file.stat().st_mtime > before for file in files):
        return False
    make_checkpoint(mirror.path, mirror.version)
    return True


@contextmanager
def _failing_as(done: str, mirror: Mirror) -> Iterator[None]:
    try:
        yield
    except PySparkException as error:
        reason = str(error).strip().splitlines()[0]
        raise LakeError(f"could not be {done}: {reason}", thing=f"mirror {mirror.name}") from error


def _version(mirror: Mirror) -> DeltaVersion:
    assert mirror.delta is not None
    return mirror.delta


def _own_session(session: SparkSession, settings: dict[str, str]) -> SparkSession:
    own = session.newSession()
    for key, value in settings.items():
        own.conf.set(key, value)
    return own
