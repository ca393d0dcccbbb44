"""The contract of a store: what the lake requires of the system that holds its files.

A store holds files, each at a :class:`~pgcdc_assets.core.layout.Location`. A folder is only the first part of the names
of its files, and need not be created. A file appears whole or not at all. Its content is durable when the call that put
it there returns. Its *name* is durable after :meth:`Store.settle` of its folder, so several commits may be put first
and settled together. A commit must not be reported before it is settled.

Errors are FileNotFoundError, FileExistsError, OSError (``errno`` says what the machine refuses), and StoreFailed: an
object store refuses a request or does not answer, which says nothing about a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from pgcdc_assets.core.layout import Location

HIDDEN: Final = (".", "_")
"""First characters of the names that :meth:`Store.walk` leaves out."""


@dataclass(frozen=True)
class Entry:
    """A file in a listing. Times are in seconds since 1970."""

    name: str
    """The file's name, relative to the folder that was listed."""
    size: int
    written: float
    """When the content was last written."""
    placed: float
    """The latest time at which the file can have got this name, which may be long after its content was written."""


class Lease(ABC):
    """A lease on a place, as its holder sees it."""

    pause: float = 0.0
    """The recommended pause between two calls of :meth:`write`, in seconds."""
    inherited_as: int | None = None
    """Set if the last holder did not give the place back, and so may not know that it has lost the place. This number
    is higher than the number of any earlier holder."""

    @abstractmethod
    def write(self, text: str) -> None:
        """Replace the text. During the call a reader may see a part of the text."""


class Guard(ABC):
    """Checks whether this process may write to a folder. Both methods raise LeaseLost if it may not."""

    @abstractmethod
    def check(self) -> None:
        """Check the lease before each write, without asking the store."""

    @abstractmethod
    def confirm(self) -> None:
        """Ask the store whether this process still holds the lease. Called when another writer's file was found."""


class Store(ABC):
    """Every implementation passes the same test (``tests/store/test_contract.py``)."""

    pace: float = 0.2
    """The recommended pause between two checks for files of other writers, in seconds."""

    # Reading ------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, at: Location, start: int = 0, size: int | None = None) -> bytes:
        """At most ``size`` bytes from ``start``; without ``size``, all bytes from ``start``."""

    @abstractmethod
    def open(self, at: Location) -> pa.NativeFile:
        """Open the file for reading at any position, as Parquet's readers require."""

    @abstractmethod
    def head(self, at: Location) -> Entry | None:
        """The file's entry; None if there is no file."""

    @abstractmethod
    def list_after(self, folder: Location, name: str = "") -> list[Entry]:
        """The files of a folder whose names sort after ``name``, in name order, without the files of folders inside."""

    @abstractmethod
    def walk(self, folder: Location, *, hidden: bool = False) -> Iterator[Entry]:
        """All files of a folder and of the folders inside, in no order. Without ``hidden``, leaves out files and
        folders whose names begin with a dot or an underscore, which Delta does not count as data of a table."""

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of calls to this store, in parallel if calls take long. The calls must not use this method."""
        return [call() for call in calls]

    # Writing ------------------------------------------------------------------------------------------

    @abstractmethod
    def draft(self, to: Location) -> str:
        """A path on this machine for writing the file of a place. A commit may name it only after :meth:`put`."""

    @abstractmethod
    def scratch(self, folder: Location) -> str:
        """A folder on this machine for long-lived drafts of the folder's files. It exists when this returns."""

    @abstractmethod
    def put(self, draft: str, to: Location) -> None:
        """Make a finished draft the file at a place. The draft is then gone."""

    @abstractmethod
    def create(self, to: Location, content: bytes) -> None:
        """Create a file, or raise FileExistsError. If several callers create the same file with different contents,
        only one caller succeeds."""

    @abstractmethod
    def replace(self, to: Location, content: bytes) -> None:
        """Create the file or replace its content. Content and name are durable when this returns."""

    @abstractmethod
    def copy(self, source: Location, to: Location) -> None:
        """Copy a file within this store to a place where no file exists."""

    @abstractmethod
    def delete(self, places: Iterable[Location]) -> None:
        """Delete files. Files that no longer exist are ignored."""

    @abstractmethod
    def settle(self, places: Iterable[Location]) -> None:
        """Make names in these folders, and contents of these files, durable, even if another process wrote them."""

    def options(self) -> dict[str, str]:
        """Options that delta-rs needs to open a table here, in addition to the environment."""
        return {}

    # Folders ------------------------------------------------------------------------------------------

    def make_private(self, root: Location) -> None:
        """Make the lake's root folder, which only its owner may enter. A store without folders does nothing."""
        del root

    def delete_folder(self, folder: Location) -> None:
        """Delete all files of a folder. Files that cannot be deleted stay."""
        self.delete([folder / entry.name for entry in self.walk(folder, hidden=True)])

    def delete_empty(self, folder: Location) -> None:
        """Delete a folder if it is empty. A store without folders does nothing."""
        del folder

    def move_folder(self, source: Location, to: Location) -> None:
        """Move all files of a folder, in the order of their names. If the machine stops in between, the rest of a
        table's log lacks its beginning, and so cannot be mistaken for an older version of the table."""
        for name in sorted(entry.name for entry in self.walk(source, hidden=True)):
            self.copy(source / name, to / name)
            self.delete([source / name])
