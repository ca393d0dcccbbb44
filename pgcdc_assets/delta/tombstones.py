"""Decides which removed files a checkpoint names (its tombstones). Another writer's VACUUM must not delete files that
consistent points still need.

VACUUM deletes a file that is older than the table property ``delta.deletedFileRetentionDuration``, unless the newest
version contains the file, or the log names a removal of it that is younger than this property. A file that was in the
table for only a short time is protected by its own age nearly as long as by a named removal. With a Delta commit every
second, there are millions of such files. So checkpoints name only removed files that were in the table for longer than
SHORT_LIFE, and the property is longer than the retention of points by SHORT_LIFE.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.retention import LONGEST_POINTS
from pgcdc_assets.delta.datafile import opened_parquet, write_parquet
from pgcdc_assets.delta.vectors import vector_file
from pgcdc_assets.store import storage

SHORT_LIFE: Final = timedelta(days=1)
"""A checkpoint need not name a removed file that was in the table for at most this time."""
DELETED_FILES: Final = "delta.deletedFileRetentionDuration"
LOG: Final = "delta.logRetentionDuration"
LOG_KEPT: Final = timedelta(days=30)
"""How long mirrors keep old commits. This is twice the age of the oldest point, because a mirror's version may already
be old when a point names it."""

_LOG_BY_DEFAULT: Final = timedelta(days=30)
"""Delta's default of the log's retention, for a table whose property is missing or cannot be parsed here."""
_NONE: Final = timedelta(0)
_INTERVAL: Final = re.compile(r"\s*(?:interval\s+)?(\d+)\s*(second|minute|hour|day|week)s?\s*", re.IGNORECASE)


def retention_properties(retention: timedelta) -> dict[str, str]:
    """The retention properties of a mirror, if consistent points must stay readable for ``retention``."""
    return {name: _interval(span) for name, span in _kept(retention).items()}


def missing_properties(configuration: Mapping[str, str], retention: timedelta) -> dict[str, str]:
    """The :func:`retention_properties` that a mirror lacks, or whose value in the mirror is too short."""
    has = {name: _span(configuration.get(name)) or _NONE for name in (LOG, DELETED_FILES)}
    return {name: _interval(span) for name, span in _kept(retention).items() if has[name] < span}


def _kept(retention: timedelta) -> dict[str, timedelta]:
    return {LOG: LOG_KEPT, DELETED_FILES: min(retention, LONGEST_POINTS) + SHORT_LIFE}


def log_retention(configuration: Mapping[str, str]) -> timedelta:
    """How long the table keeps old commits, which are no longer needed because of a newer checkpoint."""
    told = _span(configuration.get(LOG))
    return _LOG_BY_DEFAULT if told is None else told


def drop_short_lived(folder: Location, checkpoint: Location) -> int:
    """Rewrite a checkpoint without the removed files that it need not name. Returns the number of these files. The
    checkpoint must not be in the log's folder yet."""
    with opened_parquet(checkpoint) as file:
        table = file.read()
    removed = table["remove"].to_pylist()
    live = _names(table["add"].filter(pc.is_valid(table["add"])).to_pylist())
    kept = [one is None or _outlived_its_age(folder, one, live) for one in removed]
    gone = len(kept) - sum(kept)
    if gone:
        write_parquet(table.filter(pa.array(kept)), checkpoint)
    return gone


def _outlived_its_age(folder: Location, removed: dict[str, Any], live: frozenset[str]) -> bool:
    names = _names([removed]) - live
    died = (removed.get("deletionTimestamp") or 0) / 1000
    return any(died - _born(folder / name, died) > SHORT_LIFE.total_seconds() for name in names)


def _born(path: Location, otherwise: float) -> float:
    """When the file was last written, in seconds since 1970. VACUUM uses this time. ``otherwise`` if it is missing."""
    found = storage.head(path)
    return otherwise if found is None else found.written


def _names(actions: list[dict[str, Any]]) -> frozenset[str]:
    """The data files of these actions, and the files of their deletion vectors."""
    vectors = [vector_file(one["deletionVector"]) for one in actions if one.get("deletionVector")]
    return frozenset({unquote(one["path"]) for one in actions} | {name for name in vectors if name is not None})


def _interval(of: timedelta) -> str:
    return f"interval {math.ceil(of / timedelta(hours=1))} hours"


def _span(stated: str | None) -> timedelta | None:
    """Parses an interval property; None for a text that is not a plain interval."""
    match = _INTERVAL.fullmatch(stated or "")
    return timedelta(**{f"{match[2].lower()}s": int(match[1])}) if match else None
