"""Cuts the power of a project whose runs are in this process.

All syncs are recorded: of this process, of its receivers, and of Spark's workers. A cut prevents further syncs, stops
the processes, and reads the folder when nobody writes to it. Then the receivers are killed. The remaining threads fail
at their next sync. What they still write is in the old folder, which is no longer used.
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
from tests.power.rig import HOOKS, standing_still

STEPS = (0, 1, 3, 8, 15, 25, 40, 60)
"""The number of syncs of this process between the announcement of a cut and the cut. A run makes some dozens."""
SECONDS = 60.0
"""The time limit until all writers have stopped."""
_RECEIVER, _OTHERS = "pgcdc_assets.log.receive.process", ("java", "pyspark")


class PowerGone(BaseException):
    """Raised by a sync after a cut. No error handler catches it."""


@dataclass
class Supply:
    """The power of a folder. ``root`` is a new folder after each cut, because Spark's session caches tables by path."""

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
        """Records syncs during the block."""
        path = os.pathsep.join([str(HOOKS), str(Path(__file__).parents[2])])
        settings = {"PYTHONPATH": path, "PGCDC_TEST_SYNCS": str(self.journal)}
        environment = spark.sparkContext.environment
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value, prepend=os.pathsep if name == "PYTHONPATH" else None)
                # Spark starts other workers if their environment differs.
                patch.setitem(environment, name, value)
            patch.setattr(os, "fsync", self._fsync)
            yield

    def cut_during(self, act: Callable[[], Any], chance: random.Random, target: Path) -> Image:
        """Runs ``act`` and cuts the power during it or right after it. Writes what is left to ``target``, the next
        root. Raises an error of ``act`` only if it came before the cut."""
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
        # A receiver that started after the cut cannot sync, so it has confirmed nothing.
        self._kill_receivers()
        image = Image(self._disk, *found[0], random.Random(seed))
        image.write(target)
        self.root, self.gone = target, False
        self._told_gone.unlink()
        self._disk = self._new_disk()
        return image

    def _new_disk(self) -> Disk:
        disk = Disk(self.root, self.journal)
        # Earlier syncs belong to other folders.
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
                    still.enter_context(standing_still(process))
                found = self._look()
                self._kill_receivers()
                return found
            finally:
                with self._turn:
                    self._held, self.gone = False, True
                    self._turn.notify_all()

    def _look(self) -> tuple[Folder, Syncs]:
        """Other threads of this process may write files. They stop at their next sync."""
        deadline, before = time.monotonic() + SECONDS, None
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                found = self._disk.look()
                if found == before:
                    return found, self._disk.syncs()
                before = found
            time.sleep(0.02)
        raise AssertionError("the folder does not come to rest")


def _processes(*kinds: str) -> list[psutil.Process]:
    """The processes that write to a lake. The source's server is not among them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = " ".join([process.name(), *process.cmdline()])
            if any(kind in command for kind in kinds or (_RECEIVER, *_OTHERS)):
                found.append(process)
    return found
