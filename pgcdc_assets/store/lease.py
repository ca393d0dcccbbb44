"""Leases. Only one living process at a time holds the lease of a place (a :class:`Location`). The holder can write a
text for other processes. On a file system, the lease is a locked file, and the kernel releases the lock when the
process ends or is killed. In an object store, it is a chain of numbered files (:mod:`pgcdc_assets.store.chainlease`).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO

from pgcdc_assets.core.layout import LOCAL, Location
from pgcdc_assets.store import chainlease
from pgcdc_assets.store.base import Lease
from pgcdc_assets.store.local import path_of

_OWNER_ONLY = 0o600
"""The lock file's mode. Another user who may open the file, even only for reading, could lock it, and so keep the owner
from taking the lease."""
_TRIES = 20
_PAUSE = 0.01
"""The lock is tried ``_TRIES`` times, ``_PAUSE`` seconds apart. With a single try, a process that only checks whether
the lease is held could seem to be a holder, because the check locks the file for an instant."""


class FileLease(Lease):
    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()


def held(
    place: Location, *, guarding: Location | None = None, at_once: bool = False
) -> AbstractContextManager[Lease | None]:
    """Hold the lease of a place during the block. The block gets None instead if another process holds the lease. The
    lease's text is empty at the start, and after the block. Raises OSError if the place cannot be written. ``at_once``:
    if it is not known whether the last holder is alive, give None instead of waiting. ``guarding``: a folder. As soon
    as another process may have taken the lease, writes of this process to the folder raise LeaseLost. A lock of a local
    file cannot be lost."""
    if place.scheme == LOCAL:
        return _file_held(place)
    return chainlease.held(place, guarding=guarding, at_once=at_once)


def text_of_holder(place: Location) -> str | None:
    """The text that the holder of the lease has written; None if no process holds the lease."""
    return _file_text(place) if place.scheme == LOCAL else chainlease.text_of_holder(place)


def is_locked(place: Location) -> bool:
    """Whether a process holds the lease, or any other program has locked its file. Ignores processes that only check
    the lease. False if this process has no right to check."""
    return _file_locked(place) if place.scheme == LOCAL else chainlease.text_of_holder(place) is not None


def silent_for(place: Location) -> float:
    """Seconds since the lease was last taken, renewed or given back, or its text changed; infinite if it was never
    taken. In an object store, the result may be wrong by a minute, because the store's clock may differ from this
    machine's."""
    return _file_silent_for(place) if place.scheme == LOCAL else chainlease.silent_for(place)


@contextmanager
def _file_held(place: Location) -> Iterator[FileLease | None]:
    with _opened(place) as file:
        if not _taken(file):
            yield None
            return
        file.truncate(0)
        try:
            yield FileLease(file)
        finally:
            file.truncate(0)


def _file_text(place: Location) -> str | None:
    """The holder's text. Empty if the holder has not written a text yet, or if this process may not read the file."""
    try:
        file = path_of(place).open(errors="replace")
    except PermissionError:
        return ""
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read()
        return None


def _file_locked(place: Location) -> bool:
    """Whether the file is locked. This includes a shared lock of any program, because it also prevents taking the
    lease."""
    try:
        with path_of(place).open("r+") as file:
            return not _taken(file)
    except OSError:
        return False


def _file_silent_for(place: Location) -> float:
    try:
        # A process truncates the file when it takes the lease and when it gives the lease back.
        return time.time() - path_of(place).stat().st_mtime
    except OSError:
        return float("inf")


def _opened(place: Location) -> IO[str]:
    """Opens the lock file, and creates it if it is missing. Does not truncate the file, because it may contain the text
    of another process that holds the lock. Python opens files with O_CLOEXEC, so programs that this process starts do
    not inherit the lock."""
    path = path_of(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, _OWNER_ONLY), "r+")
    with suppress(PermissionError):
        # In a copied lake, the file may have a different mode.
        os.fchmod(file.fileno(), _OWNER_ONLY)
    return file


def _taken(file: IO[str]) -> bool:
    """Try to lock the file. False if another process holds the lock. The lock lasts as long as the file is open."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return True
    return False
