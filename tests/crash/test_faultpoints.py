"""Tests of the fault points: named places in the product's code at which a test can stop a process. A fault point does
nothing unless it is armed. Exactly one thread stops at an armed fault point."""

from __future__ import annotations

import ast
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pgcdc_assets
from pgcdc_assets.core import faultpoints
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from tests.crash.faults import Faults, wait_until

PACKAGE = Path(pgcdc_assets.__file__).parent


def calls() -> list[tuple[Path, str]]:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "passed":
                (argument,) = node.args
                assert isinstance(argument, ast.Attribute), f"{path}: a fault point must be named, not computed"
                found.append((path, argument.attr))
    return found


def test_every_fault_point_is_used_in_the_package() -> None:
    assert {name for _, name in calls()} == set(FaultPoint.__members__)


def test_fault_points_do_nothing_without_the_environment_variable() -> None:
    script = "from pgcdc_assets.core import faultpoints as f; assert f._FOLDER is None; f.passed(f.FaultPoint.LOG_MADE)"
    clean = {name: value for name, value in os.environ.items() if name != faultpoints.VARIABLE}
    assert subprocess.run([sys.executable, "-c", script], env=clean, check=False).returncode == 0


def test_exactly_one_thread_stops_at_an_armed_fault_point_after_the_given_number_of_visits(faults: Faults) -> None:
    point = FaultPoint.BATCH_COMMITTED
    through = threading.Semaphore(0)

    def pass_by() -> None:
        passed(point)
        through.release()

    faults.arm(point, passes=2)
    threads = [threading.Thread(target=pass_by) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: faults.reached(point) is not None, 60)
    assert faults.reached(point) == os.getpid()
    assert wait_until(lambda: sum(thread.is_alive() for thread in threads) == 1, 60)
    passed(point)
    faults.clear()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_process_stopped_at_one_fault_point_does_not_block_other_fault_points(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file lock protects the fault points. A process releases the lock before it reports that it has stopped at a
    point. A process does not need the lock to pass a point that is not armed."""
    point, rename, lock_was_free = FaultPoint.BATCH_COMMITTED, Path.rename, list[bool]()

    def renamed(path: Path, target: Path) -> Path:
        if target.name.endswith(faultpoints.REACHED):
            lock_was_free.append(_lock_is_free(faults))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    faults.arm(point)
    there = threading.Thread(target=passed, args=[point])
    there.start()
    assert wait_until(lambda: faults.reached(point) is not None, 60)
    assert lock_was_free == [True]
    with (faults.folder / faultpoints.LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=passed, args=[FaultPoint.BATCH_DURABLE])
        other.start()
        other.join(60)
        assert not other.is_alive()
    faults.clear()
    there.join(60)
    assert not there.is_alive()


def _lock_is_free(faults: Faults) -> bool:
    with (faults.folder / faultpoints.LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
