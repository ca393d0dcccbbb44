"""Writes checkpoints: what a version holds as one file, so that no reader begins at the first commit. delta-rs makes
checkpoints in a scratch folder, from the part of the log that they need. In the table's own folder, delta-rs would list
the whole log, and would give a checkpoint its name before the content is complete."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

from deltalake import DeltaTable

from pgcdc_assets.core.layout import DELTA_LOG, LAST_CHECKPOINT, Location, checkpoint_name, commit_name
from pgcdc_assets.delta.datafile import read_footer
from pgcdc_assets.delta.log import is_whole
from pgcdc_assets.delta.logfiles import (
    VERSIONED,
    checkpoint_files,
    checkpoints_among,
    checksum_of,
    put_aside,
)
from pgcdc_assets.delta.tombstones import drop_short_lived, log_retention
from pgcdc_assets.store import storage
from pgcdc_assets.store.base import Entry
from pgcdc_assets.store.scratch import DraftFile

_STALE_SECONDS: Final = 3600
"""The age at which a staged commit, which has no number yet, is deleted, because its writer must be dead."""
_SCRATCH: Final = "_checkpoint"
"""A folder in the table's folder, which gives it the same access rights. No reader takes it for a part of the table."""
_STAGED: Final = ("_", ".tmp")
"""How the name of a staged commit begins and ends."""


def make_checkpoint(folder: Location, version: int) -> None:
    """Write the checkpoint of the newest version, from which readers then begin. First makes the names of the
    checkpoint's files durable. After the checkpoint is durable, deletes commits that the properties no longer keep, and
    files that killed writers left in the log. In another order, a power cut could leave neither the checkpoint nor the
    commits."""
    storage.settle([folder, folder / DELTA_LOG])
    made = write_checkpoint(folder, version)
    log = folder / DELTA_LOG
    storage.settle([log])
    storage.replace(log / LAST_CHECKPOINT, json.dumps({"version": version, "size": made.actions}).encode())
    # Hadoop keeps a checksum of a hint that Spark wrote, which does not match our hint.
    storage.delete([checksum_of(log / LAST_CHECKPOINT)])
    _clean_up(log, log_retention(made.configuration))


@dataclass(frozen=True)
class Made:
    """A checkpoint: how many actions it holds, and the table's properties at its version."""

    actions: int
    configuration: Mapping[str, str]


def write_checkpoint(folder: Location, version: int) -> Made:
    """Write the checkpoint of a version. The content is durable before the file gets its name; the name becomes durable
    when the log's folder is synced. Readers begin there only if the hint names the checkpoint, or if they search for
    it."""
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
        told = Made(int(read_footer(made).num_rows), table.metadata().configuration)
        put_aside(log, [path for path in parts.get(version, ()) if path.name != made.name])
        storage.put(DraftFile(made.text), log / made.name)
    # A checkpoint that Spark wrote under this name had a checksum.
    storage.delete([checksum_of(log / made.name)])
    return told


def _clean_up(log: Location, retention: timedelta) -> None:
    """Delete files of the log that are older than ``retention`` and below a checkpoint of at least this age, so that
    each version from that checkpoint on stays readable. Also delete what killed writers left in the log."""
    now = time.time()
    entries = storage.list_after(log)
    before = now - retention.total_seconds()
    old = {entry.name: entry for entry in entries if entry.written < before}
    newest = max(checkpoints_among(old, log), default=-1)
    passed = [name for name in old if (match := VERSIONED.match(name)) and int(match[1]) < newest]
    storage.delete([log / name for name in (*passed, *_left_by_killed_writers(entries, now))])


def _left_by_killed_writers(entries: Sequence[Entry], now: float) -> list[str]:
    begin, end = _STAGED
    stale = (entry.name for entry in entries if entry.written < now - _STALE_SECONDS)
    return [name for name in stale if name.startswith(begin) and name.endswith(end)]
