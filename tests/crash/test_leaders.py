"""A command is stopped, not killed, at a durable step. A second command takes over the lake, and then the first command
continues. The lake is in an object store, where a lock ends only by a timeout."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import psutil
import pytest

from pgcdc_assets.core.layout import Location
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.store import storage
from tests.crash.byprocess import CASES, FIRST, PROGRAM, SECONDS, SOME, ByProcess, Case
from tests.crash.faults import Faults, Kind, Tally, wait_until
from tests.crash.proxy import Proxy
from tests.fix_postgres import fresh_database

logger = logging.getLogger(__name__)

_SHORT = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, file=open("stacks", "w"))
from pgcdc_assets.store import chainlease
chainlease.TTL, chainlease.RENEWED, chainlease._MARGIN = 12.0, 2.0, 0.5
"""
_LEFT: Final = (".parquet", ".seg", ".bin")
"""Suffixes of files that belong to the lake only if a Delta commit names them."""


class Stopped(Enum):
    HOST = "all of its processes"
    DRIVER = "the command alone: its receiver and Spark go on"


@dataclass
class Leaders(ByProcess):
    program: str = _SHORT + PROGRAM

    def met(self, case: Case) -> bool:
        """Runs the case. Tries again if the command ended before it reached the fault point. Returns whether an attempt
        reached it."""
        stopped = self.chance.choice([*Stopped])
        started = time.monotonic()
        met = any(self.overtaken(case, stopped) for _ in range(4))
        logger.info("%s, stopped: %s, %s, %.1f s", case, stopped.value, met, time.monotonic() - started)
        return met

    def overtaken(self, case: Case, stopped: Stopped) -> bool:
        """Stops the command at the fault point, lets a second command work, resumes the first command, and checks that
        the first command commits nothing. Returns False if the command ended before it reached the point."""
        self.prepare(case)
        self._change_in_every_way(case)
        self.faults.arm(case.point)  # type: ignore[arg-type]
        with self._running(case) as first:
            if not self._reach(first.pid, case):
                self.faults.clear()
                assert wait_until(lambda: first.poll() is not None, SECONDS), f"{case}: hangs"
                return False
            asleep = _stopped(first, stopped)
            self.faults.clear()
            # End the stopped command's session now. The server would end it only after a timeout.
            self._cut_off()
            assert wait_until(lambda: self._succeeded() == 0, SECONDS), "no command could take over"
            self.look()
            before = self._commits()
            for process in asleep:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
            assert wait_until(lambda: first.poll() is not None, SECONDS), f"{case}: hangs after it was resumed"
            log = (self.folder / "command.log").read_text()
            assert first.returncode != 0, f"{case}: the resumed command reports success\n{log}"
            assert "unexpected" not in log, log
            landed = {name: size for name, size in self._commits().items() if before.get(name) != size}
            assert not landed, f"{case}: {landed}\n{log}"
        self.look()
        return True

    def _succeeded(self) -> int:
        """Runs a sync that takes over the lake from the stopped command, and returns its exit code. The sync is refused
        until the lock of the stopped command times out, because a slow command would look the same.

        The sync has its own project folder, as on a different host, because the stopped command may hold, for example,
        the lock of Dagster's SQLite.
        """
        path, elsewhere = self.folder / "successor.log", self.folder / "elsewhere"
        # Stack traces go to a separate file, because the command may redirect its stderr.
        stacks = elsewhere / "stacks"
        shutil.copytree(self.folder / ".pgcdc", elsewhere / ".pgcdc", dirs_exist_ok=True)
        shutil.copy(self.folder / "pgcdc.yaml", elsewhere)
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", self.program, "sync"], cwd=elsewhere, env=self.environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(SECONDS / 3)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)
                wait_until(lambda: "most recent call first" in stacks.read_text(), 10)
                at_work = self.conn.execute("SELECT application_name, state, wait_event, query FROM pg_stat_activity")
                report = f"{path.read_text()}\n{stacks.read_text()}\n{at_work.fetchall()}"
                raise AssertionError(f"the successor hangs\n{report}") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _cut_off(self) -> None:
        self.conn.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", [self.slot]
        )

    def _commits(self) -> dict[str, tuple[int, float]]:
        """Size and time of all files of the lake, without data files, which belong to the lake only if a Delta commit
        names them."""
        found = storage.walk(self.lake, hidden=True)
        return {entry.name: (entry.size, entry.written) for entry in found if _counts(entry.name)}


def _counts(name: str) -> bool:
    """Whether a resumed command must leave the file unchanged. The command may write data files. It may also write the
    note ``extent`` (``log.extent``), because readers ignore a note that was written for another position of the log."""
    return "/_delta_log/" in name or not name.endswith((*_LEFT, "_pgcdc/extent"))


def _stopped(command: subprocess.Popen[bytes], stopped: Stopped) -> list[psutil.Process]:
    process = psutil.Process(command.pid)
    # Stop the command before its child processes, so that it starts no new process.
    process.suspend()
    found = [process]
    if stopped is Stopped.HOST:
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.suspend()
                found.append(child)
    return found


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(7200)
@pytest.mark.takes(400)
def test_stopped_command_that_resumes_after_a_takeover_commits_nothing(
    crash_server: EmbeddedServer, faults: Faults, chance: random.Random, tally: Tally, tmp_path: Path, bucket: Location,
    *, every: bool,
) -> None:  # fmt: skip
    cases = [case for case in CASES[1:] if case.point is not None and case.kind is Kind.RUN]
    if not every:
        drawn = {*chance.sample(cases, SOME)}
        cases = [case for case in cases if case in drawn]
    unmet = []
    for number, part in enumerate(_lakes(cases)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with fresh_database(crash_server) as database, Proxy(crash_server.socket_folder) as proxy, closing(
            Leaders(crash_server, faults, proxy, chance, tally, database, bucket / str(number), folder=folder)
        ) as rig:  # fmt: skip
            with rig.writers.writing():
                unmet += [case for case in part if not rig.met(case)]
            rig.project.run("sync")
            rig.assert_all_there()
    assert not unmet


def _lakes(cases: Sequence[Case]) -> list[list[Case]]:
    """Divides the cases into groups, each of which uses one lake. A case that stops the creation of the lake needs a
    new lake, because the command that takes over finishes the creation."""
    first = [case for case in cases if case.command == "sync" and case.point in FIRST]
    return [*([case] for case in first), *filter(None, [[case for case in cases if case not in first]])]


# A command, or only its JVM, is killed at durable steps ---------------------------------------------


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(7200)
@pytest.mark.takes(500)
@pytest.mark.parametrize("command", ["sync", "other commands"])
def test_command_killed_at_durable_steps_loses_nothing(
    crash_server: EmbeddedServer, faults: Faults, chance: random.Random, tally: Tally, tmp_path: Path, command: str,
    *, every: bool,
) -> None:  # fmt: skip
    cases = [case for case in CASES if (case.command == "sync") is (command == "sync")]
    drawn = {*chance.sample(cases, SOME)}
    chosen = cases if every else [case for case in cases if case in drawn]
    with fresh_database(crash_server) as database, Proxy(crash_server.socket_folder) as proxy, closing(
        ByProcess(crash_server, faults, proxy, chance, tally, database, Location.of(tmp_path / "lake"),
                  folder=tmp_path)
    ) as rig:  # fmt: skip
        with rig.writers.writing():
            for case in chosen:
                rig.prepare(case)
                rig.cycle(case)
        rig.project.run("sync")
        rig.assert_all_there()
        rig.assert_recorded()
        assert not rig.unmet
