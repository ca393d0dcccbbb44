"""Places in the lake."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Final, Self

from pgcdc_assets.core.location import Location
from pgcdc_assets.core.names import TableName

OWN: Final = "_pgcdc"
"""Folder of all that is not a mirror. A schema of this name is encoded, so none collides."""

DELTA_LOG: Final = "_delta_log"
"""In the folder of each Delta table."""
LAST_CHECKPOINT: Final = "_last_checkpoint"
"""Within a Delta log."""


def commit_name(version: int) -> str:
    """Within a Delta log."""
    return f"{version:020}.json"


def checkpoint_name(version: int) -> str:
    """Within a Delta log; of a checkpoint of one file."""
    return f"{version:020}.checkpoint.parquet"


@dataclass(frozen=True)
class Layout:
    """Folders under the lake's root; nothing is created here."""

    root: Location

    @classmethod
    def of(cls, root: str | PathLike[str] | Location) -> Self:
        """Of a lake in a local folder, or at a URL."""
        return cls(Location.of(root))

    @property
    def own(self) -> Location:
        return self.root / OWN

    @property
    def change_log(self) -> Location:
        return self.own / "change_log"

    @property
    def consistent_points(self) -> Location:
        return self.own / "consistent_points"

    @property
    def table_states(self) -> Location:
        return self.own / "table_states"

    @property
    def untaken_rows(self) -> Location:
        return self.own / "untaken_rows"

    @property
    def messages(self) -> Location:
        """The feed of logical messages."""
        return self.own / "messages"

    @property
    def staging(self) -> Location:
        """Copies whose columns are to replace a mirror's, and tables that were moved away."""
        return self.own / "copy"

    @property
    def lock(self) -> Location:
        return self.own / "lock"

    @property
    def in_progress(self) -> Location:
        """What the receiver announces of transactions that are in progress."""
        return self.own / "in_progress"

    @property
    def outcomes(self) -> Location:
        """The file that keeps how the last operations ended."""
        return self.own / "outcomes.json"

    @property
    def hold(self) -> Location:
        """Request of a running ``verify`` for a boundary at its LSN."""
        return self.own / "hold"

    @property
    def endpos(self) -> Location:
        """The file with the LSN at which following ends; see :mod:`pgcdc_assets.flow.sentinel`."""
        return self.own / "endpos"

    @property
    def apply_paused(self) -> Location:
        """The file that is there while nothing is applied."""
        return self.own / "apply_paused"

    @property
    def waiting(self) -> Location:
        """The place of the command that waits for the lock; see :mod:`pgcdc_assets.flow.lock`."""
        return self.own / "waiting"

    def mirror(self, table: TableName) -> Location:
        return self.root / table.folder

    def changes(self, table: TableName) -> Location:
        return self.own / "changes" / table.folder
