"""Finds the files that some versions of a table need, and deletes the others, or all files of a table.

VACUUM goes by the time of removal, and forgets a removal after a while. Here a file (or deletion vector) stays as long
as a version that may still be read refers to it: a promised version, the newest version, or a version that was the
newest recently. The log may lack versions between two promised versions if there is a checkpoint to continue from
(:mod:`pgcdc_assets.mirror.delta.versionexpiry`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Set
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
    """Commits and checkpoints of the table in ``folder``."""

    folder: Location
    entries: tuple[Entry, ...]
    commits: Mapping[int, Entry]
    checkpoints: Mapping[int, list[Location]]
    """Checkpoints with all of their parts, the newest first."""

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
        """Whether the log still holds the version. Delta may have cleaned it up."""
        begin = next((number for number in self.checkpoints if number <= version), -1)
        return self.commits.keys() >= set(range(begin + 1, version + 1))

    @property
    def whole_since(self) -> int:
        """The lowest version from which the log has every version. Versions that are kept without their neighbours are
        below this version."""
        before = self.newest
        while before in self.commits:
            before -= 1
        return 0 if before < 0 else min((number for number in self.checkpoints if number >= before), default=before)

    def first_young(self, begin: int, before: float) -> int:
        """The lowest version, at most ``begin``, such that this version and all versions above it were the newest after
        ``before``, or may still be published."""
        version = begin
        while version > 0 and version in self.commits and self.commits[version].written > before:
            version -= 1
        return version

    def whole_from(self, young: int) -> int:
        """The newest readable checkpoint at or below ``young``; 0 if there is none."""
        return next((number for number, parts in self.checkpoints.items() if number <= young and is_whole(parts)), 0)

    def files_below(self, version: int, kept: Set[int]) -> list[Location]:
        """All files of the log that belong to a version below ``version``, except the ``kept`` versions."""
        found = ((entry.name, VERSIONED.match(entry.name)) for entry in self.entries)
        return [self.log / name for name, match in found
                if match is not None and int(match[1]) < version and int(match[1]) not in kept]  # fmt: skip


def needed_files(listing: LogListing, versions: Collection[int], newest: int) -> frozenset[str]:
    """The data files and deletion vectors that these versions of the table, and its newest version, refer to, relative
    to the table's folder. LakeError if the log does not say."""
    walk = _Walk(listing)
    needed: set[str] = set()
    before = -2
    for version in sorted({*versions, newest}):
        came = walk.to(version)
        # The set already has the files that this version shares with the version just before.
        needed |= _names(walk.replay.files.values() if came is None or version != before + 1 else came)
        before = version
    return frozenset(needed)


class _Walk:
    """Goes up through a log's versions: by commits, and by checkpoints at the start and where commits are missing."""

    def __init__(self, listing: LogListing) -> None:
        self._listing = listing
        self._number = -1
        self.replay = Replay()

    def to(self, version: int) -> list[Added] | None:
        """Go to a version; returns the files that were added on the way, or None if the way led over a checkpoint."""
        jumps = self._number < 0 or not self._listing.commits.keys() >= set(range(self._number + 1, version + 1))
        if jumps:
            self._jump(version)
        played = [self.replay.play(action) for number in range(self._number + 1, version + 1)
                  for action in commit_actions(self._listing.log, number)]  # fmt: skip
        self._number = version
        return None if jumps else [added for added in played if added is not None]

    def _jump(self, version: int) -> None:
        """Go to the newest readable checkpoint at or below ``version``, if it is above the current version."""
        for number, parts in self._listing.checkpoints.items():
            if not self._number < number <= version:
                continue
            replay = Replay()
            try:
                for action in checkpoint_actions(parts):
                    replay.play(action)
            except TornLog:
                continue
            self.replay, self._number = replay, number
            return


def _names(files: Iterable[Added]) -> set[str]:
    return {name for file in files for name in (file.path, file.vector) if name is not None}


def unneeded(listing: LogListing, versions: Collection[int], newest: int, before: float) -> list[Entry]:
    """The data files and deletion vectors to which neither these versions nor the newest version refers, and that were
    placed at ``before`` or earlier. The age matters because a file is placed before the commit that names it."""
    needed = needed_files(listing, versions, newest)
    return [entry for entry in storage.walk(listing.folder) if entry.name not in needed and entry.placed <= before]


def sweep(folder: Location, grace: timedelta) -> int:
    """Delete the files that are needed by no version that was the table's newest within ``grace``; returns how many.
    This is for tables without promised older versions. 0 if there is no table."""
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
    """Remove all files of a table; returns their number and their bytes. The log is removed last, and its first file
    last of all, because that file says whose table it is."""
    found = {entry.name: entry.size for entry in storage.walk(folder, hidden=True)}
    of_log = sorted((name for name in found if name.startswith(f"{DELTA_LOG}/")), reverse=True)
    storage.delete([folder / name for name in found.keys() - set(of_log)])
    for name in of_log:
        storage.delete([folder / name])
    storage.delete_folder(folder)
    return len(found), sum(found.values())
