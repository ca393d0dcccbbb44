"""A real Prometheus scrapes `pgcdc metrics`, loads the alarm rules, and evaluates each expression of the board. It sees
that a sync was killed. Skips where Prometheus is not installed (Debian's package `prometheus`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import Project
from tests.fix_postgres import Database
from tests.metrics.rules import ALARMS, board_expressions
from tests.ports import held_port
from tests.waiting import wait_for

DEPLOY = Path(__file__).parents[2] / "deploy/prometheus"


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """A server with our configuration, whose times are short. Yields its address."""
    program = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed")
    folder.mkdir()
    config = (DEPLOY / "prometheus.yml").read_text()
    config = config.replace("15s", "1s").replace("127.0.0.1:9187", f"127.0.0.1:{target}")
    (folder / "prometheus.yml").write_text(f"global: {{evaluation_interval: 1s}}\n{config}")
    (folder / "alerts.yml").write_text(re.sub(r"for: \d+[mh]", "for: 3s", (DEPLOY / "alerts.yml").read_text()))
    port = held_port()
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def asked(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
        return json.load(answer)["data"]


def queried(url: str, expression: str) -> list[Any]:
    found: list[Any] = asked(url, "query", query=expression)["result"]
    return found


def firing(url: str) -> set[str]:
    alerts = asked(url, "alerts")["alerts"]
    return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.takes(60)
def test_prometheus_sees_that_a_sync_was_killed(database: Database, tmp_path: Path) -> None:
    settings = {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60]}
    project, port = Project(tmp_path, settings), held_port()
    with database.connect() as conn:
        conn.execute("CREATE TABLE public.t (id int PRIMARY KEY); INSERT INTO public.t SELECT generate_series(1, 9)")
        project.run("setup")
        listen = ("metrics", "--listen", f"127.0.0.1:{port}", "--ready-within", "4")
        with project.running(*listen), prometheus(tmp_path / "prometheus", port) as url:
            ready = f"http://127.0.0.1:{port}/readyz"
            wait_for(lambda: status_of(f"{url}/-/ready") == 200, what="Prometheus")
            rules = asked(url, "rules")["groups"][0]["rules"]
            assert {rule["name"]: rule["health"] == "err" for rule in rules} == dict.fromkeys(ALARMS, False)
            with project.running("follow") as follow:
                counted = "pgcdc_transactions_total > 0"
                wait_for(lambda: queried(url, 'pgcdc_tables{state="streaming"} == 1'), what="the copy")

                def changed() -> bool:
                    conn.execute("INSERT INTO public.t SELECT max(id) + 1 FROM public.t")
                    return bool(queried(url, counted))

                wait_for(changed, what="the counts")
                assert status_of(ready) == 200
                wait_for(lambda: "PgcdcSlotInactive" not in firing(url), what="no alarm")
                empty = [text for text in board_expressions() if not text.startswith("label_values")
                         and not queried(url, text.replace("$source", ".*"))]  # fmt: skip
                assert all("verified" in text or "limit" in text or "safe" in text for text in empty), empty
                os.killpg(follow.pid, signal.SIGKILL)
            conn.execute("INSERT INTO public.t SELECT max(id) + 1 FROM public.t")
            wait_for(lambda: status_of(ready) == 503, what="a replication that is not ready")
            wait_for(lambda: firing(url) >= {"PgcdcReplicationStopped", "PgcdcSlotInactive"}, what="the alarms")
            with project.running("follow"):
                wait_for(lambda: status_of(ready) == 200, what="readiness")
                wait_for(lambda: "PgcdcReplicationStopped" not in firing(url), what="the end of the alarm")
