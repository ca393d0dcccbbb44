"""Executors that start late, that are killed together or one by one, or that lack the driver's package version or
credentials."""

from __future__ import annotations

import random
import re
import signal
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pgcdc_assets.core.faultpoints import FaultPoint
from tests.cluster.conftest import Rig
from tests.cluster.standalone import Cluster, standalone
from tests.cluster.steps import SECONDS, assert_succeeds, stopped_at
from tests.end_to_end.command import Project
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1800)]

POINTS = (FaultPoint.PIECE_COPIED, FaultPoint.FEED_FILES_WRITTEN, FaultPoint.COLLAPSED)
"""Fault points in the Spark tasks of a copy, of the derivation of a feed, and of an apply."""
KILLS = 6
_EAGER = {
    "spark.speculation": "true", "spark.speculation.interval": "200ms", "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5", "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.task.duration.threshold": "3s",
}  # fmt: skip
"""Spark settings for speculation: a second attempt of a task starts after three seconds, on a different executor."""


def kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        for one in (*process.children(recursive=True), process):
            one.kill()


def test_speculative_attempt_replaces_a_stopped_task(rig_on: Callable[[str], Rig], shared_folder: str) -> None:
    """The first attempt of a task stays at its fault point. So without speculation, the syncs would not end."""
    rig = rig_on(shared_folder)
    project = rig.with_spark(**_EAGER)
    project.run("setup")
    for point in POINTS:
        rig.faults.arm(point)
        with project.running("sync") as process, stopped_at(rig, point, process):
            assert_succeeds(process, rig)
        rig.change()
    project.run("sync")
    rig.assert_equal()
    project.run("verify")


def test_sync_succeeds_although_all_executors_are_killed(rig_on: Callable[[str], Rig], shared_folder: str) -> None:
    rig = rig_on(shared_folder)
    rig.project.run("setup")
    for point in POINTS:
        rig.faults.arm(point)
        with rig.project.running("sync") as process:
            with stopped_at(rig, point, process):
                for executor in rig.cluster.executors:
                    kill(executor)
            assert_succeeds(process, rig)
        rig.change()


def test_sync_in_follow_mode_continues_after_executors_are_killed(rig_on: Callable[[str], Rig], in_bucket: str) -> None:
    rig = rig_on(in_bucket)
    rig.project.run("setup")
    chance = random.Random(0)
    with rig.project.running("follow") as process:
        wait_for(lambda: bool(rig.cluster.executors), SECONDS, "executors")
        for _ in range(KILLS):
            rig.change()
            time.sleep(chance.uniform(2, 6))
            wait_for(lambda: bool(rig.cluster.executors), SECONDS, "executors")
            kill(chance.choice(rig.cluster.executors))
            assert process.poll() is None, rig.project.log("follow")
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: process.poll() is not None, 60, "the end of follow")
    rig.project.run("sync")
    rig.assert_equal()


def test_executors_run_the_packed_python_environment(
    rig_on: Callable[[str], Rig], shared_folder: str, cluster: Cluster
) -> None:
    """An executor that lacks Python, or that has a different version of pgcdc_assets than the driver, is reported in
    one line, before a task starts work."""
    rig = rig_on(shared_folder)
    rig.project.run("pack")
    project = rig.with_spark(archive="pgcdc_env.tar.gz")
    project.run("setup")
    project.run("sync")
    rig.assert_equal()
    assert list(cluster.folder.glob("work*/*/*/pgcdc_env/lib/pgcdc_assets")), "it was unpacked on the workers"

    rig.change()
    patterns = {
        "/nowhere/python": "has no Python at /nowhere/python; give the executors",
        str(_older(rig.project.folder)): r"has pgcdc_assets \S+ \(\w+\), but the driver has \S+ \(\w+\); give",
    }
    for python, pattern in patterns.items():
        refused = rig.with_spark(**{"spark.pyspark.python": python}).run("sync", expect=1)
        lines = [line for line in refused.err.splitlines() if line.startswith("pgcdc: ")]
        assert len(lines) == 1, refused.err
        assert re.match(rf"pgcdc: executor on \S+: {pattern}", lines[0])
        assert "Traceback" not in refused.err
    rig.project.run("sync")
    rig.assert_equal()


def _older(folder: Path) -> Path:
    """Returns the Python of an environment that was packed from different source code."""
    with tarfile.open(folder / "pgcdc_env.tar.gz") as tar:
        tar.extractall(folder / "older", filter="data")
    (folder / "older" / "lib" / "pgcdc_assets" / "feed" / "more.py").write_text("# of another version\n")
    return folder / "older" / "bin" / "python"


def test_missing_store_credentials_on_executors_are_reported(
    rig_on: Callable[[str], Rig], in_bucket: str, tmp_path: Path
) -> None:
    """The driver never sends its credentials for the object store to executors, so executors need credentials in their
    own environment."""
    rig = rig_on(in_bucket)
    nothing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    with standalone(tmp_path / "poor", nothing) as poor:
        project = Project(rig.project.folder, {
            name: value.replace(rig.cluster.master, poor.master) for name, value in rig.project.settings.items()
        })  # fmt: skip
        project.run("setup")
        refused = project.run("sync", expect=1)
    lines = [one for one in refused.err.splitlines() if one.startswith("pgcdc: ")]
    assert len(lines) == 1, refused.err
    assert ", on the executor on " in lines[0]
