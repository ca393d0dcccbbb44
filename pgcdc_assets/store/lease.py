"""A lease: a place that only one process holds at a time, while it lives, with a text for other processes. On a file
system it is a locked file: the kernel releases the lock when the process ends or is killed. In an object store it is a
chain of numbered files (:mod:`pgcdc_assets.store.chainlease`)."""

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
"""The lock file's mode. A user who may open a file, even only for reading, may lock it and keep its owner out."""
_TRIES = 20
_PAUSE = 0.01
"""A process that checks whether a lease is held takes the lock for an instant. Tries with this pause outlast it."""


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
    """Hold a place during the block; None if another process holds it. The text is empty before and after the block.
    Raises OSError if the place cannot be written. ``at_once``: return None instead of waiting if it is not known yet
    whether the last holder lives. ``guarding``: a folder. Once it is not certain that this process still holds the
    place, its writes to the folder raise LeaseLost. A lock of a local file cannot be lost."""
    if place.scheme == LOCAL:
        return _file_held(place)
    return chainlease.held(place, guarding=guarding, at_once=at_once)


def text_of_holder(place: Location) -> str | None:
    """The text of the living holder; None if no process holds the place."""
    return _file_text(place) if place.scheme == LOCAL else chainlease.text_of_holder(place)


def is_locked(place: Location) -> bool:
    """Whether any process holds the place for longer than a check takes, even a program that writes no text. False if
    we have no right to check."""
    return _file_locked(place) if place.scheme == LOCAL else chainlease.text_of_holder(place) is not None


def silent_for(place: Location) -> float:
    """Seconds since a holder took the place, changed its text or gave it back; infinite if there never was a holder.
    May be wrong by a minute, because the store's clock is compared with ours."""
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
    """Empty if the holder has not written its text yet, or if another user owns the file and we may not read it."""
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
    """Another program's shared lock counts too, because it prevents us from taking the place."""
    try:
        with path_of(place).open("r+") as file:
            return not _taken(file)
    except OSError:
        return False


def _file_silent_for(place: Location) -> float:
    try:
        # A process that takes the place or gives it back truncates the file.
        return time.time() - path_of(place).stat().st_mtime
    except OSError:
        return float("inf")


def _opened(place: Location) -> IO[str]:
    """The file, created if missing, and not truncated: its text names the holder to processes that fail to lock it.
    O_CLOEXEC (Python's default) keeps programs that this process starts from holding the lock."""
    path = path_of(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, _OWNER_ONLY), "r+")
    with suppress(PermissionError):
        # The file of a copied lake may have another mode.
        os.fchmod(file.fileno(), _OWNER_ONLY)
    return file


def _taken(file: IO[str]) -> bool:
    """Try to take the lock; False if another process holds it. The lock lasts as long as the file is open."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return True
    return False
