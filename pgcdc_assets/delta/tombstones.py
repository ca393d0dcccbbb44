"""What a checkpoint says of files that are gone, so that somebody else's VACUUM spares those that readers are promised.

VACUUM deletes what is older than the table's ``delta.deletedFileRetentionDuration`` and is neither live nor named by
a younger removal. A file that lived for a short time alone is spared by its own age for nearly as long as its removal
would spare it; under steady change, with a turn a second, there are millions of these. So checkpoints name only the
files that lived for long, and the property is longer than what is promised by what they may leave out.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pgcdc_assets.core.durable import sync_file
from pgcdc_assets.core.retention import LONGEST_POINTS
from pgcdc_assets.delta.vectors import vector_file

SHORT_LIFE: Final = timedelta(days=1)
"""The lifetime of a file whose removal no checkpoint needs to name."""
DELETED_FILES: Final = "delta.deletedFileRetentionDuration"
LOG: Final = "delta.logRetentionDuration"
LOG_KEPT: Final = timedelta(days=30)
"""Twice the time of the oldest point: its version may have stood for some before."""

_STAGED: Final = "_checkpoint_{}.tmp"
_INTERVAL: Final = re.compile(r"\s*(?:interval\s+)?(\d+)\s*(second|minute|hour|day|week)s?\s*", re.IGNORECASE)


def keeping(retention: timedelta) -> dict[str, str]:
    """The properties of a mirror whose points are promised for ``retention``."""
    return {LOG: _interval(LOG_KEPT), DELETED_FILES: _interval(min(retention, LONGEST_POINTS) + SHORT_LIFE)}


def lacking(configuration: Mapping[str, str], retention: timedelta) -> dict[str, str]:
    """The same of those that a mirror has too short, or not at all. What somebody made longer stays."""
    wanted = keeping(retention)
    return {name: value for name, value in wanted.items() if _span(configuration.get(name)) < _span(value)}


def forget_the_short_lived(folder: Path, checkpoint: Path) -> int:
    """Write a checkpoint anew without the removals that need not be named; how many. Not yet durable by its name."""
    with pq.ParquetFile(checkpoint) as file:
        table = file.read()
    removed = table["remove"].to_pylist()
    live = _names(table["add"].filter(pc.is_valid(table["add"])).to_pylist())
    kept = [one is None or _outlived_its_age(folder, one, live) for one in removed]
    gone = len(kept) - sum(kept)
    if gone:
        staged = checkpoint.with_name(_STAGED.format(checkpoint.name))
        pq.write_table(table.filter(pa.array(kept)), staged, compression="zstd")
        sync_file(staged)
        os.replace(staged, checkpoint)
    return gone


def _outlived_its_age(folder: Path, removed: dict[str, Any], live: frozenset[str]) -> bool:
    names = _names([removed]) - live
    died = (removed.get("deletionTimestamp") or 0) / 1000
    return any(died - _born(folder / name, died) > SHORT_LIFE.total_seconds() for name in names)


def _born(path: Path, otherwise: float) -> float:
    """When the file was last written, as VACUUM sees it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return otherwise


def _names(actions: list[dict[str, Any]]) -> frozenset[str]:
    """The data files of these actions, and those of their deletion vectors."""
    vectors = [vector_file(one["deletionVector"]) for one in actions if one.get("deletionVector")]
    return frozenset({unquote(one["path"]) for one in actions} | {name for name in vectors if name is not None})


def _interval(of: timedelta) -> str:
    return f"interval {math.ceil(of / timedelta(hours=1))} hours"


def _span(stated: str | None) -> timedelta:
    """None and what is no plain interval count as nothing: they are set."""
    match = _INTERVAL.fullmatch(stated or "")
    return timedelta(**{f"{match[2].lower()}s": int(match[1])}) if match else timedelta(0)
