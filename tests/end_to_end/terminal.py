"""Runs a command on a pseudo-terminal, and checks that a signal ends the command in time."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.end_to_end.command import Project
from tests.waiting import wait_for

SECONDS = 10
"""Seconds within which a command must end."""
LATE = 20
"""Seconds that are added to ``SECONDS``, because the machine of the tests may be busy."""


class Terminal:
    """A command on its own pseudo-terminal, into which the test types Ctrl-C."""

    def __init__(self, project: Project, *args: str) -> None:
        self._master, slave = pty.openpty()
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PGCDC_", "DAGSTER_"))}
        self.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("pgcdc")), *args], cwd=project.folder,
            env={**clean, **project.settings, "TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._said = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def words(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._said.decode(errors="replace")).replace("\r", "\n")

    def wait_for(self, text: str, seconds: float = 200) -> None:
        wait_for(lambda: text in self.words or self.process.poll() is not None, seconds, repr(text))
        assert self.process.poll() is None, self.words

    def ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    def _read(self) -> None:
        with suppress(OSError):
            while piece := os.read(self._master, 65536):
                self._said += piece


@contextmanager
def terminal(project: Project, *args: str) -> Iterator[Terminal]:
    shown = Terminal(project, *args)
    try:
        yield shown
    finally:
        shown.end()


def ends(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> int:
    """Waits until the command ends, and returns its exit code. Fails if the command or a process that it started does
    not end in time."""
    started = time.monotonic()
    family = psutil.Process(process.pid).children(recursive=True)
    code = process.wait(SECONDS + LATE)
    _, left = psutil.wait_procs(family, timeout=max(0.5, SECONDS + LATE - (time.monotonic() - started)))
    assert left == []
    return code
