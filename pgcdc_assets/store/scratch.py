"""Drafts: files that are first written on this machine's disk, and then moved to their store."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from pgcdc_assets.core.layout import Location
from pgcdc_assets.store.localfiles import OWNER_ONLY, sync_file

_PIECE: Final = 1 << 20
_STALE_SECONDS: Final = 3600
_LEFT_SECONDS: Final = 6 * 3600
"""A draft that was not written for this long was left by a killed process."""


class DraftFile:
    """A file that is being written. A draft that stays after a failure does no harm, because no commit names it."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def size(self) -> int:
        return os.stat(self.path).st_size

    def pieces(self) -> Iterator[bytes]:
        """The file's bytes, piece by piece."""
        with open(self.path, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def write(self, content: bytes) -> None:
        """Write the file's whole content."""
        Path(self.path).write_bytes(content)

    def settle(self) -> None:
        """Make the content durable now, so that :func:`pgcdc_assets.store.storage.put` takes less time."""
        sync_file(Path(self.path))

    def discard(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class Scratch:
    """A folder for drafts that are written over a longer time. The caller chooses their names."""

    def __init__(self, path: str) -> None:
        self._path = path

    def draft(self, name: str) -> DraftFile:
        return DraftFile(os.path.join(self._path, name))

    def clear(self) -> None:
        """Delete all files that are left in the folder."""
        for left in Path(self._path).iterdir():
            left.unlink()

    @contextmanager
    def named(self) -> Iterator[None]:
        """If the block raises an OSError without a file name, adds this folder's name, because pyarrow's errors do not
        contain a file name."""
        try:
            yield
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), self._path) from error

    @contextmanager
    def temporary(self) -> Iterator[Location]:
        """A new folder inside the scratch folder. After the block, the new folder is deleted, and so is the scratch
        folder if it is empty. Also deletes folders that killed processes left there more than an hour ago."""
        before = time.time() - _STALE_SECONDS
        with suppress(FileNotFoundError):
            for left in [left for left in Path(self._path).iterdir() if left.stat().st_mtime < before]:
                shutil.rmtree(left, ignore_errors=True)
        path = os.path.join(self._path, uuid.uuid4().hex)
        # Create parents too: another process may have just deleted the empty scratch folder.
        os.makedirs(path)
        try:
            yield Location(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                os.rmdir(self._path)


def folder_for(folder: Location) -> str:
    """A folder on this machine for drafts of files of ``folder``, which is in an object store. Always the same folder
    for the same ``folder``."""
    return _own_folder(hashlib.sha256(folder.text.encode()).hexdigest()[:20])


def draft_for(to: Location) -> str:
    """A new path on this machine for a draft of the file ``to``, which is in an object store. Also deletes old drafts
    of killed processes."""
    folder = _swept(os.getpid())
    os.makedirs(folder, mode=OWNER_ONLY, exist_ok=True)
    return os.path.join(folder, f"{uuid.uuid4().hex}-{to.name}")


@cache
def _swept(process: int) -> str:
    """The folder for drafts. The first call in each process deletes old drafts of killed processes."""
    del process
    folder, before = _own_folder("drafts"), time.time() - _LEFT_SECONDS
    for left in Path(folder).iterdir():
        with suppress(FileNotFoundError):
            if left.stat().st_mtime < before:
                left.unlink()
    return folder


def _own_folder(name: str) -> str:
    path = os.path.join(tempfile.gettempdir(), f"pgcdc-{os.getuid()}-{name}")
    os.makedirs(path, mode=OWNER_ONLY, exist_ok=True)
    if os.stat(path).st_uid != os.getuid():
        raise PermissionError(errno.EACCES, "belongs to another user", path)
    return path


def write_scratch(to: Location, content: bytes) -> None:
    os.makedirs(to.parent.text, exist_ok=True)
    Path(to.text).write_bytes(content)
