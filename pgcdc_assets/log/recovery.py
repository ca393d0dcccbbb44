"""Repairs what a power cut left of the change log, before the log is opened.

A position is confirmed to the source only after its commit is durable, and no commit begins before the previous commit
is durable. So a torn commit was never confirmed: it is put aside, and the server sends its transactions again.
"""

from __future__ import annotations

import pyarrow as pa

from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.datafile import opened_parquet
from pgcdc_assets.delta.logfiles import above, checkpoint_files, commit_numbers, put_aside, whole_commits


def recover(path: Location) -> tuple[str, ...]:
    """Put aside the incomplete files at the end of the log. Returns their names."""
    log = path / DELTA_LOG
    checkpoints = checkpoint_files(log)
    torn = [part for parts in checkpoints.values() for part in parts if not _readable(part)]
    base = max((number for number, parts in checkpoints.items() if not set(parts) & set(torn)), default=-1)
    numbers = commit_numbers(log)
    if base < 0 and (numbers or torn) and 0 not in numbers:
        # The beginning of the log is missing, or is an unreadable checkpoint. Opening the log reports this.
        return ()
    last = max(whole_commits(log, base), default=base)
    return put_aside(log, [*above(log, last), *torn])


def _readable(checkpoint: Location) -> bool:
    try:
        with opened_parquet(checkpoint) as file:
            file.read()
    except (OSError, pa.ArrowException):
        return False
    return True
