"""Makes versions of the mirrors durable ("settles" them), and reads the position that each version itself records. A
consistent point names only settled versions. All tables are settled together, once per turn (one apply of the log). For
our own commits, it syncs only the file names, because the content of the files is already durable. For commits of other
writers among these versions, it syncs names and content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pgcdc_assets.core.layout import DELTA_LOG, Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.logfiles import Action, commit_actions
from pgcdc_assets.delta.recovery import foreign_files, recover
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta.foreigncommits import seen
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
        """Mirrors whose rows another writer changed since their copy, with a description of the change, as far as this
        run has read the mirrors' commits."""

    def recover(self, names: Iterable[TableName], points: ConsistentPoints) -> dict[TableName, tuple[str, ...]]:
        """Move away the incomplete files that a power cut left in these mirrors' logs, and settle what remains. Returns
        the names of the moved files, by table. Called once, before anything reads the mirrors."""
        aside: dict[TableName, tuple[str, ...]] = {}
        for name in names:
            listing = points.listing(name)
            promised = -1 if listing is None else listing.version
            found = recover(self._layout.mirror(name), promised)
            if found.number >= 0:
                self._settled[name] = _Settled(found.number, found.positions)
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
                # The mirror was moved away and created again.
                before = _Settled(-1, {})
            commits = _commits(folder, before.number, number)
            contents += foreign_files(folder, commits)
            folders += [folder / DELTA_LOG, *([folder] if before.number >= 0 else folder.up_to(self._layout.root))]
            found[name] = _Settled(number, {**before.positions, **_positions(commits)})
            self._see(name, commits)
        storage.settle(contents)
        storage.settle(folders)
        self._settled |= found
        return {name: self._position(name) for name in versions}

    def forget(self, name: TableName) -> None:
        """Forget a deleted mirror, because another mirror may be created in its place."""
        self._settled.pop(name, None)
        self.changed.pop(name, None)

    def _see(self, name: TableName, commits: Mapping[int, Sequence[Action]]) -> None:
        found = seen(self._layout.mirror(name), self._owner, commits)
        if found.copied:
            self.changed.pop(name, None)
        if found.change is not None:
            self.changed.setdefault(name, found.change)

    def _position(self, name: TableName) -> Lsn:
        position = own_position(self._settled[name].positions, self._owner, name)
        if position is None:
            raise LakeError("does not record which copy it has", thing=f"mirror {name}",
                            do=f"run `pgcdc snapshot {name.shell}`")  # fmt: skip
        return position


def _commits(folder: Location, after: int, upto: int) -> dict[int, list[Action]]:
    return {number: commit_actions(folder / DELTA_LOG, number) for number in range(after + 1, upto + 1)}


def _positions(commits: Mapping[int, list[Action]]) -> dict[str, int]:
    transactions = [action["txn"] for actions in commits.values() for action in actions if "txn" in action]
    return {one["appId"]: int(one["version"]) for one in transactions}
