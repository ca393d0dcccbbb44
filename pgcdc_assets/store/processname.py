"""The name of a process that no other has, on any host at any time, and whether the process lives.

A number alone says little: each container counts its processes from 1, and two of them may go by one host's name.
"""

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
"""Seconds by which a process's start may seem to move: Linux tells it by a boot time that follows the clock."""


@dataclass(frozen=True)
class ProcessName:
    host: str
    """The host's name, for people."""
    space: str
    """Where the number counts: a kernel since its boot, and in it one namespace of processes."""
    pid: int
    started: int
    """Seconds since 1970."""

    @classmethod
    def own(cls) -> Self:
        return cls(socket.gethostname(), _space(), os.getpid(), int(psutil.Process().create_time()))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``. ValueError for another text."""
        host, space, pid, started = text.rsplit(".", 3)
        return cls(host, space, int(pid), int(started))

    def __str__(self) -> str:
        """Of letters, digits, ``-`` and ``.``, as tags of Dagster may hold."""
        return f"{self.host}.{self.space}.{self.pid}.{self.started}"

    @property
    def is_here(self) -> bool:
        """Whether its number is one that this process can look up."""
        return self.space == _space()

    @property
    def told(self) -> str:
        """For people: its number, and its host where that is another one."""
        return f"pid {self.pid}" + ("" if self.is_here else f" on {self.host}")

    def lives(self) -> bool | None:
        """Whether the process is alive; None where its number cannot be looked up from here."""
        if not self.is_here:
            return None
        try:
            return abs(int(psutil.Process(self.pid).create_time()) - self.started) <= _JITTER
        except psutil.NoSuchProcess:
            return False


@cache
def _space() -> str:
    try:
        # The first number of a namespace may be given again, but not before a boot and a start of a process tell it.
        return f"{_BOOT.read_text().strip().replace('-', '')}-{os.stat(_NUMBERS).st_ino}"
    except OSError:
        return f"host-{socket.gethostname().replace('.', '-')}"
