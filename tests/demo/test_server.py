"""The embedded server: it starts, is shared by several processes, can outlive the process that started it, and recovers
from a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pytest

from pgcdc_assets.demo.binaries import Runner
from pgcdc_assets.demo.server import EmbeddedServer
from tests.waiting import wait_for


@pytest.mark.long
@pytest.mark.parametrize("version", [16, 18])
def test_server_is_shared_and_keeps_its_rows_after_a_restart(tmp_path: Path, version: int) -> None:
    with EmbeddedServer(tmp_path / "pg", version=version, fsync=False, database="shop") as server:
        with psycopg.connect(server.conninfo) as conn:
            assert conn.info.server_version // 10000 == version
            assert conn.execute("SHOW wal_level").fetchone() == ("logical",)
            assert conn.execute("SHOW listen_addresses").fetchone() == ("",)
            conn.execute("CREATE TABLE kept AS SELECT 1 AS one")
        first = server.pid
        assert EmbeddedServer(tmp_path / "pg", database="shop").start().pid == first
        with EmbeddedServer(tmp_path / "pg"):
            pass
        assert server.running, "who only joined does not stop it"
    assert not server.running
    again = EmbeddedServer(tmp_path / "pg", fsync=False, database="shop")
    assert again.version == version
    with again, psycopg.connect(again.conninfo) as conn:
        assert conn.execute("SELECT one FROM kept").fetchone() == (1,)


def test_server_never_runs_as_root(server: EmbeddedServer) -> None:
    assert server.pid is not None
    assert psutil.Process(server.pid).uids().real != 0
    assert server.folder.stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_server_recovers_from_a_crash_even_if_another_process_has_its_pid(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "pg").start()
    try:
        with psycopg.connect(server.conninfo, autocommit=True) as conn:
            conn.execute("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS i")
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not server.running)
        pid_file = server.data / "postmaster.pid"
        lines = pid_file.read_text().split("\n")
        stranger = subprocess.Popen(server.runner.command(["sleep", "60"]))
        try:
            pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]))
            assert not server.running
            server.start()
        finally:
            stranger.kill()
            stranger.wait()
        with psycopg.connect(server.conninfo) as conn:
            assert conn.execute("SELECT count(*) FROM kept").fetchone() == (1000,)
    finally:
        server.stop()


def _start_elsewhere(folder: Path, survive: bool) -> subprocess.Popen[bytes]:
    program = (
        "import sys, time; from pathlib import Path; from pgcdc_assets.demo.server import EmbeddedServer\n"
        f"EmbeddedServer(Path({str(folder)!r}), fsync=False).start(survive={survive})\n"
        "print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.mark.long
@pytest.mark.parametrize("survive", [True, False])
def test_server_outlives_the_process_that_started_it_only_on_request(tmp_path: Path, survive: bool) -> None:
    process = _start_elsewhere(tmp_path / "pg", survive)
    server = EmbeddedServer(tmp_path / "pg", fsync=False)
    assert server.running
    process.kill()
    process.communicate()
    try:
        if survive:
            time.sleep(0.5)
            with psycopg.connect(server.conninfo) as conn:
                assert conn.execute("SELECT 1").fetchone() == (1,)
        else:
            wait_for(lambda: not server.running)
    finally:
        server.stop()


def test_server_in_a_private_folder_gets_a_linux_capability_and_the_folder_stays_private(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        assert server.runner == Runner()
        return
    tmp_path.chmod(0o700)
    (tmp_path / "x").mkdir()
    assert Runner.for_folders(server.bin, tmp_path / "x").capability in ("dac_read_search", "dac_override")
    assert tmp_path.stat().st_mode & 0o077 == 0
