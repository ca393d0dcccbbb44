"""Names of processes, which are unique over all hosts and times, and checks whether a named process is alive. A host
name and a pid are not unique: pids in each container count from 1, and two containers may have the same host name."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Self

import psutil

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NUMBERS: Final = "/proc/self/ns/pid"
_JITTER: Final = 2
"""Seconds by which the start time of a process may change between two reads: Linux computes it from the boot time,
which changes when the system clock is adjusted."""


@dataclass(frozen=True)
class ProcessName:
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
