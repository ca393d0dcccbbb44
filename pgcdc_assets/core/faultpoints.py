"""Fault points: named lines of code right before and after each durable step, where the crash tests stop a process to
kill it. Fault points do nothing unless the environment variable ``PGCDC_FAULTS`` names a folder. Only the crash tests
set this variable; it must not be set in production. A test arms a fault point by a file in that folder with the name of
the fault point. The file's content is a number n: the first n times that the fault point is reached, nothing happens.
The next process or thread that reaches it renames the file to ``<point>.reached``, with its pid as content, and waits
until that file is removed, or until the process is killed."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

VARIABLE: Final = "PGCDC_FAULTS"
REACHED: Final = ".reached"
_TAKEN: Final = ".taken"
LOCK: Final = "lock"
_POLL_SECONDS: Final = 0.005


class FaultPoint(StrEnum):
    """The fault points. A name that ends with ``ING`` marks the moment right before a step, any other name the moment
    right after a step."""

    SLOT_MADE = "slot-made"
    LOG_MAKING = "log-making"
    LOG_MADE = "log-made"

    SEGMENT_STAGED = "segment-staged"
    SEGMENT_WRITTEN = "segment-written"
    SEGMENTS_MOVED = "segments-moved"
    BATCH_COMMITTING = "batch-committing"
    BATCH_COMMITTED = "batch-committed"
    BATCH_DURABLE = "batch-durable"
    BATCH_CONFIRMED = "batch-confirmed"
    STREAM_SPILLED = "stream-spilled"
    STREAM_DROPPED = "stream-dropped"
    STREAM_RESTARTED = "stream-restarted"
    PREPARED_KEPT = "prepared-kept"
    PREPARED_COMMITTING = "prepared-committing"
    PREPARED_DROPPED = "prepared-dropped"
    LOG_FILES_REPLACING = "log-files-replacing"
    LOG_FILES_REPLACED = "log-files-replaced"

    COPY_SLOT_MADE = "copy-slot-made"
    SNAPSHOT_EXPORTED = "snapshot-exported"
    STATE_WRITTEN = "state-written"
    MIRROR_MADE = "mirror-made"
    PIECE_COPIED = "piece-copied"
    COPY_COMMITTING = "copy-committing"
    COPY_COMMITTED = "copy-committed"
    COPY_REGISTERED = "copy-registered"
    COPY_RECORDED = "copy-recorded"

    FEED_FILES_WRITTEN = "feed-files-written"
    FEED_COMMITTING = "feed-committing"
    FEED_COMMITTED = "feed-committed"
    MIRROR_WIDENED = "mirror-widened"
    COLLAPSED = "collapsed"
    LINK_COMMITTING = "link-committing"
    LINK_COMMITTED = "link-committed"
    OVERWRITE_COMMITTING = "overwrite-committing"
    OVERWRITE_COMMITTED = "overwrite-committed"
    MERGE_COMMITTING = "merge-committing"
    MERGE_COMMITTED = "merge-committed"
    MIRROR_FILES_WRITTEN = "mirror-files-written"
    MIRROR_FILES_COMMITTED = "mirror-files-committed"
    RESHAPE_COMMITTING = "reshape-committing"
    RESHAPED_FILE_WRITTEN = "reshaped-file-written"
    RESHAPED_FILES_WRITTEN = "reshaped-files-written"
    RESHAPE_COMMITTED = "reshape-committed"
    RESHAPE_RECORDED = "reshape-recorded"
    RENAMED_FILES_LINKED = "renamed-files-linked"
    RENAME_COMMITTED = "rename-committed"
    RENAME_RECORDED = "rename-recorded"
    REPAIR_COMMITTING = "repair-committing"
    REPAIR_COMMITTED = "repair-committed"
    POINT_PUBLISHING = "point-publishing"
    POINT_PUBLISHED = "point-published"

    RANGE_REGISTERING = "range-registering"
    RANGE_REGISTERED = "range-registered"
    RANGE_RECORDED = "range-recorded"

    MIRROR_OPTIMIZED = "mirror-optimized"
    POINTS_PRUNED = "points-pruned"
    LOG_CUT = "log-cut"
    FEEDS_CUT = "feeds-cut"
    MIRROR_VACUUMED = "mirror-vacuumed"
    LOG_SWEPT = "log-swept"


_FOLDER: Path | None = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def passed(point: FaultPoint) -> None:
    """Stops here if a crash test has armed ``point``, and otherwise returns at once. Called at each durable step."""
    if _FOLDER is not None:
        _stop(_FOLDER, point)


def _stop(folder: Path, point: FaultPoint) -> None:
    armed, reached = folder / point, folder / f"{point}{REACHED}"
    if not armed.exists():
        # Return without taking the lock. A test may stop this process at any moment, and a stopped process that holds
        # the lock would block all other processes.
        return
    taken = folder / f"{point}{_TAKEN}"
    with (folder / LOCK).open("a") as lock:
        # The lock ensures that processes that reach the fault point at the same time are all counted.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            passes = int(armed.read_text())
        except FileNotFoundError:
            return
        armed.write_text(str(passes - 1 if passes else os.getpid()))
        if passes:
            return
        armed.rename(taken)
    with suppress(FileNotFoundError):
        # Renamed after the lock is released, because a test that sees this file may stop the process at once.
        taken.rename(reached)
        while reached.stat():
            time.sleep(_POLL_SECONDS)
