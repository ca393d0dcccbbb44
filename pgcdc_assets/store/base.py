"""The contract of a store: what the lake asks of whatever holds its bytes.

A store knows files, each at a :class:`~pgcdc_assets.core.location.Location`; a folder is what its files' names begin
with, and needs no making. A file appears whole, or not at all, and its content is durable when the call that put it
there returns. Its *name* is durable after :meth:`Store.settle` of its folder. So a commit may be put at once and
settled together with others, and nobody is told of it before.

Errors are Python's own: FileNotFoundError, FileExistsError, and OSError, whose ``errno`` says what a machine refuses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pgcdc_assets.core.location import Location

HIDDEN: Final = (".", "_")
"""What names begin with that :meth:`Store.walk` passes over."""


@dataclass(frozen=True)
class Entry:
    """A file as a listing has it; times in seconds since 1970."""

    name: str
    """Relative to the folder that was listed."""
    size: int
    written: float
    """When its content was last written."""
    placed: float
    """When it came to this name, at the latest: a file may be written long before it is put in its place."""


class Store(ABC):
    """Every implementation passes the same test (``tests/store/test_contract.py``)."""

    # Reading ------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, at: Location, start: int = 0, size: int | None = None) -> bytes:
        """``size`` bytes from ``start``, or all that follow; fewer where the file ends."""

    @abstractmethod
    def open(self, at: Location) -> pa.NativeFile:
        """The file for reading here and there, as Parquet's readers do."""

    @abstractmethod
    def head(self, at: Location) -> Entry | None:
        """The facts of a file; None where there is no file."""

    @abstractmethod
    def list_after(self, folder: Location, name: str = "") -> list[Entry]:
        """The files in a folder whose names sort after ``name``, in that order; not those in folders within."""

    @abstractmethod
    def walk(self, folder: Location, *, hidden: bool = False) -> Iterator[Entry]:
        """All files in a folder and in those within, in no order. Names of files and folders that begin with a dot or
        an underscore are passed over unless ``hidden``: Delta takes them for none of a table's data."""

    # Writing ------------------------------------------------------------------------------------------

    @abstractmethod
    def draft(self, to: Location) -> str:
        """A path on this machine where the file for a place is best made. Nobody takes it for a file of the lake
        until something names it, and whoever names it puts it first."""

    @abstractmethod
    def scratch(self, folder: Location) -> str:
        """A folder on this machine for drafts of files for that folder which wait there for long. It exists."""

    @abstractmethod
    def put(self, draft: str, to: Location) -> None:
        """Make a finished draft the file at a place; the draft is gone."""

    @abstractmethod
    def create(self, to: Location, content: bytes) -> None:
        """FileExistsError where there is a file: of several that call, one succeeds."""

    @abstractmethod
    def replace(self, to: Location, content: bytes) -> None:
        """Put content in the place of whatever file is there; its name is durable as well."""

    @abstractmethod
    def copy(self, source: Location, to: Location) -> None:
        """The same content at a place where there is no file. Both lie in this store."""

    @abstractmethod
    def delete(self, places: Iterable[Location]) -> None:
        """Files that are gone already are passed over."""

    @abstractmethod
    def settle(self, places: Iterable[Location]) -> None:
        """Make durable the names in folders, and the content of files that others wrote."""

    # Folders ------------------------------------------------------------------------------------------

    def make_private(self, root: Location) -> None:
        """Make the lake's own folder, where folders are made, open to its owner alone."""
        del root

    def delete_folder(self, folder: Location) -> None:
        """Delete all files of a folder; what cannot be deleted stays."""
        self.delete([folder / entry.name for entry in self.walk(folder, hidden=True)])

    def move_folder(self, source: Location, to: Location) -> None:
        """Move all files of a folder, in the order of their names: what is left of a table's log, when a machine stops
        in the middle, is then never an older table."""
        for name in sorted(entry.name for entry in self.walk(source, hidden=True)):
            self.copy(source / name, to / name)
            self.delete([source / name])
