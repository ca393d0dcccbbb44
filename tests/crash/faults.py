"""A fault point is a named place in the product's code. If a test arms it, the next process that reaches the place
stops there, and the test can kill the process."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pgcdc_assets.core.faultpoints import LOCK, REACHED, FaultPoint


class Kind(StrEnum):
    """Kinds of crashes. They are the columns of the result table."""

    RECEIVER = "SIGKILL of the receiver"
    PARENT = "death of its parent"
    SERVER = "immediate stop of PostgreSQL"
    CUT = "cut connection"
    WORKER = "SIGKILL of a Spark worker"
    JVM = "SIGKILL of the JVM"
    ABORT = "abort of the run"
    RUN = "SIGKILL of the run"


class Faults:
    """Arms fault points, and reports which processes have stopped. ``folder``: the value of ``PGCDC_FAULTS``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # All users may write to the folder, because servers and workers may run as another user.
        folder.chmod(0o777)

    def arm(self, point: FaultPoint, passes: int = 0) -> None:
        """Arm the point: after ``passes`` visits that do not stop, the next process that reaches the point stops
        there."""
        whole = self.folder / f"{point}.new"
        whole.write_text(str(passes))
        whole.rename(self.folder / point)

    def reached(self, point: FaultPoint) -> int | None:
        """Pid of the process that is stopped at the point. None if no process is stopped there."""
        try:
            return int((self.folder / f"{point}{REACHED}").read_text())
        except FileNotFoundError:
            return None

    def clear(self) -> None:
        """Disarm all points, and let stopped processes continue."""
        for path in self.folder.iterdir():
            if path.name != LOCK:
                with suppress(FileNotFoundError):
                    path.unlink()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits for the condition. Returns False if it was still false after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


ANY_TIME = "at a random time"


@dataclass
class Tally:
    """Counts, by fault point, the processes that were killed there in the middle of a durable step, if all later checks
    succeeded."""

    seed: int
    survived: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    levels: Counter[str] = field(default_factory=Counter)

    def add(self, level: str, point: FaultPoint | None, kind: Kind) -> None:
        self.survived[point or ANY_TIME, kind] += 1
        self.levels[level] += 1

    def markdown(self) -> str:
        """One row per fault point, in the order in which data reaches the points, and one column per kind of crash."""
        kinds = [kind for kind in Kind if any(found == kind for _, found in self.survived)]
        points = [point for point in (*FaultPoint, ANY_TIME) if any(found == point for found, _ in self.survived)]
        head = [f"| fault point | {' | '.join(kinds)} | all |", "|---" * (len(kinds) + 2) + "|"]
        rows = [self._row(f"`{point}`" if point != ANY_TIME else point, [point], kinds) for point in points]
        counts = ", ".join(f"{count} {level}" for level, count in self.levels.items())
        return "\n".join([f"Seed {self.seed}: {counts}.", "", *head, *rows, self._row("all", points, kinds), ""])

    def _row(self, name: str, points: list[str], kinds: list[Kind]) -> str:
        counts = [sum(self.survived[point, kind] for point in points) for kind in kinds]
        return f"| {name} | {' | '.join(str(count or '') for count in counts)} | {sum(counts)} |"
