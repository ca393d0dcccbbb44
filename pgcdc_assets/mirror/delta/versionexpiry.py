"""Decides which versions of a mirror stay readable: protects the promised versions (the versions that consistent points
name), and deletes the files that only other versions need.

One turn (an apply of new changes) a second makes 86,400 versions a day. Each version has a commit, and a deletion
vector for every file in which it deletes rows. Points are thinned out with age (:mod:`pgcdc_assets.core.retention`),
and so are the versions between the points' versions. Each version that a point names gets a checkpoint and keeps its
commit. The log stays complete from one checkpoint on: the newest checkpoint that is old enough. Table properties
protect the promised versions from another writer's VACUUM or log clean-up.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from deltalake.exceptions import DeltaError

from pgcdc_assets.core.layout import DELTA_LOG, Location, commit_name
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.checkpoint import make_checkpoint, missing_properties, write_checkpoint
from pgcdc_assets.delta.definition import commit_properties
from pgcdc_assets.delta.log import hinted, is_whole
from pgcdc_assets.delta.logfiles import VERSIONED, checkpoint_files, checksum_of
from pgcdc_assets.delta.sweep import LogListing, unneeded
from pgcdc_assets.errors import LakeError
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.mirror.delta.mirror import STRUCTURE, Mirror
from pgcdc_assets.store import storage


@dataclass(frozen=True)
class Unneeded:
    """The parts of a mirror that are no longer needed."""

    mirror: Mirror
    alone: Set[int]
    """Promised versions below ``whole_from``. Of each, the log keeps only a checkpoint and the version's own commit."""
    whole_from: int
    """The version of the checkpoint from which the log stays complete."""
    log_files: tuple[Location, ...]
    """Commits, checkpoints, and the checksum files that Spark writes next to them."""
    files: tuple[Location, ...]
    """Data files and deletion vector files."""
    bytes: int

    def delete(self) -> None:
        """Delete these parts. After a kill or a power cut, the next search finds the remaining parts. LakeError if a
        version that stays could not be read without these parts. Nothing is deleted in this case."""
        log = self.mirror.path / DELTA_LOG
        if self.log_files:
            self._keep_readable_alone(log)
        storage.delete([*self.files, *map(checksum_of, self.files)])
        storage.delete(self.log_files)
        storage.settle([log])

    def _keep_readable_alone(self, log: Location) -> None:
        """Make promised versions readable without earlier commits, and let readers start at a kept checkpoint."""
        going, there = frozenset(self.log_files), checkpoint_files(log)
        try:
            for version in sorted(self.alone):
                if log / commit_name(version - 1) in going and not is_whole(there.get(version, ())):
                    write_checkpoint(self.mirror.path, version)
            if hinted(log) < self.whole_from:
                make_checkpoint(self.mirror.path, self.mirror.version)
        except DeltaError as error:
            # If delta-rs fails to read a version, only this mirror is affected.
            raise LakeError(f"no checkpoint can be made ({type(error).__name__})",
                            thing=f"mirror {self.mirror.name}") from error  # fmt: skip
        # Spark also writes checkpoints, but does not sync them to disk.
        there = checkpoint_files(log)
        storage.settle([path for version in (*self.alone, self.whole_from) for path in there.get(version, ())])
        storage.settle([log])


def unneeded_parts(mirror: Mirror, promised: Collection[int], grace: timedelta) -> Unneeded:
    """Find parts that no kept version needs. Kept versions are the ``promised`` versions, versions younger than
    ``grace``, and the newest version. Files younger than ``grace`` stay: a process of a killed run may still write.
    LakeError if the log does not say which files a version needs, or if another writer commits during the search."""
    listing = LogListing.of(mirror.path)
    if mirror.version != listing.newest:
        raise LakeError(
            "was changed by another writer during the search for unneeded files", thing=f"mirror {mirror.name}"
        )
    before = time.time() - grace.total_seconds()
    # A promised version that is not in the log belongs to an earlier table in this folder, and nobody reads it.
    kept = {version for version in promised if version <= mirror.version and listing.holds(version)}
    # The newest promised version may be kept alone, without the commits between it and the next kept versions.
    young = max(listing.first_young(max(kept, default=mirror.version), before), listing.whole_since)
    whole_from = listing.whole_from(young)
    alone = {version for version in kept if version < whole_from}
    old = unneeded(listing, {*kept, *range(young, mirror.version + 1)}, mirror.version, before)
    files, log_files = (mirror.path / entry.name for entry in old), listing.files_below(whole_from, alone)
    return Unneeded(mirror, alone, whole_from, tuple(log_files), tuple(files), sum(entry.size for entry in old))


QUIET: Final = timedelta(days=10)
"""The default for :func:`keep_readable`: a third of the time that Delta keeps its log."""


def keep_promised(mirror: Mirror, retention: timedelta) -> bool:
    """Set the mirror's table properties so that no writer's VACUUM deletes a version promised for ``retention``.
    Returns whether the properties changed."""
    properties = missing_properties(mirror.existing.configuration, retention)
    if properties:
        again_after_lost_races(lambda: commit_properties(mirror.again().existing, properties))
    return bool(properties)


def unchanged_since(mirror: Mirror, version: int) -> bool:
    """Whether the mirror still has the copy, ``replay_lsn`` and structure that it had at that version. An OPTIMIZE or a
    repair does not change these. False if the version can no longer be opened."""
    older = mirror.at(version)
    if older is None or mirror.snapshot_lsn is None:
        return False
    return _standing(older) == _standing(mirror)


def _standing(mirror: Mirror) -> tuple[Lsn | None, Lsn | None, str | None]:
    return mirror.snapshot_lsn, mirror.replay_lsn, mirror.existing.configuration.get(STRUCTURE)


def keep_readable(mirror: Mirror, quiet: timedelta = QUIET) -> bool:
    """Write a checkpoint of the newest version if it has been the newest for ``quiet``; returns whether that was
    needed. When Delta writes a checkpoint, it deletes commits and checkpoints older than
    ``delta.logRetentionDuration``. After a longer time without commits, the next commits would delete the version,
    although the points of the last days name it. A recent checkpoint of the version prevents this."""
    before = time.time() - quiet.total_seconds()
    of_version = (entry for entry in storage.list_after(mirror.path / DELTA_LOG)
                  if (match := VERSIONED.match(entry.name)) and int(match[1]) == mirror.version)  # fmt: skip
    if any(entry.written > before for entry in of_version):
        return False
    make_checkpoint(mirror.path, mirror.version)
    return True
