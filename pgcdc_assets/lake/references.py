"""Which files the versions of a Delta table refer to, from a given version on: read from its log.

VACUUM's own rule goes by the time of removal, and forgets a removal after a while. What readers are
promised goes by versions: a file stays as long as any version from the oldest promised one on refers to
it, deletion vectors included, whatever the clock said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pgcdc_assets.core.deltafiles import commit_actions
from pgcdc_assets.core.layout import DELTA_LOG
from pgcdc_assets.lake.deltalog import Added, Replay, newest_checkpoint


@dataclass(frozen=True)
class References:
    live: tuple[Added, ...]
    """The files of the newest version."""
    needed: frozenset[str]
    """Of every version asked for: data files and deletion vectors, relative to the table's folder."""


def references(folder: Path, oldest: int, newest: int) -> References:
    """What the versions ``oldest`` to ``newest`` of the table refer to. LakeError where its log does not say."""
    log = folder / DELTA_LOG
    begin, actions = newest_checkpoint(log, oldest)
    replay = Replay()
    for action in actions:
        replay.play(action)
    needed: set[str] = set() if begin < oldest else _names(replay.files.values())
    for version in range(begin + 1, newest + 1):
        for action in commit_actions(log, version):
            added = replay.play(action)
            if added is not None and version > oldest:
                needed |= _names([added])
        if version == oldest:
            needed |= _names(replay.files.values())
    return References(tuple(replay.files.values()), frozenset(needed))


def _names(files: Iterable[Added]) -> set[str]:
    return {name for file in files for name in (file.path, file.vector) if name is not None}
