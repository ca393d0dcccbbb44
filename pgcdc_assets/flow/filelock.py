"""A file lock as a sign of life: the kernel drops it with its process."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

_TRIES = 20
_PAUSE = 0.01
"""Whoever looks whether a lock is held takes it for an instant; these tries outlast any such look."""


def opened(path: Path) -> IO[str]:
    """The file, made if missing and never truncated: its text names the holder to those who fail to lock.

    O_CLOEXEC (Python's default) keeps the lock from living on in child processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")


def taken(file: IO[str]) -> bool:
    """Try to take the lock for as long as the file is open; False when another process has it."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return True
    return False


def text_of_holder(path: Path) -> str | None:
    """The text in a file that is locked by a living process; None when nobody holds it."""
    try:
        file = path.open()
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read()
        return None
