"""Places in the lake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

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

    root: Path

    @property
    def own(self) -> Path:
        return self.root / OWN

    @property
    def change_log(self) -> Path:
        return self.own / "change_log"

    @property
    def consistent_points(self) -> Path:
        return self.own / "consistent_points"

    @property
    def table_states(self) -> Path:
        return self.own / "table_states"

    @property
    def untaken_rows(self) -> Path:
        return self.own / "untaken_rows"

    @property
    def staging(self) -> Path:
        """Copies whose columns are to replace a mirror's, deleted after their commit."""
        return self.own / "copy"

    @property
    def lock(self) -> Path:
        return self.own / "lock"

    @property
    def outcomes(self) -> Path:
        """The file that keeps how the last operations ended."""
        return self.own / "outcomes.json"

    @property
    def hold(self) -> Path:
        """Request of a running ``verify`` for a boundary at its LSN."""
        return self.own / "hold"

    @property
    def request(self) -> Path:
        """The file in which another command asks the sync that holds the lock."""
        return self.own / "request"

    @property
    def answer(self) -> Path:
        """The file with the last answer of that sync."""
        return self.own / "answer.json"

    def mirror(self, table: TableName) -> Path:
        return self.root / table.folder

    def changes(self, table: TableName) -> Path:
        return self.own / "changes" / table.folder
