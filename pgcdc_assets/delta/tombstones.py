"""Limits which removed files a checkpoint names, so that another writer's VACUUM spares what readers are promised.

VACUUM deletes a file that is older than the table's ``delta.deletedFileRetentionDuration``, unless the file is live or
a younger removal names it. For a file that lived only a short time, its age prevents the deletion for nearly as long as
a named removal would. Under steady change, with a turn a second, there are millions of such files. So checkpoints name
only the files that lived for longer than SHORT_LIFE, and the property is longer than the promise by SHORT_LIFE.
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
"""The longest lifetime of a file whose removal no checkpoint needs to name."""
DELETED_FILES: Final = "delta.deletedFileRetentionDuration"
LOG: Final = "delta.logRetentionDuration"
LOG_KEPT: Final = timedelta(days=30)
"""Twice the age of the oldest point: its version may already have been old when the point named it."""

_LOG_BY_DEFAULT: Final = timedelta(days=30)
"""Delta's default, for a table whose property is missing or not understood here."""
_NONE: Final = timedelta(0)
_INTERVAL: Final = re.compile(r"\s*(?:interval\s+)?(\d+)\s*(second|minute|hour|day|week)s?\s*", re.IGNORECASE)


def retention_properties(retention: timedelta) -> dict[str, str]:
    """The properties of a mirror whose points are promised for ``retention``."""
    return {name: _interval(span) for name, span in _kept(retention).items()}


def missing_properties(configuration: Mapping[str, str], retention: timedelta) -> dict[str, str]:
    """The properties of :func:`retention_properties` that are missing at a mirror or too short. Longer values stay."""
    has = {name: _span(configuration.get(name)) or _NONE for name in (LOG, DELETED_FILES)}
    return {name: _interval(span) for name, span in _kept(retention).items() if has[name] < span}


def _kept(retention: timedelta) -> dict[str, timedelta]:
    return {LOG: LOG_KEPT, DELETED_FILES: min(retention, LONGEST_POINTS) + SHORT_LIFE}


def log_retention(configuration: Mapping[str, str]) -> timedelta:
    """How long the table keeps the commits that a checkpoint replaces."""
    told = _span(configuration.get(LOG))
    return _LOG_BY_DEFAULT if told is None else told


def drop_short_lived(folder: Location, checkpoint: Location) -> int:
    """Rewrite a checkpoint outside of the log without the removals that it need not name; returns their number."""
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
    """When the file was last written, as VACUUM sees it."""
    found = storage.head(path)
    return otherwise if found is None else found.written


def _names(actions: list[dict[str, Any]]) -> frozenset[str]:
    """The data files of these actions, and the files of their deletion vectors."""
    vectors = [vector_file(one["deletionVector"]) for one in actions if one.get("deletionVector")]
    return frozenset({unquote(one["path"]) for one in actions} | {name for name in vectors if name is not None})


def _interval(of: timedelta) -> str:
    return f"interval {math.ceil(of / timedelta(hours=1))} hours"


def _span(stated: str | None) -> timedelta | None:
    """None for a text that is not a plain interval."""
    match = _INTERVAL.fullmatch(stated or "")
    return timedelta(**{f"{match[2].lower()}s": int(match[1])}) if match else None
