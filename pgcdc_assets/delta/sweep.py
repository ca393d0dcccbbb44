"""Which files of a table nobody needs any more: removed ones, and what killed processes left.

VACUUM's rule goes by the clock and by what the log says of removals. Here a file stays as long as a version that
somebody may be reading refers to it: promised ones, the newest, and those that were the newest of late.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from datetime import timedelta

from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.log import is_whole, open_delta
from pgcdc_assets.delta.logfiles import COMMIT, VERSIONED, checkpoints_among
from pgcdc_assets.delta.references import references
from pgcdc_assets.store import storage
from pgcdc_assets.store.base import Entry


@dataclass(frozen=True)
class LogListing:
    """A table's log as one listing has it."""

    log: Location
    entries: tuple[Entry, ...]
    commits: Mapping[int, Entry]
    checkpoints: Mapping[int, list[Location]]
    """Those of which all parts are there, the newest first."""

    @classmethod
    def of(cls, folder: Location) -> LogListing:
        log = folder / DELTA_LOG
        entries = tuple(storage.list_after(log))
        commits = {int(match[1]): entry for entry in entries if (match := COMMIT.fullmatch(entry.name))}
        return cls(log, entries, commits, checkpoints_among((entry.name for entry in entries), log))

    @property
    def newest(self) -> int:
        """-1 where there is no version."""
        return max([-1, *self.commits, *self.checkpoints])

    def holds(self, version: int) -> bool:
        """Whether the log still holds it; what Delta has cleaned up is gone."""
        begin = next((number for number in self.checkpoints if number <= version), -1)
        return self.commits.keys() >= set(range(begin + 1, version + 1))

    @property
    def whole_since(self) -> int:
        """The lowest version from which on the log has every one: those that are kept alone lie below."""
        before = self.newest
        while before in self.commits:
            before -= 1
        return 0 if before < 0 else min((number for number in self.checkpoints if number >= before), default=before)

    def first_young(self, begin: int, before: float) -> int:
        """The first version, at most ``begin``, from which on each was the newest after ``before``, or may be published
        yet."""
        version = begin
        while version > 0 and version in self.commits and self.commits[version].written > before:
            version -= 1
        return version

    def whole_from(self, young: int) -> int:
        """The newest checkpoint at or below a version that can be read; 0 where there is none."""
        return next((number for number, parts in self.checkpoints.items() if number <= young and is_whole(parts)), 0)

    def files_below(self, version: int, kept: Set[int]) -> list[Location]:
        """All of the log that belongs to a version below, other than the ``kept`` ones."""
        found = ((entry.name, VERSIONED.match(entry.name)) for entry in self.entries)
        return [self.log / name for name, match in found
                if match is not None and int(match[1]) < version and int(match[1]) not in kept]  # fmt: skip


def unneeded(folder: Location, versions: Collection[int], newest: int, before: float) -> list[Entry]:
    """The data files and deletion vectors that these versions and the newest do not refer to, and that have been in
    the folder since ``before``: a file is put there before the commit that names it."""
    needed = references(folder, versions, newest).needed
    return [entry for entry in storage.walk(folder) if entry.name not in needed and entry.placed <= before]


def sweep(folder: Location, grace: timedelta) -> int:
    """Delete what no version of a table needs that was its newest within ``grace``; how many files.

    For tables of which nobody is promised an older version. 0 where there is no table.
    """
    table = open_delta(folder)
    if table is None:
        return 0
    before, listing = time.time() - grace.total_seconds(), LogListing.of(folder)
    young = listing.first_young(table.number, before)
    held = [version for version in range(young, table.number + 1) if listing.holds(version)]
    old = unneeded(folder, held, table.number, before)
    storage.delete([folder / entry.name for entry in old])
    return len(old)
