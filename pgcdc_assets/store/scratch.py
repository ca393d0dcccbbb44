"""This machine's own disk, for files under way: made here whatever store they are for, and put there when finished."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from pgcdc_assets.core.location import Location
from pgcdc_assets.store.durable import sync_file
from pgcdc_assets.store.private import OWNER_ONLY

_PIECE: Final = 1 << 20


class DraftFile:
    """A file under way. Whoever fails leaves an orphan that no commit names, or discards it."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def size(self) -> int:
        return os.stat(self.path).st_size

    def pieces(self) -> Iterator[bytes]:
        """Its bytes."""
        with open(self.path, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def settle(self) -> None:
        """Make its content durable now, so that little is left to do when it is put in its place."""
        sync_file(Path(self.path))

    def discard(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class Scratch:
    """A folder of drafts that wait, each under a name of its own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def draft(self, name: str) -> DraftFile:
        return DraftFile(os.path.join(self._path, name))

    def clear(self) -> None:
        """Discard whatever is left there."""
        for left in Path(self._path).iterdir():
            left.unlink()


def folder_for(folder: Location) -> str:
    """A folder on this machine for drafts of a store that is elsewhere: the same one for the same place."""
    name = f"pgcdc-{os.getuid()}-{hashlib.sha256(folder.text.encode()).hexdigest()[:20]}"
    path = os.path.join(tempfile.gettempdir(), name)
    os.makedirs(path, mode=OWNER_ONLY, exist_ok=True)
    return path


def write_scratch(to: Location, content: bytes) -> None:
    os.makedirs(to.parent.text, exist_ok=True)
    Path(to.text).write_bytes(content)


@contextmanager
def temporary() -> Iterator[Location]:
    """A folder of this machine for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-") as path:
        yield Location(path)
