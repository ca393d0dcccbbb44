"""One listing of the folder of a table's log."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.log import is_whole
from pgcdc_assets.delta.logfiles import COMMIT, VERSIONED, checkpoints_among
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
        """The lowest version from which the log has every version. Versions that are kept alone are below it."""
        before = self.newest
        while before in self.commits:
            before -= 1
        return 0 if before < 0 else min((number for number in self.checkpoints if number >= before), default=before)

    def first_young(self, begin: int, before: float) -> int:
        """The lowest version, at most ``begin``, such that this version and all versions above it were the newest
        after ``before``, or may still be published."""
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
