"""Writes checkpoints. A checkpoint contains the state of a version in one file, so that readers need not read all
commits. delta-rs makes each checkpoint in a scratch folder, to which the needed part of the log is copied. In the
table's own folder, delta-rs would list the whole log, and the checkpoint would have its final name before its content
is complete.

A checkpoint also names removed files (tombstones). They protect files that consistent points still need from another
writer's VACUUM. VACUUM keeps a file if the newest version contains it, if the file is younger than the property
``delta.deletedFileRetentionDuration``, or if the log names its removal and the removal is younger than this property.

With a Delta commit every second, there are millions of removed files, and most were in the table only for a short time.
For such a file, the age of the file protects it nearly as long as a tombstone. So checkpoints name only removed files
that were in the table for longer than SHORT_LIFE. To make up for this, the property is SHORT_LIFE longer than the
retention of points.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pgcdc_assets.core.layout import DELTA_LOG, LAST_CHECKPOINT, Location, checkpoint_name, commit_name
from pgcdc_assets.core.retention import LONGEST_POINTS
from pgcdc_assets.delta.datafile import opened_parquet, read_footer, write_parquet
from pgcdc_assets.delta.log import is_whole
from pgcdc_assets.delta.logfiles import VERSIONED, checkpoint_files, checkpoints_among, checksum_of, put_aside
from pgcdc_assets.delta.vectors import vector_file
from pgcdc_assets.store import storage
from pgcdc_assets.store.scratch import DraftFile

_STALE_SECONDS: Final = 3600
"""A staged commit (a file that a writer makes before it gives the file a commit number) is deleted at this age, because
its writer must be dead."""
_SCRATCH: Final = "_checkpoint"
"""The scratch folder, inside the table's folder so that it has the same access rights. Delta readers ignore it."""
_STAGED: Final = ("_", ".tmp")
"""Prefix and suffix of the name of a staged commit."""


def make_checkpoint(folder: Location, version: int) -> None:
    """Write the checkpoint of the newest version, and update the hint file ``_last_checkpoint``, so that readers begin
    at this checkpoint. Then delete commits that are older than the table's log retention, and files that killed writers
    left in the log. Commits are deleted only after the checkpoint and the names of the table's files are durable.
    Otherwise a power cut could leave neither checkpoint nor commits."""
    storage.settle([folder, folder / DELTA_LOG])
    actions, configuration = write_checkpoint(folder, version)
    log = folder / DELTA_LOG
    storage.settle([log])
    storage.replace(log / LAST_CHECKPOINT, json.dumps({"version": version, "size": actions}).encode())
    # If Spark wrote the old hint file, Hadoop has a checksum file for it, which does not match the new hint file.
    storage.delete([checksum_of(log / LAST_CHECKPOINT)])
    _clean_up(log, _log_retention(configuration))


def write_checkpoint(folder: Location, version: int) -> tuple[int, Mapping[str, str]]:
    """Write the checkpoint of a version. Returns its number of actions, and the table's properties at this version. The
    content is durable before the file gets its name; the caller must sync the log's folder to make the name durable.
    The hint file does not change, so only readers that list the log find the checkpoint."""
    log = folder / DELTA_LOG
    parts = checkpoint_files(log, version)
    begin = next((number for number, found in parts.items() if is_whole(found)), -1)
    with storage.scratch(folder / _SCRATCH).temporary() as scratch:
        made = scratch / DELTA_LOG / checkpoint_name(version)
        commits = [log / commit_name(number) for number in range(begin + 1, version + 1)]
        needed = (*parts.get(begin, ()), *commits)
        storage.together(log, [partial(storage.fetch, path, made.with_name(path.name)) for path in needed])
        table = DeltaTable(str(scratch), version=version)
        table.create_checkpoint()
        drop_short_lived(folder, made)
        told = int(read_footer(made).num_rows), table.metadata().configuration
        put_aside(log, [path for path in parts.get(version, ()) if path.name != made.name])
        storage.put(DraftFile(made.text), log / made.name)
    # If Spark wrote an earlier checkpoint with this name, Hadoop has a checksum file for it, which does not match the
    # new file.
    storage.delete([checksum_of(log / made.name)])
    return told


def _clean_up(log: Location, retention: timedelta) -> None:
    """Find the newest checkpoint that is older than ``retention``, and delete the log's older files that belong to
    versions below it. Every version at or above this checkpoint stays readable. Also deletes staged commits of killed
    writers."""
    now = time.time()
    entries = storage.list_after(log)
    before = now - retention.total_seconds()
    old = {entry.name: entry for entry in entries if entry.written < before}
    newest = max(checkpoints_among(old, log), default=-1)
    passed = [name for name in old if (match := VERSIONED.match(name)) and int(match[1]) < newest]
    begin, end = _STAGED
    stale = (entry.name for entry in entries if entry.written < now - _STALE_SECONDS)
    staged = [name for name in stale if name.startswith(begin) and name.endswith(end)]
    storage.delete([log / name for name in (*passed, *staged)])


SHORT_LIFE: Final = timedelta(days=1)
"""A checkpoint does not name a removed file that was in the table for at most this time. See the module's docstring."""
DELETED_FILES: Final = "delta.deletedFileRetentionDuration"
LOG: Final = "delta.logRetentionDuration"
LOG_KEPT: Final = timedelta(days=30)
"""How long mirrors keep old commits: twice the longest retention of points, because a mirror's version may already be
old when a point names it."""

_LOG_BY_DEFAULT: Final = timedelta(days=30)
"""Delta's default, for a table whose property ``delta.logRetentionDuration`` is missing or cannot be parsed here."""
_INTERVAL: Final = re.compile(r"\s*(?:interval\s+)?(\d+)\s*(second|minute|hour|day|week)s?\s*", re.IGNORECASE)


def retention_properties(retention: timedelta) -> dict[str, str]:
    """The table properties of a mirror with which consistent points stay readable for ``retention``, even if another
    writer runs VACUUM."""
    return {name: _interval(span) for name, span in _kept(retention).items()}


def missing_properties(configuration: Mapping[str, str], retention: timedelta) -> dict[str, str]:
    """The :func:`retention_properties` that a mirror lacks, or whose value in the mirror is too short."""
    has = {name: _span(configuration.get(name)) or timedelta(0) for name in (LOG, DELETED_FILES)}
    return {name: _interval(span) for name, span in _kept(retention).items() if has[name] < span}


def _kept(retention: timedelta) -> dict[str, timedelta]:
    return {LOG: LOG_KEPT, DELETED_FILES: min(retention, LONGEST_POINTS) + SHORT_LIFE}


def _log_retention(configuration: Mapping[str, str]) -> timedelta:
    """How long the table keeps commits and checkpoints after a newer checkpoint has made them unneeded."""
    told = _span(configuration.get(LOG))
    return _LOG_BY_DEFAULT if told is None else told


def drop_short_lived(folder: Location, checkpoint: Location) -> None:
    """Rewrite a checkpoint without the removed files that were in the table for at most SHORT_LIFE. The checkpoint must
    not be in the log's folder yet."""
    with opened_parquet(checkpoint) as file:
        table = file.read()
    removed = table["remove"].to_pylist()
    live = _names(table["add"].filter(pc.is_valid(table["add"])).to_pylist())
    kept = [one is None or _outlived_its_age(folder, one, live) for one in removed]
    if not all(kept):
        write_parquet(table.filter(pa.array(kept)), checkpoint)


def _outlived_its_age(folder: Location, removed: dict[str, Any], live: frozenset[str]) -> bool:
    names = _names([removed]) - live
    died = (removed.get("deletionTimestamp") or 0) / 1000
    return any(died - _born(folder / name, died) > SHORT_LIFE.total_seconds() for name in names)


def _born(path: Location, otherwise: float) -> float:
    """When the file was last written, in seconds since 1970, as VACUUM sees it. Returns ``otherwise`` if the file does
    not exist."""
    found = storage.head(path)
    return otherwise if found is None else found.written


def _names(actions: list[dict[str, Any]]) -> frozenset[str]:
    """The data files of these actions, and the files of their deletion vectors."""
    vectors = [vector_file(one["deletionVector"]) for one in actions if one.get("deletionVector")]
    return frozenset({unquote(one["path"]) for one in actions} | {name for name in vectors if name is not None})


def _interval(of: timedelta) -> str:
    return f"interval {math.ceil(of / timedelta(hours=1))} hours"


def _span(stated: str | None) -> timedelta | None:
    """Parses the value of an interval property, such as ``interval 7 days``. None if it has another form."""
    match = _INTERVAL.fullmatch(stated or "")
    return timedelta(**{f"{match[2].lower()}s": int(match[1])}) if match else None
