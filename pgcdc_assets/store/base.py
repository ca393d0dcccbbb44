"""The contract of a store: what the lake asks of whatever holds its bytes.

A store knows files, each at a :class:`~pgcdc_assets.core.location.Location`; a folder is only the beginning of its
files' names, and need not be made. A file appears whole, or not at all, and its content is durable when the call that
put it there returns. Its *name* is durable after :meth:`Store.settle` of its folder. So a commit may be put at once and
settled later together with others, and nobody is told of it before it is settled.

Errors are Python's own: FileNotFoundError, FileExistsError, and OSError, whose ``errno`` says what a machine refuses.
StoreFailed says that an object store refuses or does not answer, and nothing about a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from pgcdc_assets.core.location import Location

HIDDEN: Final = (".", "_")
"""First characters of the names that :meth:`Store.walk` passes over."""


@dataclass(frozen=True)
class Entry:
    """A file as a listing has it; times in seconds since 1970."""

    name: str
    """Relative to the folder that was listed."""
    size: int
    written: float
    """When its content was last written."""
    placed: float
    """The latest time at which it can have come to this name: a file may be written long before it is put in place."""


class Lease(ABC):
    """A place as its holder has it."""

    pause: float = 0.0
    """Seconds that are best left between one text and the next."""
    inherited_as: int | None = None
    """Set where the last holder did not give the place back, and may not know yet that it has lost it: a number that is
    higher than that of any holder before."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Replace the text. A reader may see a part of it meanwhile."""


class Guard(ABC):
    """Says whether this process may write to a folder. LeaseLost if it may not."""

    @abstractmethod
    def check(self) -> None:
        """Before anything is written, by what is known here."""

    @abstractmethod
    def confirm(self) -> None:
        """After another writer was met, by what is known to all."""


class Store(ABC):
    """Every implementation passes the same test (``tests/store/test_contract.py``)."""

    pace: float = 0.2
    """Seconds that are best left between one look at what others may have written and the next."""

    # Reading ------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, at: Location, start: int = 0, size: int | None = None) -> bytes:
        """``size`` bytes from ``start``, or all that follow; fewer where the file ends."""

    @abstractmethod
    def open(self, at: Location) -> pa.NativeFile:
        """The file for reading at any position, as Parquet's readers do."""

    @abstractmethod
    def head(self, at: Location) -> Entry | None:
        """The facts of a file; None where there is no file."""

    @abstractmethod
    def list_after(self, folder: Location, name: str = "") -> list[Entry]:
        """The files in a folder whose names sort after ``name``, in that order; not those in folders within."""

    @abstractmethod
    def walk(self, folder: Location, *, hidden: bool = False) -> Iterator[Entry]:
        """All files in a folder and in those within, in no order. Names of files and folders that begin with a dot or
        an underscore are passed over unless ``hidden``: Delta does not count them as data of a table."""

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of calls to this store whose order does not matter: side by side where each takes a while. None
        of them may use this itself."""
        return [call() for call in calls]

    # Writing ------------------------------------------------------------------------------------------

    @abstractmethod
    def draft(self, to: Location) -> str:
        """A path on this machine where the file for a place is best made. Nobody takes it for a file of the lake
        until a commit names it, and :meth:`put` is called before that."""

    @abstractmethod
    def scratch(self, folder: Location) -> str:
        """An existing folder on this machine, for drafts of that folder's files that wait for long."""

    @abstractmethod
    def put(self, draft: str, to: Location) -> None:
        """Make a finished draft the file at a place; the draft is gone."""

    @abstractmethod
    def create(self, to: Location, content: bytes) -> None:
        """Create a file with this content. FileExistsError if there is one: of several callers one succeeds, provided
        that their contents differ."""

    @abstractmethod
    def replace(self, to: Location, content: bytes) -> None:
        """Put content in the place of whatever file is there; its name is durable as well."""

    @abstractmethod
    def copy(self, source: Location, to: Location) -> None:
        """Copy a file to a place where there is none. Both places are in this store."""

    @abstractmethod
    def delete(self, places: Iterable[Location]) -> None:
        """Delete files. Those that are gone already are passed over."""

    @abstractmethod
    def settle(self, places: Iterable[Location]) -> None:
        """Make durable the names in folders, and the content of files that others wrote."""

    def options(self) -> dict[str, str]:
        """What delta-rs must be told to open a table here, beside the environment."""
        return {}

    # Folders ------------------------------------------------------------------------------------------

    def make_private(self, root: Location) -> None:
        """Make the lake's own folder, open to its owner alone, in a store that has folders."""
        del root

    def delete_folder(self, folder: Location) -> None:
        """Delete all files of a folder; what cannot be deleted stays."""
        self.delete([folder / entry.name for entry in self.walk(folder, hidden=True)])

    def delete_empty(self, folder: Location) -> None:
        """Delete a folder that holds nothing, in a store that has folders."""
        del folder

    def move_folder(self, source: Location, to: Location) -> None:
        """Move all files of a folder, in the order of their names: if a machine stops in the middle, what is left of a
        table's log lacks its beginning, and is never taken for an older table."""
        for name in sorted(entry.name for entry in self.walk(source, hidden=True)):
            self.copy(source / name, to / name)
            self.delete([source / name])
