"""Which versions of a mirror stay readable: protects promised versions, and deletes what only other versions need.

A turn a second makes 86,400 versions a day, each with a commit and a deletion vector for every file that it touches.
Points are thinned out with age (:mod:`pgcdc_assets.core.retention`), and so are the versions between the points'
versions. Each version that a point names gets a checkpoint and keeps its commit. From the newest checkpoint that is old
enough, the log stays complete. Promised versions are protected because another writer's VACUUM or clean-up of the log
could delete them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from deltalake.exceptions import DeltaError

from pgcdc_assets.core.layout import DELTA_LOG, Location, commit_name
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.checkpoint import make_checkpoint, write_checkpoint
from pgcdc_assets.delta.definition import commit_properties
from pgcdc_assets.delta.log import hinted, is_whole
from pgcdc_assets.delta.logfiles import VERSIONED, checkpoint_files, checksum_of
from pgcdc_assets.delta.sweep import LogListing, unneeded
from pgcdc_assets.delta.tombstones import missing_properties
from pgcdc_assets.errors import LakeError
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.mirror.delta.mirror import STRUCTURE, Mirror
from pgcdc_assets.store import storage

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Unneeded:
    """The parts of a mirror that are no longer needed."""

    mirror: Mirror
    alone: Set[int]
    """Promised versions that the log keeps without the commits before them."""
    whole_from: int
    """The version of the checkpoint from which the log stays complete."""
    log_files: tuple[Location, ...]
    """Commits, checkpoints, and the checksums that Spark keeps beside them."""
    files: tuple[Location, ...]
    """Data files and files of deletion vectors."""
    bytes: int

    def delete(self) -> None:
        """Delete these parts. After a kill or a power cut, the next search finds the remaining parts. LakeError if a
        version that stays could not be read without these parts; then nothing is deleted."""
        log = self.mirror.path / DELTA_LOG
        if self.log_files:
            self._keep_readable_alone(log)
        storage.delete([*self.files, *map(checksum_of, self.files)])
        storage.delete(self.log_files)
        storage.settle([log])

    def _keep_readable_alone(self, log: Location) -> None:
        """Make promised versions readable without earlier commits, and let readers begin at a kept checkpoint."""
        going, there = frozenset(self.log_files), checkpoint_files(log)
        try:
            for version in sorted(self.alone):
                if log / commit_name(version - 1) in going and not is_whole(there.get(version, ())):
                    write_checkpoint(self.mirror.path, version)
            if hinted(log) < self.whole_from:
                make_checkpoint(self.mirror.path, self.mirror.version)
        except DeltaError as error:
            # A failure of delta-rs to read a version concerns this mirror alone.
            raise LakeError(f"no checkpoint can be made ({type(error).__name__})",
                            thing=f"mirror {self.mirror.name}") from error  # fmt: skip
        # Spark also writes checkpoints, and does not sync them.
        there = checkpoint_files(log)
        storage.settle([path for version in (*self.alone, self.whole_from) for path in there.get(version, ())])
        storage.settle([log])


def unneeded_parts(mirror: Mirror, promised: Collection[int], grace: timedelta) -> Unneeded:
    """Find parts that no kept version needs. Kept versions are the ``promised`` versions, versions younger than
    ``grace``, and the newest version. Files younger than ``grace`` stay: a killed run's last process may still be
    alive. LakeError if the log does not say what a version refers to, or if another writer commits during the
    search."""
    listing = LogListing.of(mirror.path)
    if mirror.version != listing.newest:
        raise LakeError("goes on meanwhile", thing=f"mirror {mirror.name}")
    before = time.time() - grace.total_seconds()
    # A version that the log does not hold belongs to an earlier table in this folder, and nobody reads it.
    kept = {version for version in promised if version <= mirror.version and listing.holds(version)}
    # The newest promised version may be kept alone, without commits that connect it to the rest of the log.
    young = max(listing.first_young(max(kept, default=mirror.version), before), listing.whole_since)
    whole_from = listing.whole_from(young)
    alone = {version for version in kept if version < whole_from}
    old = unneeded(listing, {*kept, *range(young, mirror.version + 1)}, mirror.version, before)
    files, log_files = (mirror.path / entry.name for entry in old), listing.files_below(whole_from, alone)
    return Unneeded(mirror, alone, whole_from, tuple(log_files), tuple(files), sum(entry.size for entry in old))


QUIET: Final = timedelta(days=10)
"""A third of the time that Delta keeps its log: see :func:`keep_readable`."""


def keep_promised(mirror: Mirror, retention: timedelta) -> bool:
    """Set the properties of the mirror that keep every writer's VACUUM from deleting what is promised for
    ``retention``; returns whether they changed."""
    properties = missing_properties(mirror.existing.configuration, retention)
    if properties:
        again_after_lost_races(lambda: commit_properties(mirror.again().existing, properties))
    return bool(properties)


def unchanged_since(mirror: Mirror, version: int) -> bool:
    """Whether the mirror has the same copy, ``replay_lsn`` and structure as at that version, as after an OPTIMIZE or a
    repair. False if the version can no longer be opened."""
    older = mirror.at(version)
    if older is None or mirror.snapshot_lsn is None:
        return False
    return _standing(older) == _standing(mirror)


def _standing(mirror: Mirror) -> tuple[Lsn | None, Lsn | None, str | None]:
    return mirror.snapshot_lsn, mirror.replay_lsn, mirror.existing.configuration.get(STRUCTURE)


def keep_readable(mirror: Mirror, quiet: timedelta = QUIET) -> bool:
    """Write a checkpoint of the newest version if it has been the newest for ``quiet``; returns whether that was
    needed. When Delta writes a checkpoint, it deletes commits and checkpoints older than
    ``delta.logRetentionDuration``. After a longer quiet time, the first changes would delete the version, although the
    points of the last days name it. A recent checkpoint of the version prevents this."""
    before = time.time() - quiet.total_seconds()
    of_version = (entry for entry in storage.list_after(mirror.path / DELTA_LOG)
                  if (match := VERSIONED.match(entry.name)) and int(match[1]) == mirror.version)  # fmt: skip
    if any(entry.written > before for entry in of_version):
        return False
    make_checkpoint(mirror.path, mirror.version)
    return True
