"""Finds the files that versions of a table need, and deletes the other files, or all files of a table.

VACUUM decides by the age of a file's removal, which a log contains only for a limited time. Here, a file (or deletion
vector) stays as long as it is needed by a version that may still be read. Such versions are the promised versions
(which consistent points name), the newest version, and versions that were the newest recently. The log need not have
the other versions: if it lacks the commits between two promised versions, the later one has a checkpoint
(:mod:`pgcdc_assets.mirror.delta.removal`)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from pgcdc_assets.core.layout import DELTA_LOG, Location
from pgcdc_assets.delta.log import Added, Replay, checkpoint_actions, is_whole, open_delta
from pgcdc_assets.delta.logfiles import COMMIT, VERSIONED, checkpoints_among, commit_actions
from pgcdc_assets.errors import TornLog
from pgcdc_assets.store import storage
from pgcdc_assets.store.base import Entry


@dataclass(frozen=True)
class LogListing:
    """The files of a table's log, from one listing. ``folder`` is the table's folder."""

    folder: Location
    entries: tuple[Entry, ...]
    """All files of the log."""
    commits: Mapping[int, Entry]
    checkpoints: Mapping[int, list[Location]]
    """The files of each complete checkpoint, newest checkpoint first."""

    @classmethod
    def of(cls, folder: Location) -> LogListing:
        log = folder / DELTA_LOG
        entries = tuple(storage.list_after(log))
        commits = {int(match[1]): entry for entry in entries if (match := COMMIT.fullmatch(entry.name))}
        return cls(folder, entries, commits, checkpoints_among((entry.name for entry in entries), log))

    @property
    def log(self) -> Location:
        return self.folder / DELTA_LOG

    @property
    def newest(self) -> int:
        """The newest version; -1 if there is no version."""
        return max([-1, *self.commits, *self.checkpoints])

    def holds(self, version: int) -> bool:
        """Whether the version can still be read: the log has all commits between a checkpoint (or the table's creation)
        and this version."""
        begin = next((number for number in self.checkpoints if number <= version), -1)
        return self.commits.keys() >= set(range(begin + 1, version + 1))

    @property
    def whole_since(self) -> int:
        """The lowest version from which on the log is complete: this and every later version can be read. Of the
        versions below it, the log may still have some promised versions."""
        before = self.newest
        while before in self.commits:
            before -= 1
        return 0 if before < 0 else min((number for number in self.checkpoints if number >= before), default=before)

    def first_young(self, begin: int, before: float) -> int:
        """The lowest version, at most ``begin``, that was still the table's newest version at some time after
        ``before`` (seconds since 1970)."""
        version = begin
        while version > 0 and version in self.commits and self.commits[version].written > before:
            version -= 1
        return version

    def whole_from(self, young: int) -> int:
        """The newest readable checkpoint at or below ``young``; 0 if there is none."""
        return next((number for number, parts in self.checkpoints.items() if number <= young and is_whole(parts)), 0)

    def files_below(self, version: int, kept: Set[int]) -> list[Location]:
        """All files of the log that belong to versions below ``version``, except those of the versions ``kept``."""
        found = ((entry.name, VERSIONED.match(entry.name)) for entry in self.entries)
        return [self.log / name for name, match in found
                if match is not None and int(match[1]) < version and int(match[1]) not in kept]  # fmt: skip


def needed_files(listing: LogListing, versions: Collection[int], newest: int) -> frozenset[str]:
    """The data files and deletion vectors of these versions and of version ``newest``, relative to the table's folder.
    Raises LakeError if the log does not contain one of these versions."""
    walk = _Walk(listing)
    needed: set[str] = set()
    before = -2
    for version in sorted({*versions, newest}):
        came = walk.to(version)
        # If the version directly below was read just before, its files are in the set, and only the files that this
        # version adds must be put into it.
        needed |= _names(walk.replay.files.values() if came is None or version != before + 1 else came)
        before = version
    return frozenset(needed)


class _Walk:
    """Reads the table's state at some versions, in ascending order. It starts from a checkpoint, and continues with the
    commits. Where commits are missing, it reads a later checkpoint."""

    def __init__(self, listing: LogListing) -> None:
        self._listing = listing
        self._number = -1
        self.replay = Replay()

    def to(self, version: int) -> list[Added] | None:
        """Make ``replay`` the state of this version. Returns the files that the commits since the previous version
        added, or None if a checkpoint was read."""
        jumps = self._number < 0 or not self._listing.commits.keys() >= set(range(self._number + 1, version + 1))
        if jumps:
            self._jump(version)
        played = [self.replay.play(action) for number in range(self._number + 1, version + 1)
                  for action in commit_actions(self._listing.log, number)]  # fmt: skip
        self._number = version
        return None if jumps else [added for added in played if added is not None]

    def _jump(self, version: int) -> None:
        """Read the newest readable checkpoint at or below ``version``, if it is above the current version."""
        for number, parts in self._listing.checkpoints.items():
            if not self._number < number <= version:
                continue
            with suppress(TornLog):
                self.replay, self._number = Replay.of(checkpoint_actions(parts)), number
                return


def _names(files: Iterable[Added]) -> set[str]:
    return {name for file in files for name in (file.path, file.vector) if name is not None}


def unneeded(listing: LogListing, versions: Collection[int], newest: int, before: float) -> list[Entry]:
    """The data files and deletion vectors that neither these ``versions`` nor version ``newest`` need. Files that came
    into the folder after ``before`` (seconds since 1970) are left out, because they may belong to a commit that is not
    written yet."""
    needed = needed_files(listing, versions, newest)
    return [entry for entry in storage.walk(listing.folder) if entry.name not in needed and entry.placed <= before]


def sweep(folder: Location, grace: timedelta) -> int:
    """Delete the data files that no recent version of the table needs, and return how many. A version is recent if it
    was the newest version at some time within ``grace``. Must not be used for mirrors, because consistent points name
    their older versions. Returns 0 if there is no table."""
    table = open_delta(folder)
    if table is None:
        return 0
    before, listing = time.time() - grace.total_seconds(), LogListing.of(folder)
    young = listing.first_young(table.number, before)
    held = [version for version in range(young, table.number + 1) if listing.holds(version)]
    old = unneeded(listing, held, table.number, before)
    storage.delete([folder / entry.name for entry in old])
    return len(old)


def remove_table(folder: Location) -> tuple[int, int]:
    """Delete all files of a table. Returns their number and their bytes. The log is deleted last, from its last file to
    its first, because the first commit shows to which source the table belongs."""
    found = {entry.name: entry.size for entry in storage.walk(folder, hidden=True)}
    of_log = sorted((name for name in found if name.startswith(f"{DELTA_LOG}/")), reverse=True)
    storage.delete([folder / name for name in found.keys() - set(of_log)])
    for name in of_log:
        storage.delete([folder / name])
    storage.delete_folder(folder)
    return len(found), sum(found.values())
