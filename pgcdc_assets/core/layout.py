"""The class for the location of a file or folder, and the locations of all files in the lake.
:mod:`pgcdc_assets.store` reads and writes these files."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Final, Self

from pgcdc_assets.core.names import TableName

LOCAL: Final = ""
"""The scheme of locations on this machine's file system."""
_MARK: Final = "://"

OWN: Final = "_pgcdc"
"""The folder of all files in the lake that do not belong to mirrors. If a schema has this name, the name of its folder
is encoded (:func:`pgcdc_assets.core.names.encoded`)."""

DELTA_LOG: Final = "_delta_log"
"""The folder of the Delta log, in the folder of each Delta table."""
LAST_CHECKPOINT: Final = "_last_checkpoint"
"""The file in a Delta log that names the newest checkpoint."""


@dataclass(frozen=True, order=True)
class Location:
    """The location of a file or folder on any store: an absolute local path, or a URL whose scheme names the kind of
    store. Locations are compared and sorted by their texts."""

    text: str
    """For example ``/lake/public/t``, or ``scheme://store/lake/public/t``; without a slash at its end."""

    @classmethod
    def of(cls, place: str | PathLike[str] | Self) -> Self:
        """The location of a path or URL. A relative path starts at the working directory."""
        if isinstance(place, cls):
            return place
        text = str(place)
        # ``..`` is not removed here: the file system follows symbolic links first, so ``a/link/..`` may be a different
        # folder than ``a``.
        return cls(text.rstrip("/") if _MARK in text else str(Path(text).absolute()))

    @property
    def scheme(self) -> str:
        """The URL's scheme; ``LOCAL`` for a path."""
        return LOCAL if self.text.startswith("/") else self.text.partition(_MARK)[0]

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        return Location(self.text.rpartition("/")[0] or "/")

    @property
    def uri(self) -> str:
        """The location as a URI, for other programs."""
        return PurePosixPath(self.text).as_uri() if self.scheme == LOCAL else self.text

    @property
    def for_hadoop(self) -> str:
        """The location for Spark's readers. Hadoop's scheme for S3 is ``s3a``."""
        return self.text.replace("s3://", "s3a://", 1) if self.scheme == "s3" else self.text

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.text.rstrip('/')}/{name}")

    def with_name(self, name: str) -> Location:
        """The location of the file with this name in the same folder."""
        return self.parent / name

    def up_to(self, root: Location) -> list[Location]:
        """This folder and its parents, up to and including ``root``'s parent. A new folder is durable once all of these
        folders are synced to disk."""
        found = [self]
        while found[-1] != root.parent and found[-1] != found[-1].parent:
            found.append(found[-1].parent)
        return found

    def __str__(self) -> str:
        return self.text


def commit_name(version: int) -> str:
    """File name of a commit in a Delta log."""
    return f"{version:020}.json"


def checkpoint_name(version: int) -> str:
    """File name of a single-file checkpoint in a Delta log."""
    return f"{version:020}.checkpoint.parquet"


class _Own:
    """A file or folder in the folder :attr:`Layout.own`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: Layout, owner: type[Layout]) -> Location:
        return layout.own / self._name


@dataclass(frozen=True)
class Layout:
    """The locations of the files and folders under the lake's root. This class creates nothing."""

    root: Location

    change_log = _Own("change_log")
    consistent_points = _Own("consistent_points")
    table_states = _Own("table_states")
    untaken_rows = _Own("untaken_rows")
    messages = _Own("messages")
    """The feed (a Delta table) of the logical messages that the setting ``messages`` names."""
    staging = _Own("copy")
    """The folder for change feeds that cannot be read. A run moves them here, and maintenance deletes them."""
    lock = _Own("lock")
    in_progress = _Own("in_progress")
    """The file in which the receiver announces transactions in progress."""
    extent = _Own("extent")
    """The file with the LSN up to which the log is complete; see :mod:`pgcdc_assets.log.extent`."""
    outcomes = _Own("outcomes.json")
    """The file that records how the last run of each operation ended."""
    counts = _Own("counts.json")
    """The file in which runs count rows, bytes and seconds, for ``pgcdc metrics``."""
    proofs = _Own("proofs.json")
    """The file that records when and at which LSN ``verify`` last compared each table, with the result."""
    registered = _Own("registered.json")
    """The file that records which mirrors are registered in a catalog of a query engine."""
    hold = _Own("hold")
    """The file in which a running ``verify`` asks the sync to publish a consistent point at the LSN that it
    compares."""
    endpos = _Own("endpos")
    """The file with the LSN at which follow mode ends; see :mod:`pgcdc_assets.flow.requests`."""
    apply_paused = _Own("apply_paused")
    """The file that exists while runs do not apply changes to mirrors, because a user has paused this."""
    waiting = _Own("waiting")
    """The lease of a command that waits until a running sync passes on the lake's lock; see
    :mod:`pgcdc_assets.flow.lock`."""

    @classmethod
    def of(cls, root: str | PathLike[str] | Location) -> Self:
        """The layout of a lake in a local folder, or at a URL."""
        return cls(Location.of(root))

    @property
    def own(self) -> Location:
        return self.root / OWN

    @property
    def ledgers(self) -> tuple[Location, ...]:
        """The folders of the ledgers, which are small Delta tables for facts about mirrors
        (:mod:`pgcdc_assets.points`)."""
        return self.table_states, self.consistent_points, self.untaken_rows

    def mirror(self, table: TableName) -> Location:
        return self.root / table.folder

    def changes(self, table: TableName) -> Location:
        return self.own / "changes" / table.folder
