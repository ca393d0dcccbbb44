"""A place on a file system that one process holds: a locked file. The kernel drops the lock when the process ends, in
whatever way."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from pgcdc_assets.core.location import Location
from pgcdc_assets.store.base import Lease
from pgcdc_assets.store.local import path_of

_OWNER_ONLY = 0o600
"""Whoever may open a file, even for reading alone, may lock it, and would stop its owner."""
_TRIES = 20
_PAUSE = 0.01
"""Whoever looks whether a lease is held takes it for an instant; these tries outlast any such look."""


class FileLease(Lease):
    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def say(self, text: str) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()


@contextmanager
def held(place: Location) -> Iterator[FileLease | None]:
    """Hold a place during the block; None if another process has it. The text is empty at first, and after the block.

    OSError where its folder cannot be written.
    """
    with _opened(place) as file:
        if not _taken(file):
            yield None
            return
        file.truncate(0)
        try:
            yield FileLease(file)
        finally:
            file.truncate(0)


def text_of_holder(place: Location) -> str | None:
    """What the living holder says; None when nobody holds the place. It may say nothing yet, and a holder of another
    user says nothing to us."""
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


def is_locked(place: Location) -> bool:
    """See :func:`pgcdc_assets.store.lease.is_locked`. A shared lock of another program counts too, because it keeps us
    from taking the place."""
    try:
        with path_of(place).open("r+") as file:
            return not _taken(file)
    except OSError:
        return False


def silent_for(place: Location) -> float:
    """See :func:`pgcdc_assets.store.lease.silent_for`."""
    try:
        # Whoever takes the place or gives it back truncates the file.
        return time.time() - path_of(place).stat().st_mtime
    except OSError:
        return float("inf")


def _opened(place: Location) -> IO[str]:
    """The file, made if missing and never truncated: its text names the holder to those who fail to lock.

    O_CLOEXEC (Python's default) keeps the lock from living on in child processes.
    """
    path = path_of(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, _OWNER_ONLY), "r+")
    with suppress(PermissionError):
        # A copy of a lake may have been made with other rights.
        os.fchmod(file.fileno(), _OWNER_ONLY)
    return file


def _taken(file: IO[str]) -> bool:
    """Try to take the lock for as long as the file is open; False when another process has it."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return True
    return False
