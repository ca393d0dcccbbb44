"""Decides what is deleted from the lake, and deletes it.

During operation, the promised versions of a mirror (the versions that consistent points name) are protected, and the
files that only other versions need are deleted. A turn each second makes 86,400 versions a day. Each version has a
commit, and a deletion vector for every file in which it deletes rows. The older points are, the fewer stay
(:mod:`pgcdc_assets.core.retention`), and the versions that no point names any longer are deleted here. From one
checkpoint on, a mirror's Delta log stays complete. Below this checkpoint, only the promised versions stay: each keeps
its own commit, and gets a checkpoint. Table properties protect the promised versions from another writer's VACUUM or
log clean-up.

A teardown deletes the whole lake. The lake's folder may also contain files that pgcdc did not write. They stay.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from deltalake.exceptions import DeltaError

from pgcdc_assets.core.formats import MALFORMED
from pgcdc_assets.core.layout import DELTA_LOG, OWN, Layout, Location, commit_name
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.checkpoint import make_checkpoint, missing_properties, write_checkpoint
from pgcdc_assets.delta.definition import commit_properties
from pgcdc_assets.delta.log import DeltaLog, hinted, is_whole
from pgcdc_assets.delta.logfiles import VERSIONED, checkpoint_files, checksum_of
from pgcdc_assets.delta.sweep import LogListing, remove_table, unneeded
from pgcdc_assets.errors import LakeError, MachineError, PgcdcError
from pgcdc_assets.failures import again_after_lost_races
from pgcdc_assets.mirror.delta.mirror import IDENTITY, STRUCTURE, Mirror, clear_unfinished
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.store import storage


@dataclass(frozen=True)
class Unneeded:
    """The parts of a mirror that are no longer needed."""

    mirror: Mirror
    alone: Set[int]
    """Promised versions below ``whole_from``. For each, the log keeps only a checkpoint and the version's own
    commit."""
    whole_from: int
    """The version of a checkpoint. The mirror's Delta log keeps every commit from this version on."""
    log_files: tuple[Location, ...]
    """Commits, checkpoints, and the checksum files that Spark writes next to them."""
    files: tuple[Location, ...]
    """Data files, and files of deletion vectors."""
    bytes: int
    """The total size of ``files``."""

    def delete(self) -> None:
        """Delete these parts. After a kill or a power cut, the next search finds the parts that are left. If a version
        that stays could not be read without these parts, nothing is deleted, and LakeError is raised."""
        log = self.mirror.path / DELTA_LOG
        if self.log_files:
            self._keep_readable_alone(log)
        storage.delete([*self.files, *map(checksum_of, self.files)])
        storage.delete(self.log_files)
        storage.settle([log])

    def _keep_readable_alone(self, log: Location) -> None:
        """Write checkpoints for the promised versions whose earlier commits are deleted. Also makes sure that the hint
        file ``_last_checkpoint``, where readers start, names a checkpoint that stays."""
        going, there = frozenset(self.log_files), checkpoint_files(log)
        try:
            for version in sorted(self.alone):
                if log / commit_name(version - 1) in going and not is_whole(there.get(version, ())):
                    write_checkpoint(self.mirror.path, version)
            if hinted(log) < self.whole_from:
                make_checkpoint(self.mirror.path, self.mirror.version)
        except DeltaError as error:
            # delta-rs cannot read a version of this mirror. Other mirrors are not affected.
            raise LakeError(f"old files were not deleted, because no checkpoint was written ({type(error).__name__})",
                            thing=f"mirror {self.mirror.name}") from error  # fmt: skip
        # A checkpoint may be Spark's, which does not sync it to disk. It must be durable before commits are deleted.
        there = checkpoint_files(log)
        storage.settle([path for version in (*self.alone, self.whole_from) for path in there.get(version, ())])
        storage.settle([log])


def unneeded_parts(mirror: Mirror, promised: Collection[int], grace: timedelta) -> Unneeded:
    """Find the parts that no kept version needs. Kept versions are the ``promised`` versions, versions younger than
    ``grace``, and the newest version. Files younger than ``grace`` also stay, because a process of a killed run may
    still write them. LakeError if the log does not show which files a kept version needs, or if another writer commits
    during the search."""
    listing = LogListing.of(mirror.path)
    if mirror.version != listing.newest:
        raise LakeError(
            "was changed by another writer during the search for unneeded files, so no file was deleted",
            thing=f"mirror {mirror.name}",
        )
    before = time.time() - grace.total_seconds()
    # A promised version that is not in the log belongs to an earlier table in this folder, and nobody reads it.
    kept = {version for version in promised if version <= mirror.version and listing.holds(version)}
    # All versions above the newest promised version stay; below it, versions younger than `grace`. But an earlier
    # clean-up may have kept only the commit of the newest promised version, and deleted the commits next to it. The log
    # is then complete only from `whole_since` on.
    young = max(listing.first_young(max(kept, default=mirror.version), before), listing.whole_since)
    whole_from = listing.whole_from(young)
    alone = {version for version in kept if version < whole_from}
    old = unneeded(listing, {*kept, *range(young, mirror.version + 1)}, mirror.version, before)
    files, log_files = (mirror.path / entry.name for entry in old), listing.files_below(whole_from, alone)
    return Unneeded(mirror, alone, whole_from, tuple(log_files), tuple(files), sum(entry.size for entry in old))


QUIET: Final = timedelta(days=10)
"""How old the newest version's files in the log may be before :func:`keep_readable` writes a new checkpoint. This is a
third of the time for which Delta keeps commits."""


def keep_promised(mirror: Mirror, retention: timedelta) -> bool:
    """Set the mirror's table properties so that no writer's VACUUM or log clean-up deletes a version that is promised
    for ``retention``. Returns whether the properties changed."""
    properties = missing_properties(mirror.existing.configuration, retention)
    if properties:
        again_after_lost_races(lambda: commit_properties(mirror.again().existing, properties))
    return bool(properties)


def unchanged_since(mirror: Mirror, version: int) -> bool:
    """Whether the mirror still has the copy, the ``replay_lsn`` and the structure that it had at ``version``. An
    OPTIMIZE or a repair changes none of these. False if ``version`` can no longer be opened."""
    older = mirror.at(version)
    if older is None or mirror.snapshot_lsn is None:
        return False
    return _standing(older) == _standing(mirror)


def _standing(mirror: Mirror) -> tuple[Lsn | None, Lsn | None, str | None]:
    return mirror.snapshot_lsn, mirror.replay_lsn, mirror.existing.configuration.get(STRUCTURE)


def keep_readable(mirror: Mirror, quiet: timedelta = QUIET) -> bool:
    """Write a new checkpoint of the newest version if its files in the log are older than ``quiet``; returns whether
    one was written. When Delta writes a checkpoint, it deletes commits and checkpoints older than
    ``delta.logRetentionDuration``. So after a long time without commits, the next commits would delete the present
    version, although the points of the last days name it. A recent checkpoint of this version prevents that."""
    before = time.time() - quiet.total_seconds()
    of_version = (entry for entry in storage.list_after(mirror.path / DELTA_LOG)
                  if (match := VERSIONED.match(entry.name)) and int(match[1]) == mirror.version)  # fmt: skip
    if any(entry.written > before for entry in of_version):
        return False
    make_checkpoint(mirror.path, mirror.version)
    return True


def remove_lake(layout: Layout) -> list[str]:
    """Delete the mirrors and pgcdc's own folder in the lake, then the lake's folder if it is empty. Returns the names
    of the files that stay, because pgcdc did not write them. Raises MachineError if a file of pgcdc could not be
    deleted."""
    mirrors = list(_mirrors(layout))
    with suppress(OSError):
        for folder in mirrors:
            remove_table(folder)
            _delete_empty(folder)
    # This folder records which tables may have a mirror, so it is deleted last.
    storage.delete_folder(layout.own)
    storage.delete_empty(layout.root)
    left = [entry.name for entry in storage.walk(layout.root, hidden=True)]
    ours = tuple(f"{folder.text.removeprefix(layout.root.text).lstrip('/')}/" for folder in (layout.own, *mirrors))
    if any(name.startswith(ours) for name in left):
        raise MachineError("could not be removed completely", thing=f"lake {layout.root}",
                           do="delete the rest of the folder as the user who owns it")  # fmt: skip
    return sorted(left)


def _mirrors(layout: Layout) -> Iterator[Location]:
    """The folders of our mirrors. A mirror is recognized by its Delta log. If the log is damaged, the stored states of
    tables show whether the folder is a mirror. Also deletes the files of unfinished copies, whose tables have no Delta
    log yet."""
    known: set[Location] = set()
    with suppress(PgcdcError, OSError, *MALFORMED):
        known = {layout.mirror(name) for name in TableStates(layout).all()}
    parts = [entry.name.split("/") for entry in storage.walk(layout.root, hidden=True)]
    logged = {layout.root / f"{one[0]}/{one[1]}" for one in parts if len(one) > 3 and one[2] == DELTA_LOG}
    for folder in sorted(known | logged):
        if folder.parent.name == OWN:
            continue
        try:
            table = DeltaLog(folder, with_files=False).newest()
        except (PgcdcError, OSError, *MALFORMED):
            if folder in known:
                yield folder
            continue
        if table is not None and IDENTITY in table.configuration:
            yield folder
        elif table is None and folder in known:
            with suppress(LakeError, OSError):
                clear_unfinished(folder)
            _delete_empty(folder)


def _delete_empty(folder: Location) -> None:
    storage.delete_empty(folder)
    storage.delete_empty(folder.parent)
