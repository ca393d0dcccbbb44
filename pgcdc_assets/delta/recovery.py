"""Repairs a Delta log after a power cut. Runs under the lake's lock, before any process commits to the table. Versions
that a consistent point names are durable. Files of later versions may be complete, incomplete or missing. From the
first incomplete version on, the log's files are renamed, so that readers ignore them. New commits continue from the
last complete version. The lost content is then written again: for a mirror, the next turn reads it from the change
log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from pgcdc_assets.core.layout import DELTA_LOG, Location, commit_name
from pgcdc_assets.delta.datafile import opened_parquet
from pgcdc_assets.delta.log import Added, Replay, checkpoint_actions, file_key
from pgcdc_assets.delta.logfiles import (
    ENGINE,
    Action,
    checkpoint_files,
    checksum_of,
    commits_among,
    file_names,
    left_above,
    put_aside,
    whole_commits,
)
from pgcdc_assets.delta.vectors import read_vector, vector_file
from pgcdc_assets.errors import LakeError, TornLog
from pgcdc_assets.store import storage


@dataclass(frozen=True)
class Recovered:
    """The state of a log after its recovery."""

    number: int
    """The newest version; -1 if there is no version, or if the log cannot be recovered."""
    positions: Mapping[str, int]
    """The versions of the Delta app transactions, by application id."""
    aside: tuple[str, ...] = ()
    """The old names of the files that were renamed."""
    tail: Mapping[int, Sequence[Action]] = field(default_factory=dict)
    """The remaining commits above the version that was known to be durable (``promised``), by number."""


def recover(folder: Location, promised: int = -1) -> Recovered:
    """Rename the log's files from the first incomplete version above ``promised`` on, and make the remaining versions
    durable. ``promised``: a version that is known to be durable. A power cut cannot have damaged it or an older
    version. If one of them is damaged nevertheless, this is not repaired, and opening the table raises an error."""
    log = folder / DELTA_LOG
    names = file_names(log)
    numbers = frozenset(commits_among(names))
    base, replay, torn = _base(log, promised, numbers)
    if base < 0 and torn and 0 not in numbers:
        return Recovered(-1, {})
    try:
        kept = whole_commits(log, base)
    except LakeError:
        return Recovered(-1, {})
    last = _with_files(folder, replay, base, kept, promised)
    if last < promised:
        return Recovered(-1, {})
    aside = put_aside(log, [*left_above(log, last, names), *torn])
    tail = {number: actions for number, actions in kept.items() if promised < number <= last}
    _forget_checksums(folder, tail)
    storage.settle(foreign_files(folder, tail))
    if aside or tail:
        storage.settle([folder, log])
    for number in range(base + 1, last + 1):
        for action in kept[number]:
            replay.play(action)
    return Recovered(last, dict(replay.positions), aside, tail)


def foreign_files(folder: Location, commits: Mapping[int, Sequence[Action]]) -> list[Location]:
    """Files whose content may not be durable: commits of other writers, the files that these commits add, and Hadoop's
    checksum files for all of these."""
    found: list[Location] = []
    for number, actions in commits.items():
        if is_own(actions):
            continue
        found.append(folder / DELTA_LOG / commit_name(number))
        adds = [action["add"] for action in actions if "add" in action]
        vectors = [vector_file(add["deletionVector"]) for add in adds if add.get("deletionVector")]
        paths = {Added.of(add).path for add in adds} | {name for name in vectors if name is not None}
        found += [folder / path for path in sorted(paths)]
    return [*found, *(beside for path in found if storage.exists(beside := checksum_of(path)))]


def _forget_checksums(folder: Location, commits: Mapping[int, Sequence[Action]]) -> None:
    """Delete Hadoop's checksum files for the files of other writers' commits, and Delta's checksum file of each of
    these versions. These checksum files were never synced. If a power cut has damaged one, Hadoop would refuse to read
    a file that is complete."""
    for number, actions in commits.items():
        if not is_own(actions):
            version = folder / DELTA_LOG / f"{number:020}.crc"
            storage.delete([*map(checksum_of, (*foreign_files(folder, {number: actions}), version)), version])


def is_own(actions: Sequence[Action]) -> bool:
    """Whether pgcdc wrote the commit. If so, its content, and the files that it adds, were durable before the commit
    got its name."""
    return any(action.get("commitInfo", {}).get("engineInfo") == ENGINE for action in actions)


def _base(log: Location, promised: int, numbers: frozenset[int]) -> tuple[int, Replay, list[Location]]:
    """The version and state of the checkpoint from which the recovery starts, and the files of unreadable checkpoints.
    ``numbers``: the commits that exist.

    The recovery normally starts from the newest checkpoint at or below ``promised``, so that all later versions are
    checked. But if commits between that checkpoint and the newest checkpoint were deleted, it starts from the newest
    checkpoint. This one was durable before the commits were deleted."""
    torn: list[Location] = []
    readable: list[tuple[int, Replay]] = []
    for number, parts in checkpoint_files(log).items():
        try:
            readable.append((number, Replay.of(checkpoint_actions(parts))))
        except TornLog:
            torn += parts
            continue
        if number <= promised:
            break
    if not readable:
        return -1, Replay(), torn
    newest, oldest = readable[0], readable[-1]
    leads = oldest[0] <= promised and numbers >= set(range(oldest[0] + 1, newest[0] + 1))
    return (*(oldest if leads else newest), torn)


def _with_files(folder: Location, begin: Replay, base: int, kept: Mapping[int, Sequence[Action]], promised: int) -> int:
    """The newest version of which all files are complete. Checks only files that commits above ``promised`` have
    added. ``begin``, ``base``: state and version of the checkpoint; ``kept``: the commits above it."""
    last = max(kept, default=base)
    while True:
        files = dict(begin.files)
        came: dict[tuple[str, str], int] = {}
        replay = Replay(files=files)
        for number in range(base + 1, last + 1):
            for action in kept[number]:
                replay.play(action)
                if "add" in action:
                    came[file_key(action["add"])] = number
        bad = [
            number for key, number in came.items()
            if number > promised and key in files and not _sound(folder, files[key], own=is_own(kept[number]))
        ]  # fmt: skip
        if not bad:
            return last
        last = min(bad) - 1


def _sound(folder: Location, file: Added, *, own: bool) -> bool:
    """Whether a data file is complete. If pgcdc wrote it (``own``), only its size is compared, because its content was
    durable before a commit named it. A file of another writer is read completely."""
    path = folder / file.path
    try:
        found = storage.head(path)
        if found is None or found.size != file.size:
            return False
        if file.vector is not None and not storage.exists(folder / file.vector):
            return False
        if not own:
            with opened_parquet(path) as data:
                for group in range(data.num_row_groups):
                    data.read_row_group(group)
            if file.action.get("deletionVector"):
                read_vector(folder, file.action["deletionVector"])
    except (OSError, pa.ArrowException, LakeError):
        return False
    return True
