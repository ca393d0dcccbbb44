"""Reads from a Delta table's log which files some of its versions refer to.

VACUUM's own rule goes by the time of removal, and forgets a removal after a while. What readers are promised goes by
versions: a file, also of deletion vectors, stays as long as any promised version refers to it, at any age. The log may
lack the versions between two promised versions if there is a checkpoint to continue from
(:mod:`pgcdc_assets.mirror.delta.thinning`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pgcdc_assets.delta.log import Added, Replay, checkpoint_actions
from pgcdc_assets.delta.logfiles import commit_actions
from pgcdc_assets.delta.loglisting import LogListing
from pgcdc_assets.errors import TornLog


@dataclass(frozen=True)
class References:
    live: tuple[Added, ...]
    """The files of the newest version."""
    needed: frozenset[str]
    """Data files and deletion vectors of every version asked for, relative to the table's folder."""


def references(listing: LogListing, versions: Collection[int], newest: int) -> References:
    """The files that these versions of the table, and its newest version, refer to. LakeError if its log does not
    say."""
    walk = _Walk(listing)
    needed: set[str] = set()
    before = -2
    for version in sorted({*versions, newest}):
        came = walk.to(version)
        # The set already has the files that this version shares with the version just before.
        needed |= _names(walk.replay.files.values() if came is None or version != before + 1 else came)
        before = version
    return References(tuple(walk.replay.files.values()), frozenset(needed))


class _Walk:
    """Goes up through a log's versions: by commits, or by a checkpoint at the beginning and where commits are
    missing."""

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
