"""Waits until a sync whose executors are killed reaches a fault point, or succeeds."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from pgcdc_assets.core.faultpoints import FaultPoint
from tests.cluster.conftest import Rig
from tests.waiting import wait_for

SECONDS = 300


@contextmanager
def stopped_at(rig: Rig, point: FaultPoint, process: subprocess.Popen[str]) -> Iterator[int]:
    """Waits until a Python worker has stopped at the fault point, and yields the worker's pid. After the block, the
    worker continues if it is still alive."""
    wait_for(lambda: rig.faults.reached(point) is not None or process.poll() is not None, SECONDS, point)
    worker = rig.faults.reached(point)
    assert worker is not None, f"ended with {process.returncode} before {point}: {rig.project.log('sync')}"
    yield worker
    rig.faults.clear()


def assert_succeeds(process: subprocess.Popen[str], rig: Rig) -> None:
    wait_for(lambda: process.poll() is not None, SECONDS, "the end of sync")
    assert process.returncode == 0, rig.project.log("sync")
    rig.assert_equal()
