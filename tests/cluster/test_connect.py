"""The same by Spark Connect: a server with the cluster's executors, and a client that has no JVM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyspark
import pytest

from pgcdc_assets.core.faultpoints import FaultPoint
from tests.cluster.conftest import SECRET, Rig
from tests.cluster.leaks import in_files, shown_by
from tests.cluster.standalone import Cluster, kill_executor
from tests.cluster.steps import SECONDS, ends_well, standing_at
from tests.end_to_end.command import Project, wait_for
from tests.ports import held_port

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1200)]
_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


class Server:
    """Its own settings are all that it has: a client cannot bring any but those of SQL."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.port, self.ui, self.events = held_port(), held_port(), folder / "events"
        self.log = folder / "server.log"
        self.events.mkdir(parents=True)
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.driver.memory": "600m",
            "spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2",
            "spark.ui.port": str(self.ui), "spark.eventLog.enabled": "true", "spark.eventLog.compress": "false",
            "spark.eventLog.dir": str(self.events),
        }  # fmt: skip
        options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--class", _SERVER, "--master",
                   cluster.master, *options, "spark-internal"]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = psutil.Popen(
                command, cwd=folder, env={**cluster.environment, "PYSPARK_PYTHON": sys.executable}, stdout=log,
                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    @property
    def listens(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "Spark Connect server started" in self.log.read_text()

    def end(self) -> None:
        for one in (*self.process.children(recursive=True), self.process):
            one.kill()
        self.process.wait()


@pytest.fixture
def server(cluster: Cluster, tmp_path: Path) -> Iterator[Server]:
    server = Server(cluster, tmp_path / "connect")
    try:
        wait_for(lambda: server.listens, SECONDS, "the server")
        yield server
    finally:
        server.end()


def test_tasks_run_on_the_executors_of_a_server(
    rig_on: Callable[[str], Rig], shared_folder: str, server: Server
) -> None:
    rig = rig_on(shared_folder)
    rig.project = Project(rig.project.folder, {
        **rig.project.settings, "PGCDC_SPARK": f'{{"master": "sc://127.0.0.1:{server.port}"}}',
    })  # fmt: skip
    rig.project.run("setup")
    rig.faults.arm(FaultPoint.PIECE_COPIED)
    with rig.project.running("sync") as process:
        with standing_at(rig, FaultPoint.PIECE_COPIED, process) as worker:
            assert not [one for one in psutil.Process(process.pid).children(recursive=True) if one.name() == "java"]
            pages = dict(shown_by(f"http://127.0.0.1:{server.ui}"))
            pages |= dict(shown_by(f"http://127.0.0.1:{server.ui}/connect"))
            assert any("/connect/session" in url for url in pages)
            assert not [url for url, content in pages.items() if SECRET.encode() in content]
            kill_executor(worker)
        ends_well(process, rig)
    rig.change()
    rig.project.run("sync")
    rig.assert_equal()
    assert list(server.events.iterdir())
    assert not in_files(SECRET.encode(), server.events, rig.cluster.folder, server.log.parent)
