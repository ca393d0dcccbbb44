"""A place on a file system that one process holds: a locked file. The kernel drops the lock when the process ends, in
whatever way."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from pgcdc_assets.core.location import Location
from pgcdc_assets.store.base import Lease
from pgcdc_assets.store.local import path_of

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
    """What the living holder says; None when nobody holds the place."""
    try:
        file = path_of(place).open()
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read()
        return None


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
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")


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
