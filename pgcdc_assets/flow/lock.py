"""One writer per lake.

A file lock beside the lake is the truth about who writes, not Dagster's run status: the kernel frees
it with the process, however that ends. Every command, run, backfill and maintenance that writes takes it.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.errors import LockHeld, MachineError


@dataclass(frozen=True)
class Holder:
    """The process that holds the lock."""

    pid: int
    command: str


class LakeLock:
    """``with LakeLock(layout, "sync"): ...``; raises LockHeld, naming pid and command, when taken."""

    def __init__(self, layout: Layout, command: str) -> None:
        self._path = layout.lock
        self._command = command
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Never truncated on open: the holder's name must stay readable for those who fail to lock.
            # O_CLOEXEC (Python's default) keeps the lock from living on in the receiver or the JVM.
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        except OSError as error:
            raise MachineError(f"cannot write there: {error.strerror}", thing=str(self._path.parent)) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = _read(file)
            file.close()
            who = f"`pgcdc {other.command}` (pid {other.pid})" if other else "another process"
            raise LockHeld(f"{who} is writing to this lake", thing=str(self._path.parent.parent)) from None
        file.seek(0)
        file.truncate()
        json.dump({"pid": os.getpid(), "command": self._command}, file)
        file.flush()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def holder(layout: Layout) -> Holder | None:
    """Who writes to the lake now, or None. Takes the lock for an instant to find out; leaves no trace."""
    try:
        file = layout.lock.open("r+")
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(file) or Holder(0, "unknown")
        return None


def _read(file: IO[str]) -> Holder | None:
    file.seek(0)
    try:
        content = json.load(file)
        return Holder(int(content["pid"]), str(content["command"]))
    except (ValueError, KeyError, TypeError):
        return None
