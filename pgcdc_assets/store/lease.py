"""Leases. Only one living process at a time holds the lease of a place (a :class:`Location`). The holder can write a
text for other processes. On a file system, the lease is a locked file, and the kernel releases the lock when the
process ends or is killed. In an object store, it is a chain of numbered files (:mod:`pgcdc_assets.store.chainlease`).
Also names of processes, with which a lease's text says who its holder is."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Final, Self

import psutil

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
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NUMBERS: Final = "/proc/self/ns/pid"
_JITTER: Final = 2
"""Seconds by which the start time of a process may change between two reads: Linux computes it from the boot time,
which changes when the system clock is adjusted."""


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


@dataclass(frozen=True)
class ProcessName:
    """The name of a process, unique over all hosts and times. A host name and a pid are not unique: pids in each
    container count from 1, and two containers may have the same host name."""

    host: str
    """The host's name, for people."""
    space: str
    """The space in which the pid is unique: the id of the kernel's boot, and the pid namespace."""
    pid: int
    started: int
    """Seconds since 1970."""

    @classmethod
    def own(cls, pid: int | None = None) -> Self:
        """The name of this process, or of another process of this machine."""
        process = psutil.Process(pid)
        return cls(socket.gethostname(), _space(), process.pid, int(process.create_time()))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``. Raises ValueError for any other text."""
        host, space, pid, started = text.rsplit(".", 3)
        return cls(host, space, int(pid), int(started))

    def __str__(self) -> str:
        """The name as text. It contains only letters, digits, ``-`` and ``.``, which are allowed in Dagster's tags."""
        return f"{self.host}.{self.space}.{self.pid}.{self.started}"

    @property
    def is_here(self) -> bool:
        """Whether this process can look up the pid, because both processes are in the same pid namespace."""
        return self.space == _space()

    @property
    def told(self) -> str:
        """A short text for the user: the pid, and also the host if this process cannot look up the pid."""
        return f"pid {self.pid}" + ("" if self.is_here else f" on {self.host}")

    def lives(self) -> bool | None:
        """Whether the named process is alive; None if this process cannot look up its pid."""
        if not self.is_here:
            return None
        try:
            return abs(int(psutil.Process(self.pid).create_time()) - self.started) <= _JITTER
        except psutil.NoSuchProcess:
            return False


@cache
def _space() -> str:
    try:
        # The inode number of a pid namespace may be used again later, but boot id and start time then differ.
        return f"{_BOOT.read_text().strip().replace('-', '')}-{os.stat(_NUMBERS).st_ino}"
    except OSError:
        return f"host-{socket.gethostname().replace('.', '-')}"
