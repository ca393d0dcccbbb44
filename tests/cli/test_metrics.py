"""`pgcdc metrics` at each stage of a project. The command neither fails nor hangs if source, slot or lake are
missing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.conftest import Shell
from tests.metrics.moments import Samples, samples
from tests.servers import held_port
from tests.waiting import wait_for

SECRET = "hunter2-in-a-test"
FOUND = {"source": 1.0, "slot": 1.0, "lake": 1.0, "log": 1.0}


def printed(shell: Shell) -> Samples:
    began = time.monotonic()
    text = shell.pgcdc("metrics")
    assert time.monotonic() - began < 60
    assert SECRET not in text
    return samples(text)


def up(found: Samples) -> dict[str, float]:
    return {labels[0]: value for (name, labels), value in found.items() if name == "pgcdc_up"}


def test_metrics_show_which_of_source_and_slot_and_lake_and_log_exist(shell: Shell) -> None:
    assert up(printed(shell)) == FOUND | {"slot": 0, "log": 0}
    shell.pgcdc("setup")
    found = printed(shell)
    assert up(found) == FOUND | {"log": 0}
    assert found["pgcdc_tables", ("waiting",)] == 2
    assert found["pgcdc_slot_active", ()] == 0
    assert found["pgcdc_slot_wal_status", ("reserved",)] == 1
    assert found["pgcdc_lag_bytes", ("receive",)] >= 0
    with shell.database.connect() as conn:
        conn.execute("SELECT pg_drop_replication_slot(%s)", (f"s_{shell.database.name}",))
    found = printed(shell)
    assert up(found) == FOUND | {"slot": 0, "log": 0}
    assert found["pgcdc_ready", ()] == 0


def test_pgcdc_up_is_0_for_a_source_that_is_unreachable_or_does_not_answer(shell: Shell) -> None:
    shell.pgcdc("setup")
    shell.set(SOURCE=f"host=127.0.0.1 port={held_port()} dbname=d user=u password={SECRET}")
    assert up(printed(shell)) == FOUND | {"source": 0, "slot": 0, "log": 0}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # The kernel accepts the connection, but no program answers.
        port = silent.getsockname()[1]
        shell.set(SOURCE=f"host=127.0.0.1 port={port} dbname=d user=u password={SECRET}")
        found = printed(shell)
    assert up(found) == FOUND | {"source": 0, "slot": 0, "log": 0}
    assert found["pgcdc_problems", ("error",)] >= 1


def test_a_source_of_another_project_has_pgcdc_up_0_and_no_other_values(shell: Shell) -> None:
    shell.pgcdc("setup")
    shell.set(SOURCE=shell.database.server.conninfo_of("postgres"))
    found = printed(shell)
    assert up(found)["source"] == 0
    assert ("pgcdc_source_wal_lsn_bytes", ()) not in found


def test_a_wrong_listen_address_is_refused(shell: Shell) -> None:
    for wrong in ("9187", ":0", ":70000", "host:", ":x"):
        assert "is not an address" in shell.pgcdc("metrics", "--listen", wrong, expect=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = shell.pgcdc("metrics", "--listen", f":{taken.getsockname()[1]}", expect=1)
    assert "cannot be used" in told


@contextmanager
def served(*more: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Runs ``pgcdc metrics --listen`` in a new process. Yields the process and its URL."""
    port = held_port()
    command = [sys.executable, "-c", "from pgcdc_assets.cli.main import main; main()", "metrics", "--listen",
               f":{port}", *more]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == f"pgcdc: metrics at http://127.0.0.1:{port}/metrics\n".encode()
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def got(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.process
def test_the_metrics_server_answers_while_the_source_is_unreachable_and_ends_on_sigterm(shell: Shell) -> None:
    shell.pgcdc("setup")
    shell.set(SOURCE=f"host=127.0.0.1 port={held_port()} dbname=d user=u password={SECRET}")
    with served() as (process, url):
        assert got(f"{url}/healthz") == (200, "ok\n")
        assert up(samples(got(f"{url}/metrics")[1])) == FOUND | {"source": 0, "slot": 0, "log": 0}
        status, text = got(f"{url}/readyz")
        assert (status, SECRET in text) == (503, False)
        assert text.startswith("not ready: source: ")
        assert "no consistent point was published yet" in text
        assert got(f"{url}/other")[0] == 404
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: process.poll() is not None, 20, "the end")
        assert process.returncode == 0
