"""A name for a process that no other process ever has, on any host, and whether the process lives. A pid is not enough:
each container counts from 1, and two containers may have the same host name."""

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
"""Seconds by which a process's start time may vary: Linux derives it from a boot time that follows the clock."""


@dataclass(frozen=True)
class ProcessName:
    host: str
    """The host's name, for people."""
    space: str
    """The space in which the pid is unique: a boot of a kernel, and a namespace of processes in it."""
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
        """The name as a text of letters, digits, ``-`` and ``.``, which Dagster's tags may contain."""
        return f"{self.host}.{self.space}.{self.pid}.{self.started}"

    @property
    def is_here(self) -> bool:
        """Whether this process can look up the pid."""
        return self.space == _space()

    @property
    def told(self) -> str:
        """A text for people: the pid, and the host if the pid cannot be looked up from here."""
        return f"pid {self.pid}" + ("" if self.is_here else f" on {self.host}")

    def lives(self) -> bool | None:
        """Whether the process is alive; None if its pid cannot be looked up from here."""
        if not self.is_here:
            return None
        try:
            return abs(int(psutil.Process(self.pid).create_time()) - self.started) <= _JITTER
        except psutil.NoSuchProcess:
            return False


@cache
def _space() -> str:
    try:
        # A namespace's inode number may be used again. Boot and start time then distinguish the processes.
        return f"{_BOOT.read_text().strip().replace('-', '')}-{os.stat(_NUMBERS).st_ino}"
    except OSError:
        return f"host-{socket.gethostname().replace('.', '-')}"
