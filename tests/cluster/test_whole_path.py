"""Runs the commands on a cluster whose executors are killed. No secret may appear where other users can read it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pgcdc_assets.core.faultpoints import FaultPoint
from tests.cluster.conftest import SECRET, Rig
from tests.cluster.leaks import in_command_lines, in_environments, in_files, pages_of
from tests.cluster.standalone import CORES, executor_of, kill_executor
from tests.cluster.steps import assert_succeeds, stopped_at
from tests.fix_objects import SECRET as STORE_SECRET
from tests.servers import held_port

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(1200)]


def assert_unseen(secret: str, rig: Rig, ui: int, *, of_workers: bool = False) -> None:
    """Fails if the secret appears in a web page, a command line, a log or the environment of a process of the cluster.
    A task is stopped on an executor during the check. ``of_workers``: the secret is in the workers' environment on
    purpose."""
    cluster = rig.cluster
    worker_pages = [worker["webuiaddress"] for worker in cluster.state["workers"]]
    pages: dict[str, bytes] = {}
    for address in (f"http://127.0.0.1:{ui}", f"http://127.0.0.1:{cluster.ui}", *worker_pages):
        pages |= dict(pages_of(address))
    content = b"".join(pages.values())
    assert b"spark.executor.memory" in content, "the driver's environment was read"
    assert any("/stages/stage" in url for url in pages), "pages of stages were read"
    assert not [url for url, content in pages.items() if secret.encode() in content]
    assert not in_command_lines(secret)
    logs = list(rig.events.iterdir())
    assert logs, "there is an event log"
    assert not in_files(secret.encode(), rig.events, cluster.folder, Path(rig.project.folder, ".pgcdc"))
    assert of_workers or not in_environments(secret, cluster)


def the_whole_path(rig: Rig, secrets: dict[str, bool]) -> None:
    """Kills executors during a copy, during the derivation of a feed, and during an apply. Each sync completes."""
    rig.project.run("setup")
    ui = held_port()
    project = rig.with_spark(**{"spark.ui.port": str(ui)})

    rig.faults.arm(FaultPoint.PIECE_COPIED)
    with project.running("sync") as process:
        with stopped_at(rig, FaultPoint.PIECE_COPIED, process) as worker:
            for secret, of_workers in secrets.items():
                assert_unseen(secret, rig, ui, of_workers=of_workers)
            kill_executor(worker)
        assert_succeeds(process, rig)

    rig.change()
    rig.faults.arm(FaultPoint.FEED_FILES_WRITTEN)
    with project.running("sync") as process:
        with stopped_at(rig, FaultPoint.FEED_FILES_WRITTEN, process) as worker:
            rig.faults.arm(FaultPoint.COLLAPSED)
            kill_executor(worker)
            (rig.faults.folder / "feed-files-written.reached").unlink()
            with stopped_at(rig, FaultPoint.COLLAPSED, process) as later:
                assert executor_of(later).pid != worker
                kill_executor(later)
        assert_succeeds(process, rig)
    for secret in secrets:
        assert not in_files(secret.encode(), rig.events, rig.cluster.folder)


@pytest.mark.takes(120)
def test_syncs_to_a_shared_folder_survive_killed_executors_and_leak_no_secret(
    rig_on: Callable[[str], Rig], shared_folder: str
) -> None:
    the_whole_path(rig_on(shared_folder), {SECRET: False})


def test_syncs_to_an_object_store_survive_killed_executors_and_leak_no_secret(
    rig_on: Callable[[str], Rig], in_bucket: str
) -> None:
    """The workers have the store's credentials in their own environment."""
    the_whole_path(rig_on(in_bucket), {SECRET: False, STORE_SECRET: True})


_CORES = """
from pgcdc_assets.settings import Settings
from pgcdc_assets.spark.tasks import cores
from pgcdc_assets.spark.session import spark_session
session = spark_session(Settings.load())
print("cores", cores(session), session.conf.get("spark.sql.shuffle.partitions"), flush=True)
"""


def test_number_of_tasks_equals_the_cores_of_the_executors(rig_on: Callable[[str], Rig], shared_folder: str) -> None:
    """The number of tasks is read right after the session has started, when Spark itself still reports 2 cores."""
    more = {"spark.executor.cores": str(CORES), "spark.cores.max": str(CORES)}
    settings = rig_on(shared_folder).with_spark(**more).settings
    done = subprocess.run(
        [sys.executable, "-c", _CORES], env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    assert f"cores {CORES} {CORES}" in done.stdout
