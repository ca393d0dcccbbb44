"""A mirror's versions thinned out with age: what no promised version needs goes, files and commits alike.

A turn a second makes 86,400 versions a day, each with a commit and a deletion vector for every file that it
touched. Points are thinned out with age (:mod:`pgcdc_assets.core.retention`), and what lies between the versions
that they still name goes: each of those gets a checkpoint, and keeps its commit. From the newest checkpoint on that
is old enough the log stays whole.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from uuid import uuid4

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgcdc_assets.core.durable import sync_file, sync_files, sync_folder
from pgcdc_assets.core.layout import DELTA_LOG, checkpoint_name, commit_name
from pgcdc_assets.delta.commit import make_checkpoint
from pgcdc_assets.delta.log import checkpoint_actions, hinted, newest_checkpoint
from pgcdc_assets.delta.logfiles import VERSIONED, checkpoint_files, checksum_of, commit_numbers, put_aside
from pgcdc_assets.delta.references import references
from pgcdc_assets.delta.tombstones import forget_the_short_lived
from pgcdc_assets.errors import LakeError, TornLog
from pgcdc_assets.mirror.delta.mirror import Mirror


@dataclass(frozen=True)
class Passing:
    """The parts of a mirror that nobody needs any more."""

    mirror: Mirror
    alone: Set[int]
    """Promised versions that the log shall hold each by itself."""
    whole_from: int
    """The version of the checkpoint from which on the log stays whole."""
    log_files: tuple[Path, ...]
    """Commits, checkpoints, and the checksums that Spark keeps beside them."""
    files: tuple[Path, ...]
    """Data files and those of deletion vectors."""

    @cached_property
    def bytes(self) -> int:
        """Size of the data files and deletion vectors."""
        return sum(path.stat().st_size for path in self.files)

    def delete(self) -> None:
        """Let go of them. A kill or a power cut at any place leaves what the next look finds.

        LakeError where a version that stays could not be read without them; then nothing goes.
        """
        log = self.mirror.path / DELTA_LOG
        if self.log_files:
            self._keep_readable_alone(log)
        for path in self.files:
            path.unlink(missing_ok=True)
            checksum_of(path).unlink(missing_ok=True)
        for path in self.log_files:
            path.unlink(missing_ok=True)
        sync_folder(log)

    def _keep_readable_alone(self, log: Path) -> None:
        """Have each promised version be read without the commits before it, and readers begin above them all."""
        going, there = frozenset(self.log_files), checkpoint_files(log)
        with _failing_as_one(self.mirror):
            for version in sorted(self.alone):
                if log / commit_name(version - 1) in going and not _whole(there.get(version, ())):
                    _checkpoint_alone(self.mirror, version)
            if hinted(log) < self.whole_from:
                make_checkpoint(self.mirror.path, self.mirror.version)
        # Spark makes checkpoints too, and syncs none.
        there = checkpoint_files(log)
        sync_files([path for version in (*self.alone, self.whole_from) for path in there.get(version, ())])
        sync_folder(log)


def _whole(checkpoint: Sequence[Path]) -> bool:
    """Whether the parts are there, and can be read."""
    try:
        return any(True for _ in checkpoint_actions(checkpoint))
    except TornLog:
        return False


def _checkpoint_alone(mirror: Mirror, version: int) -> None:
    """Make the checkpoint of an old version, whole and durable before it has its name.

    In a folder of its own, with the part of the log that it takes: delta-rs lists all of it otherwise, and gives
    the name first.
    """
    log, scratch = mirror.path / DELTA_LOG, mirror.staging / uuid4().hex
    begin, _ = newest_checkpoint(log, version)
    made = scratch / DELTA_LOG / checkpoint_name(version)
    made.parent.mkdir(parents=True)
    try:
        commits = [log / commit_name(number) for number in range(begin + 1, version + 1)]
        for path in (*checkpoint_files(log, begin).get(begin, ()), *commits):
            shutil.copyfile(path, made.parent / path.name)
        DeltaTable(scratch, version=version).create_checkpoint()
        forget_the_short_lived(mirror.path, made)
        sync_file(made)
        put_aside(log, [path for path in checkpoint_files(log, version).get(version, ()) if path.name != made.name])
        os.replace(made, log / made.name)
        # Of what Spark wrote there: it would find ours wrong.
        checksum_of(log / made.name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(scratch)


@contextmanager
def _failing_as_one(mirror: Mirror) -> Iterator[None]:
    """What delta-rs cannot read is that mirror's own trouble, whatever its words."""
    try:
        yield
    except DeltaError as error:
        raise LakeError(f"no checkpoint can be made ({type(error).__name__})", thing=f"mirror {mirror.name}") from error


def passing(mirror: Mirror, promised: Collection[int], grace: timedelta) -> Passing:
    """What neither these versions of the mirror need, nor those younger than ``grace``, nor its newest.

    Also what a killed run left, once it is older than ``grace``: its last process may take a moment to die.
    LakeError where the log does not tell what a version refers to, or somebody else commits meanwhile.
    """
    log = mirror.path / DELTA_LOG
    commits, checkpoints = frozenset(commit_numbers(log)), checkpoint_files(log)
    if mirror.version != max([*commits, *checkpoints]):
        raise LakeError("goes on meanwhile", thing=f"mirror {mirror.name}")
    before = time.time() - grace.total_seconds()
    kept = {version for version in promised if version <= mirror.version and _is_held(version, commits, checkpoints)}
    young = _first_young(mirror, kept, before)
    whole_from = next((number for number, parts in checkpoints.items() if number <= young and _whole(parts)), 0)
    alone = {version for version in kept if version < whole_from}
    needed = references(mirror.path, {*kept, *range(young, mirror.version + 1)}, mirror.version).needed
    files = tuple(file for file in _data_files(mirror.path)
                  if str(file.relative_to(mirror.path)) not in needed and file.stat().st_ctime <= before)  # fmt: skip
    return Passing(mirror, alone, whole_from, _log_files(log, alone, whole_from), files)


def _is_held(version: int, commits: Set[int], checkpoints: Iterable[int]) -> bool:
    """Whether the log still holds it. What Delta has cleaned up, or a point says of another table, is nobody's."""
    begin = next((number for number in checkpoints if number <= version), -1)
    return commits >= set(range(begin + 1, version + 1))


def _first_young(mirror: Mirror, kept: Collection[int], before: float) -> int:
    """From here on each version was the newest of late, or is not published yet."""
    version = max(kept, default=mirror.version)
    while version > 0 and _is_younger(mirror.path / DELTA_LOG / commit_name(version), before):
        version -= 1
    return version


def _is_younger(commit: Path, than: float) -> bool:
    try:
        return commit.stat().st_mtime > than
    except FileNotFoundError:
        return False


def _log_files(log: Path, kept: Set[int], whole_from: int) -> tuple[Path, ...]:
    found = [(path, VERSIONED.match(path.name)) for path in sorted(log.iterdir())]
    return tuple(path for path, match in found
                 if match is not None and int(match[1]) < whole_from and int(match[1]) not in kept)  # fmt: skip


def _data_files(folder: Path) -> Iterator[Path]:
    """As Delta sees a table's folder: names that begin with a dot or an underscore are not its data."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        yield from (Path(place, name) for name in names if not name.startswith((".", "_")))
