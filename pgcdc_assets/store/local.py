"""The store for a lake in a folder of this machine. Fsyncs every file and folder that must survive a power cut
(:mod:`.localfiles`)."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

from pgcdc_assets.core.layout import Location
from pgcdc_assets.store.base import HIDDEN, Entry, Store
from pgcdc_assets.store.localfiles import private_folder, sync_all, sync_file, sync_folder

_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
"""Errors of file systems without hard links: exFAT, some network file systems, some file systems in user space."""
_STAGED: Final = "_{}.{}.tmp"
"""The name of a file that is being created. Readers of Delta tables ignore such names."""


def path_of(place: Location) -> Path:
    """The path of a place. Raises ValueError if the place is not on this machine's file system."""
    if not place.text.startswith("/"):
        raise ValueError(f"{place} is not on this machine's file system")
    return Path(place.text)


class LocalStore(Store):
    def read(self, at: Location, start: int = 0, size: int | None = None) -> bytes:
        with open(at.text, "rb") as file:
            if start:
                file.seek(start)
            return file.read(-1 if size is None else size)

    def open(self, at: Location) -> pa.NativeFile:
        return pa.OSFile(at.text, "rb")

    def head(self, at: Location) -> Entry | None:
        try:
            return _entry(at.name, os.stat(at.text))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list_after(self, folder: Location, name: str = "") -> list[Entry]:
        try:
            with os.scandir(folder.text) as found:
                chosen = [one for one in found if one.name > name and not one.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries: list[Entry] = []
        for one in sorted(chosen, key=lambda one: one.name):
            # Another process may delete a file during the listing.
            with suppress(FileNotFoundError):
                entries += _listed(one.name, one.stat())
        return entries

    def walk(self, folder: Location, *, hidden: bool = False) -> Iterator[Entry]:
        for place, folders, names in os.walk(folder.text):
            if not hidden:
                folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
                names = [name for name in names if not name.startswith(HIDDEN)]
            for name in names:
                path = os.path.join(place, name)
                with suppress(FileNotFoundError):
                    yield from _listed(os.path.relpath(path, folder.text), os.stat(path))

    def draft(self, to: Location) -> str:
        """The final path itself. Readers ignore the file until a commit names it, so it can be written there."""
        _make_folder(to.parent.text)
        return to.text

    def scratch(self, folder: Location) -> str:
        """The folder itself. It is on the same file system as the lake, so :meth:`put` only renames the draft."""
        _make_folder(folder.text)
        return folder.text

    def put(self, draft: str, to: Location) -> None:
        sync_file(Path(draft))
        if draft != to.text:
            _make_folder(to.parent.text)
            os.replace(draft, to.text)

    def create(self, to: Location, content: bytes) -> None:
        staged = to.with_name(_STAGED.format(to.name, uuid.uuid4().hex)).text
        try:
            _write(staged, content)
            try:
                os.link(staged, to.text)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # Without hard links, write the file directly. This does not overwrite an existing file. But during the
                # write, and after a power cut, a reader may see an incomplete file.
                _write(to.text, content)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(staged)

    def replace(self, to: Location, content: bytes) -> None:
        staged = to.with_name(_STAGED.format(to.name, uuid.uuid4().hex)).text
        try:
            _write(staged, content)
            os.replace(staged, to.text)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(staged)
            raise
        sync_folder(Path(to.parent.text))

    def copy(self, source: Location, to: Location) -> None:
        _make_folder(to.parent.text)
        try:
            os.link(source.text, to.text)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with open(source.text, "rb") as content, open(to.text, "xb") as target:
                shutil.copyfileobj(content, target)
            sync_file(Path(to.text))

    def delete(self, places: Iterable[Location]) -> None:
        for place in places:
            with suppress(FileNotFoundError):
                os.unlink(place.text)

    def settle(self, places: Iterable[Location]) -> None:
        sync_all(Path(place.text) for place in places)

    def make_private(self, root: Location) -> None:
        private_folder(Path(root.text))

    def probe(self, root: Location) -> None:
        # Create and remove a folder, not a file in the lake: the lake may not exist yet.
        os.rmdir(tempfile.mkdtemp(prefix=".pgcdc-probe-", dir=_existing(root)))

    def free_bytes(self, root: Location) -> int | None:
        return shutil.disk_usage(_existing(root)).free

    def delete_folder(self, folder: Location) -> None:
        # A lake's folder may be a symbolic link to a different folder.
        shutil.rmtree(os.path.realpath(folder.text), ignore_errors=True)
        if os.path.islink(folder.text):
            os.unlink(folder.text)

    def delete_empty(self, folder: Location) -> None:
        with suppress(OSError):
            os.rmdir(os.path.realpath(folder.text))
            if os.path.islink(folder.text):
                os.unlink(folder.text)

    def move_folder(self, source: Location, to: Location) -> None:
        _make_folder(to.parent.text)
        os.rename(source.text, to.text)


def _existing(folder: Location) -> Path:
    """The folder, or the nearest folder above it that exists."""
    path = path_of(folder)
    return next(one for one in (path, *path.parents) if one.exists())


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        # Part of the path is a file. Callers would understand FileExistsError as "the file to be written exists".
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def _entry(name: str, found: os.stat_result) -> Entry | None:
    """The entry of a file; None for a folder."""
    if stat.S_ISDIR(found.st_mode):
        return None
    return Entry(name, found.st_size, found.st_mtime, max(found.st_mtime, found.st_ctime))


def _listed(name: str, found: os.stat_result) -> list[Entry]:
    entry = _entry(name, found)
    return [] if entry is None else [entry]


def _write(path: str, content: bytes) -> None:
    """Write a new file, and make its content durable. Raises FileExistsError if the file exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileNotFoundError:
        _make_folder(os.path.dirname(path))
        descriptor = os.open(path, flags, 0o666)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except OSError as error:
        # The errors of os.write and os.fsync do not contain the file's name.
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)
