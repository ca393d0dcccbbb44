"""Simulates power cuts of a project whose syncs run in this process.

All fsyncs are recorded: of this process, of its receivers, and of Spark's workers. A cut prevents further fsyncs, stops
the processes, and reads the folder when no process writes to it. Then the receivers are killed. The remaining threads
fail at their next fsync. They still write only to the old folder, which is no longer used.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from tests.power.hooks.sitecustomize import GONE, recorded
from tests.power.images import Disk, Folder, Image, Syncs
from tests.power.rig import HOOKS, suspended

STEPS = (0, 1, 3, 8, 15, 25, 40, 60)
"""How many fsyncs this process makes from the start of the call to the power cut. A sync makes some dozens of
fsyncs."""
SECONDS = 60.0
"""Seconds within which all writers must have stopped."""
_RECEIVER, _OTHERS = "pgcdc_assets.log.receive.process", ("java", "pyspark")


class PowerGone(BaseException):
    """Raised by an fsync after a cut. No error handler of the product catches it."""


@dataclass
class Supply:
    """Simulates the power supply of the folder ``root``. After each cut, ``root`` is a new folder, because Spark's
    session caches tables by path."""

    root: Path
    journal: Path
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _held: bool = False
    gone: bool = False
    _under_way: int = 0
    _syncs: int = 0
    _disk: Disk = field(init=False)

    def __post_init__(self) -> None:
        self.journal.touch()
        self._disk = self._new_disk()

    @contextmanager
    def on(self, spark: SparkSession) -> Iterator[None]:
        """Records fsyncs during the block."""
        path = os.pathsep.join([str(HOOKS), str(Path(__file__).parents[2])])
        settings = {"PYTHONPATH": path, "PGCDC_TEST_SYNCS": str(self.journal)}
        environment = spark.sparkContext.environment
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value, prepend=os.pathsep if name == "PYTHONPATH" else None)
                # With a different environment, Spark starts new workers instead of reusing existing workers.
                patch.setitem(environment, name, value)
            patch.setattr(os, "fsync", self._fsync)
            yield

    def cut_during(self, act: Callable[[], Any], chance: random.Random, target: Path) -> Image:
        """Calls ``act`` and cuts the power during the call or right after it. Writes the image (what the cut leaves of
        the folder) to ``target``, where the next attempt continues. Raises an error of ``act`` only if it was raised
        before the cut."""
        ended, found = threading.Event(), list[tuple[Folder, Syncs] | BaseException]()
        goal, rest, seed = chance.choice(STEPS), chance.random() * 0.05, chance.getrandbits(32)
        cutter = threading.Thread(target=self._cut_at, args=(self._syncs + goal, rest, ended, found))
        cutter.start()
        try:
            act()
        except BaseException:
            if not self.gone and not self._held:
                raise
        finally:
            ended.set()
            cutter.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        # A receiver that started after the cut cannot fsync, so it has confirmed nothing.
        self._kill_receivers()
        image = Image(self._disk, *found[0], random.Random(seed))
        image.write(target)
        self.root, self.gone = target, False
        self._told_gone.unlink()
        self._disk = self._new_disk()
        return image

    def _new_disk(self) -> Disk:
        disk = Disk(self.root, self.journal)
        # The fsyncs that are already recorded belong to earlier folders.
        disk._read = self.journal.stat().st_size
        return disk

    def _fsync(self, file: Any) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._held)
            if self.gone:
                raise PowerGone
            self._under_way += 1
        try:
            recorded(file, str(self.journal))
        finally:
            with self._turn:
                self._under_way -= 1
                self._syncs += 1
                self._turn.notify_all()

    def _cut_at(self, goal: int, rest: float, ended: threading.Event, found: list[Any]) -> None:
        try:
            while self._syncs < goal and not ended.wait(0.005):
                pass
            ended.wait(rest)
            found.append(self._cut())
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            found.append(error)

    @property
    def _told_gone(self) -> Path:
        return self.journal.with_name(self.journal.name + GONE)

    def _kill_receivers(self) -> None:
        for process in _processes(_RECEIVER):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def _cut(self) -> tuple[Folder, Syncs]:
        with self._turn:
            self._held = True
            self._turn.wait_for(lambda: not self._under_way)
            self._told_gone.touch()
        with ExitStack() as still:
            try:
                for process in _processes():
                    still.enter_context(suspended(process))
                found = self._look()
                self._kill_receivers()
                return found
            finally:
                with self._turn:
                    self._held, self.gone = False, True
                    self._turn.notify_all()

    def _look(self) -> tuple[Folder, Syncs]:
        """Reads the folder until it no longer changes: other threads of this process may still write files until their
        next fsync."""
        deadline, before = time.monotonic() + SECONDS, None
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                found = self._disk.look()
                if found == before:
                    return found, self._disk.syncs()
                before = found
            time.sleep(0.02)
        raise AssertionError("the folder changes without end")


def _processes(*kinds: str) -> list[psutil.Process]:
    """The processes that write to a lake, without the source's server."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = " ".join([process.name(), *process.cmdline()])
            if any(kind in command for kind in kinds or (_RECEIVER, *_OTHERS)):
                found.append(process)
    return found
