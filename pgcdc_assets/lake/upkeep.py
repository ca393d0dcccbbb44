"""Upkeep of mirrors: small files and deletion vectors merged, and what no promised version needs deleted.

Mirrors are optimized and vacuumed by Spark alone; whether there is anything to do is seen without it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from pgcdc_assets.core.deltafiles import checkpoint_files
from pgcdc_assets.core.durable import sync_files, sync_folder
from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.deltacommit import make_checkpoint
from pgcdc_assets.lake.deltalog import Added, newest_checkpoint
from pgcdc_assets.lake.mirrors import Mirror, sql_path
from pgcdc_assets.lake.references import References, references

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE_BYTES: Final = 128 << 20
"""The size that OPTIMIZE aims at, as the copy does; Delta's own gigabyte would be written again too often."""
SMALL_BYTES: Final = FILE_BYTES // 4
MOST_SMALL: Final = 20
"""So many small files are left alone: each costs a reader a millisecond, an OPTIMIZE costs seconds."""
DELETED_SHARE: Final = 5
"""A fifth of the rows deleted, but still in the files, is worth writing them again,"""
FEWEST_DELETED: Final = 100_000
"""unless they are few."""
QUIET: Final = timedelta(days=10)
"""A third of the time that Delta keeps its log: see :func:`keep_readable`."""

_VERSIONED: Final = re.compile(r"\.?(\d{20})\.")
"""What is in a log by version: commits, checkpoints, and the checksums that Spark keeps beside them."""

_OPTIMIZE_SETTINGS: Final = {
    "spark.databricks.delta.optimize.maxFileSize": str(FILE_BYTES),
    "spark.databricks.delta.optimize.minFileSize": str(SMALL_BYTES),
}
_VACUUM_SETTINGS: Final = {
    # What may go is decided by versions, and told as an inventory: the age that Delta checks says nothing.
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    # Otherwise each VACUUM makes two versions of the table.
    "spark.databricks.delta.vacuum.logging.enabled": "false",
}


@dataclass(frozen=True)
class Garbage:
    """Files in a mirror's folder that no version from the oldest promised one on refers to."""

    files: tuple[Path, ...]
    bytes: int


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


def stands_as(mirror: Mirror, version: int) -> bool:
    """Whether the mirror has, since that version, taken nothing from the stream: the same copy and ``replay_lsn``.

    So it is after an OPTIMIZE or a repair. False also where the version can no longer be opened.
    """
    older = mirror.at(version)
    if older is None or mirror.snapshot_lsn is None:
        return False
    return (older.snapshot_lsn, older.replay_lsn) == (mirror.snapshot_lsn, mirror.replay_lsn)


def of_mirror(mirror: Mirror, oldest: int | None = None) -> References:
    """What the mirror's versions refer to, from ``oldest`` (the present one) on."""
    return references(mirror.path, mirror.version if oldest is None else min(oldest, mirror.version), mirror.version)


def garbage(mirror: Mirror, oldest: int, grace: timedelta) -> Garbage:
    """What may be deleted where ``oldest`` is the lowest version that readers are promised.

    Also what a killed run left, once it is older than ``grace``: its last process may take a moment to die.
    """
    needed = of_mirror(mirror, oldest).needed
    before = time.time() - grace.total_seconds()
    found = [
        (file, status.st_size) for file in _data_files(mirror.path)
        if str(file.relative_to(mirror.path)) not in needed and (status := file.stat()).st_ctime <= before
    ]  # fmt: skip
    return Garbage(tuple(file for file, _ in found), sum(size for _, size in found))


def vacuum(session: SparkSession, mirror: Mirror, found: Garbage) -> None:
    """Have Delta delete the files: it refuses those that the present version has, whatever it is told."""
    own = _own_session(session, _VACUUM_SETTINGS)
    # As Hadoop writes paths: with a scheme, and without escapes.
    rows = [(f"file:{file}", file.stat().st_size, False, int(file.stat().st_mtime * 1000)) for file in found.files]
    columns = "path string, length bigint, isDir boolean, modificationTime bigint"
    own.createDataFrame(rows, columns).createOrReplaceTempView("pgcdc_inventory")
    inventory = "(SELECT path, length, isDir, modificationTime FROM pgcdc_inventory)"
    with _failing_as("vacuumed", mirror):
        own.sql(f"VACUUM {sql_path(mirror.path)} USING INVENTORY {inventory} RETAIN 0 HOURS").collect()


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


def forget_log(mirror: Mirror, oldest: int) -> int:
    """Delete the commits and checkpoints that no version from ``oldest`` on needs; how many.

    Delta's own rule goes by age alone, 30 days: a mirror under steady change has a million commits by then.
    """
    log = mirror.path / DELTA_LOG
    begin, _ = newest_checkpoint(log, oldest)
    if begin < 0:
        return 0
    # Spark makes checkpoints too.
    sync_files(checkpoint_files(log, begin)[begin])
    sync_folder(log)
    old = [
        path for path in sorted(log.iterdir())
        if (match := _VERSIONED.match(path.name)) is not None and int(match[1]) < begin
    ]  # fmt: skip
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)


@contextmanager
def _failing_as(done: str, mirror: Mirror) -> Iterator[None]:
    try:
        yield
    except PySparkException as error:
        reason = str(error).strip().splitlines()[0]
        raise LakeError(f"could not be {done}: {reason}", thing=f"mirror {mirror.name}") from error


def _own_session(session: SparkSession, settings: dict[str, str]) -> SparkSession:
    own = session.newSession()
    for key, value in settings.items():
        own.conf.set(key, value)
    return own


def _data_files(folder: Path) -> Iterator[Path]:
    """As Delta sees a table's folder: names that begin with a dot or an underscore are not its data."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        yield from (Path(place, name) for name in names if not name.startswith((".", "_")))
