"""Makes versions of mirrors durable ("settles" them). A consistent point names only settled versions. All tables are
settled together, once per turn. The content of the files of our own commits is already durable, so only the folders
that contain the names of these files are synced. For commits of other writers, the content is synced too.

This module also finds the commits by which another writer changed rows of a mirror. Comments, properties, columns that
another writer adds, OPTIMIZE and VACUUM change no row. Any other commit by another writer may make the mirror differ
from the source, although the mirror's LSN does not change. Such a table is reported until it is copied again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa

from pgcdc_assets.core.layout import DELTA_LOG, Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import in_int96, opened_parquet
from pgcdc_assets.delta.logfiles import Action, commit_actions, commit_if_there
from pgcdc_assets.delta.recovery import foreign_files, is_own, recover
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta.mirror import own_position
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store import storage


@dataclass(frozen=True)
class _Settled:
    number: int
    positions: Mapping[str, int]


class DurableVersions:
    """The versions of mirrors that this run has made durable. ``owner`` is :meth:`Identity.app_id`."""

    def __init__(self, layout: Layout, owner: str) -> None:
        self._layout = layout
        self._owner = owner
        self._settled: dict[TableName, _Settled] = {}
        self.changed: dict[TableName, str] = {}
        """The mirrors whose rows another writer has changed since their copy, with a description of the change. Newer
        commits are read by the next :meth:`settle`."""

    def recover(self, names: Iterable[TableName], points: ConsistentPoints) -> dict[TableName, tuple[str, ...]]:
        """Rename the incomplete files that a power cut left in these mirrors' Delta logs, and make the remaining
        versions durable. Returns the old names of the files, by table. Called once, before anything reads the
        mirrors."""
        aside: dict[TableName, tuple[str, ...]] = {}
        for name in names:
            listing = points.listing(name)
            promised = -1 if listing is None else listing.version
            found = recover(self._layout.mirror(name), promised)
            if found.number >= 0:
                self._settled[name] = _Settled(found.number, found.positions)
                if listing is not None and listing.changed is not None:
                    # The commit that changed the rows is not in the tail, because the point lists a later version.
                    self.changed[name] = listing.changed
                self._see(name, found.tail)
            if found.aside:
                aside[name] = found.aside
        return aside

    def settle(self, versions: Mapping[TableName, int]) -> dict[TableName, Lsn]:
        """Make these versions durable; returns the position that each mirror itself records."""
        moved = {name: number for name, number in versions.items()
                 if name not in self._settled or self._settled[name].number != number}  # fmt: skip
        contents: list[Location] = []
        folders: list[Location] = []
        found: dict[TableName, _Settled] = {}
        for name, number in moved.items():
            folder, before = self._layout.mirror(name), self._settled.get(name, _Settled(-1, {}))
            if before.number > number:
                # The mirror was moved away and created again, with lower numbers.
                before = _Settled(-1, {})
            commits = {one: commit_actions(folder / DELTA_LOG, one) for one in range(before.number + 1, number + 1)}
            contents += foreign_files(folder, commits)
            folders += [folder / DELTA_LOG, *([folder] if before.number >= 0 else folder.up_to(self._layout.root))]
            found[name] = _Settled(number, {**before.positions, **_positions(commits)})
            self._see(name, commits)
        storage.settle(contents)
        storage.settle(folders)
        self._settled |= found
        return {name: self._position(name) for name in versions}

    def forget(self, name: TableName) -> None:
        """Forget what is known of a deleted mirror, because another mirror may be created in its place."""
        self._settled.pop(name, None)
        self.changed.pop(name, None)

    def _see(self, name: TableName, commits: Mapping[int, Sequence[Action]]) -> None:
        copied, change = seen(self._layout.mirror(name), self._owner, commits)
        if copied:
            self.changed.pop(name, None)
        if change is not None:
            self.changed.setdefault(name, change)

    def _position(self, name: TableName) -> Lsn:
        position = own_position(self._settled[name].positions, self._owner, name)
        if position is None:
            raise LakeError("does not record the LSN of the table's copy", thing=f"mirror {name}",
                            do=f"run `pgcdc snapshot {name.shell}`")  # fmt: skip
        return position


def _positions(commits: Mapping[int, list[Action]]) -> dict[str, int]:
    transactions = [action["txn"] for actions in commits.values() for action in actions if "txn" in action]
    return {one["appId"]: int(one["version"]) for one in transactions}


_SPARK: Final = "Apache-Spark"
"""The engine that reads INT96 timestamps exactly. Other engines may convert them to nanoseconds, so that an OPTIMIZE by
them writes wrong values."""


def seen(folder: Location, owner: str, commits: Mapping[int, Sequence[Action]]) -> tuple[bool, str | None]:
    """What some consecutive commits did to a mirror: whether one of them is a snapshot copy, and the first change of
    rows by another writer after the last copy, as text. ``owner`` is :meth:`Identity.app_id`."""
    copied, change = False, None
    for number in sorted(commits):
        actions = commits[number]
        apps = [str(action["txn"]["appId"]) for action in actions if "txn" in action]
        if any(app.startswith(f"{owner}/snapshot/") for app in apps):
            copied, change = True, None
            continue
        ours = is_own(actions) or any(app.startswith(f"{owner}/") for app in apps)
        if change is None and not ours and _changes_rows(folder, actions):
            change = f"another writer changed rows of this mirror (version {number})"
    return copied, change


def change_since(folder: Location, owner: str, version: int) -> str | None:
    """The first change of rows by another writer after ``version``, as text; None if there is none. LakeError if a
    commit is damaged."""
    commits: dict[int, Sequence[Action]] = {}
    number = version + 1
    while (actions := commit_if_there(folder / DELTA_LOG, number)) is not None:
        commits[number] = actions
        number += 1
    return seen(folder, owner, commits)[1]


def _changes_rows(folder: Location, actions: Sequence[Action]) -> bool:
    added = [action["add"] for action in actions if "add" in action]
    removed = [action["remove"] for action in actions if "remove" in action]
    if any(one.get("dataChange", True) for one in [*added, *removed]):
        return True
    # The commit claims that it only moves rows to other files (`dataChange` is false). This may be wrong, so the row
    # counts of the removed and the added files are compared.
    before, after = ([_file(folder, one) for one in some] for some in (removed, added))
    if None not in before and None not in after and _rows(before) != _rows(after):
        return True
    engines = [str(action.get("commitInfo", {}).get("engineInfo", "")) for action in actions]
    return not any(engine.startswith(_SPARK) for engine in engines) and any(
        one.int96 for one in before if one is not None
    )


@dataclass(frozen=True)
class _File:
    rows: int
    int96: bool


def _file(folder: Location, action: dict[str, Any]) -> _File | None:
    """What the footer of an added or removed file shows. None if the file cannot be read, for example because it was
    deleted."""
    try:
        with opened_parquet(folder / unquote(action["path"])) as file:
            footer = file.metadata
    except (OSError, pa.ArrowException):
        return None
    vector = action.get("deletionVector") or {}
    return _File(footer.num_rows - int(vector.get("cardinality", 0)), in_int96(footer))


def _rows(files: Sequence[_File | None]) -> int:
    return sum(one.rows for one in files if one is not None)
