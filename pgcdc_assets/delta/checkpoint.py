"""Writes checkpoints. A checkpoint contains the state of a version in one file, so that readers need not read all
commits. delta-rs makes each checkpoint in a scratch folder, to which the needed part of the log is copied. In the
table's own folder, delta-rs would list the whole log, and the checkpoint would have its final name before its content
is complete."""

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
"""A staged commit, which has no number yet, is deleted at this age, because its writer must be dead."""
_SCRATCH: Final = "_checkpoint"
"""The scratch folder, inside the table's folder so that it has the same access rights. Delta readers ignore it."""
_STAGED: Final = ("_", ".tmp")
"""Prefix and suffix of the name of a staged commit."""


def make_checkpoint(folder: Location, version: int) -> None:
    """Write the checkpoint of the newest version, and update the hint file, so that readers begin at this checkpoint.
    First makes the names of the table's files durable. When the checkpoint is durable too, deletes commits that are
    older than the table's log retention, and files that killed writers left in the log. In any other order, a power cut
    could delete both the checkpoint and the commits."""
    storage.settle([folder, folder / DELTA_LOG])
    made = write_checkpoint(folder, version)
    log = folder / DELTA_LOG
    storage.settle([log])
    storage.replace(log / LAST_CHECKPOINT, json.dumps({"version": version, "size": made.actions}).encode())
    # If Spark wrote the old hint, Hadoop's checksum file for it does not match the new hint.
    storage.delete([checksum_of(log / LAST_CHECKPOINT)])
    _clean_up(log, log_retention(made.configuration))


@dataclass(frozen=True)
class Made:
    """A written checkpoint: its number of actions, and the table's properties at its version."""

    actions: int
    configuration: Mapping[str, str]


def write_checkpoint(folder: Location, version: int) -> Made:
    """Write the checkpoint of a version. The content is durable before the file gets its name. The caller makes the
    name durable by a sync of the log's folder. Readers use the checkpoint only if the hint file names it, or if they
    list the log."""
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
    # If Spark wrote an earlier checkpoint with this name, Hadoop's checksum file for it does not match.
    storage.delete([checksum_of(log / made.name)])
    return told


def _clean_up(log: Location, retention: timedelta) -> None:
    """Delete the files of versions below the newest checkpoint that is older than ``retention``. Every version at or
    above this checkpoint stays readable. Also deletes staged commits of killed writers."""
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
