"""Runs the ``pgcdc`` command as a user does: as a process in its own project directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT = 240


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Project:
    folder: Path
    settings: dict[str, str]

    @property
    def lake(self) -> Path:
        return self.folder / "lake"

    def run(self, *args: str, expect: int | None = 0) -> Result:
        """Waits until the command ends. Fails with the command's output if the exit code is not ``expect``. None allows
        any exit code."""
        process = self._start(args)
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        finally:
            end_group(process)
        assert expect is None or process.returncode == expect, f"exit {process.returncode}\n{out}\n{err}"
        return Result(process.returncode, out, err)

    @contextmanager
    def running(self, *args: str) -> Iterator[subprocess.Popen[str]]:
        """Runs the command in the background, with its output in a log file. At the end of the block, the command's
        whole process group is killed."""
        log = (self.folder / f"{args[0]}.log").open("w")
        process = self._start(args, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            end_group(process)
            log.close()

    def log(self, command: str) -> str:
        return (self.folder / f"{command}.log").read_text()

    def _start(self, args: tuple[str, ...], **more: Any) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PGCDC_", "DAGSTER_"))}
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("pgcdc")), *args],
            cwd=self.folder, env={**clean, **self.settings}, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, **piped,
        )  # fmt: skip


def end_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
