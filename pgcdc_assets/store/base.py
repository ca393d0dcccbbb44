"""The interface of a store, and what the lake requires of each store.

A store contains files, each at a :class:`~pgcdc_assets.core.layout.Location` (a place). A folder is only the common
beginning of the names of its files, and need not be created. A file appears complete or not at all. Its content is
durable when the call that wrote it returns. Its *name* is durable only after :meth:`Store.settle` was called for its
folder, so that one call can make the names of several files durable. A caller must not report a commit as done before
its name is durable.

The methods raise FileNotFoundError, FileExistsError, or OSError with the machine's ``errno``. If an object store
refuses a request or does not answer, they raise StoreFailed. StoreFailed does not show whether the file exists.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from pgcdc_assets.core.layout import Location

HIDDEN: Final = (".", "_")
"""First characters of the names that :meth:`Store.walk` leaves out by default."""


@dataclass(frozen=True)
class Entry:
    """A file in a listing. Times are in seconds since 1970."""

    name: str
    """The file's name, relative to the folder that was listed."""
    size: int
    written: float
    """When the content was last written."""
    placed: float
    """When the file got this name. The content may have been written long before. If the store does not know the time,
    this is a later time."""


class Lease(ABC):
    """A lease that this process holds. Only one process at a time can hold the lease of a place."""

    pause: float = 0.0
    """The recommended pause between two calls of :meth:`write`, in seconds."""
    inherited_as: int | None = None
    """None if the previous holder gave the lease back. Otherwise a number that is higher than all earlier such numbers.
    The previous holder may then still run, and not know that it has lost the lease. So this process must make its
    commits fail (:func:`pgcdc_assets.log.commit.shut_out`)."""

    @abstractmethod
    def write(self, text: str) -> None:
        """Replace the lease's text. During the call, a reader may see a part of the text."""


class Guard(ABC):
    """Checks whether this process may still write to a folder. Both methods raise LeaseLost if it may not."""

    @abstractmethod
    def check(self) -> None:
        """Called before each write. Raises LeaseLost if another process may have taken the lease. Sends no request to
        the store."""

    @abstractmethod
    def confirm(self) -> None:
        """Called if a file that this process wanted to create already exists, perhaps because the next holder created
        it. Asks the store whether this process still holds the lease."""


class Store(ABC):
    """The interface of a store. All implementations must pass ``tests/store/test_contract.py``."""

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
        """The files of a folder whose names sort after ``name``, in name order. Files of subfolders are left out."""

    @abstractmethod
    def walk(self, folder: Location, *, hidden: bool = False) -> Iterator[Entry]:
        """All files of a folder and its subfolders, in any order. Without ``hidden``, leaves out files and folders
        whose names begin with a dot or an underscore, which are not data files of a Delta table."""

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make several calls to this store, and return their results. A store with slow requests makes them in
        parallel. The calls themselves must not use this method."""
        return [call() for call in calls]

    # Writing ------------------------------------------------------------------------------------------

    @abstractmethod
    def draft(self, to: Location) -> str:
        """A path on this machine at which the content for a place can be written. :meth:`put` then moves the content to
        the place. No commit may name the file before that."""

    @abstractmethod
    def scratch(self, folder: Location) -> str:
        """A folder on this machine for drafts of files of ``folder`` that are written over a longer time. The folder
        exists when this returns."""

    @abstractmethod
    def put(self, draft: str, to: Location) -> None:
        """Move a finished draft to a place."""

    @abstractmethod
    def create(self, to: Location, content: bytes) -> None:
        """Create a file. Raises FileExistsError if the file exists. If several callers create the same file at the same
        time with different contents, only one caller succeeds."""

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
        """Make the names in these folders and the contents of these files durable, even if another process wrote
        them."""

    def options(self) -> dict[str, str]:
        """Options that delta-rs needs to open a table in this store, in addition to the environment."""
        return {}

    # Folders ------------------------------------------------------------------------------------------

    def make_private(self, root: Location) -> None:
        """Create the lake's root folder, which only its owner may enter. A store without folders does nothing."""
        del root

    def probe(self, root: Location) -> None:
        """Raise the store's error if files cannot be created and deleted under the lake's root."""
        probe = root / f"_probe_{uuid.uuid4().hex}"
        self.create(probe, b"")
        self.delete([probe])

    def free_bytes(self, root: Location) -> int | None:
        """Free bytes of the lake's file system, even before the lake exists. None for a store without a limit."""
        del root
        return None

    def delete_folder(self, folder: Location) -> None:
        """Delete a folder with all its files. Ignores files that cannot be deleted."""
        self.delete([folder / entry.name for entry in self.walk(folder, hidden=True)])

    def delete_empty(self, folder: Location) -> None:
        """Delete a folder if it is empty. A store without folders does nothing."""
        del folder

    def move_folder(self, source: Location, to: Location) -> None:
        """Move all files of a folder, in the order of their names. If the machine stops during the move, the part of a
        Delta log that is left in ``source`` lacks its beginning, so no reader takes it for a complete table."""
        for name in sorted(entry.name for entry in self.walk(source, hidden=True)):
            self.copy(source / name, to / name)
            self.delete([source / name])
