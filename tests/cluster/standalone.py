"""A Spark standalone cluster from pyspark's wheel: a master and workers, as processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyspark

from tests.servers import held_port
from tests.waiting import wait_for

WORKERS, CORES = 2, 3
"""The number of workers, and the number of cores of each worker. A worker has more cores than Spark assumes before
executors have registered (2)."""
EXECUTOR = "CoarseGrainedExecutorBackend"
_HOME = Path(pyspark.__file__).parent


@dataclass
class Cluster:
    """``folder`` has the logs of the master and the workers, and the working directories of the executors."""

    folder: Path
    port: int
    ui: int
    environment: dict[str, str]
    processes: list[psutil.Popen] = field(default_factory=list)

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    @property
    def state(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ui}/json/", timeout=10) as answer:
            return json.load(answer)

    def start(self) -> None:
        self._run("master", "master.Master", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self.ui))
        wait_for(self._answers, what="the master")
        for number in range(WORKERS):
            work = str(self.folder / f"work{number}")
            # Each worker has its own host name, because Spark starts no second attempt of a task on the same host.
            self._run(f"worker{number}", "worker.Worker", f"127.0.0.{number + 1}", "--cores", str(CORES),
                      "--memory", "1g", "--webui-port", "0", "--work-dir", work, self.master)  # fmt: skip
        wait_for(lambda: bool(self.state["aliveworkers"] == WORKERS), what="the workers")

    def end(self) -> None:
        """Kills all processes that the cluster has started, including Python workers, which have their own process
        groups."""
        family = [one for process in self.processes for one in (process, *_children(process))]
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, timeout=20)
        assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    @property
    def executors(self) -> list[psutil.Process]:
        """The JVMs of the executors."""
        return [one for process in self.processes for one in _children(process) if _is_executor(one)]

    def _run(self, name: str, what: str, host: str, *arguments: str) -> None:
        command = [str(_HOME / "bin" / "spark-class"), "-Xmx256m", f"org.apache.spark.deploy.{what}"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes.append(psutil.Popen(
                [*command, "--host", host, *arguments], env=self.environment, cwd=self.folder, stdout=log,
                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            ))  # fmt: skip

    def _answers(self) -> bool:
        assert self.processes[0].poll() is None, (self.folder / "master.log").read_text()
        with suppress(OSError, ValueError):
            return bool(self.state["status"] == "ALIVE")
        return False


@contextmanager
def standalone(folder: Path, more: Mapping[str, str]) -> Iterator[Cluster]:
    """Runs the cluster. ``more``: additional environment variables of the workers and of the executors that they start.
    Neither workers nor executors get the environment variables of libpq (``PG...``)."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = ("PG", "DAGSTER", "SPARK")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment = {**clean, "SPARK_HOME": str(_HOME), "SPARK_LOCAL_DIRS": str(folder / "scratch"), **more}
    cluster = Cluster(folder, held_port(), held_port(), environment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def executor_of(worker: int) -> psutil.Process:
    return next(one for one in psutil.Process(worker).parents() if _is_executor(one))


def kill_executor(worker: int) -> None:
    """Kills the executor of this Python worker: its JVM and all its Python processes."""
    jvm = executor_of(worker)
    for one in (jvm, *_children(jvm)):
        with suppress(psutil.NoSuchProcess):
            one.kill()


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return list(process.children(recursive=True))
    return []


def _is_executor(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return any(EXECUTOR in part for part in process.cmdline())
    return False
