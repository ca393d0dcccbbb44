"""``pgcdc up``: runs Dagster's UI and daemon with the sensor on. At the end, it ends them and all their children."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import click
import psutil

from pgcdc_assets.cli.jobs import claim_instance, environment
from pgcdc_assets.cli.reloading import Reloading, by_webserver
from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.demo import shop
from pgcdc_assets.errors import MachineError
from pgcdc_assets.flow import lock
from pgcdc_assets.project import workspace_file
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.private import private_log

PORT = 3000
"""Dagster's own default. If it is in use, the next free port is taken."""
HOST = "127.0.0.1"
"""Loopback only, because the UI has no login."""
SENSOR_ON = "PGCDC_ASSETS_SENSOR"

_READY_SECONDS = 120
_END_SECONDS = 6.5
"""Seconds for Dagster and the run at work to end. In this time the run reaches its next boundary or is interrupted."""
_PR_SET_PDEATHSIG = 1


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), help=f"Port of the UI; {PORT} or the next free one.")
@click.option("--host", default=HOST, show_default=True, help="Address to listen at; the UI has no login.")
def up(port: int | None, host: str) -> int:
    """Run Dagster's UI and daemon, with the sensor on."""
    from pgcdc_assets.cli.source import make_ready
    from pgcdc_assets.flow.ownlake import refuse_other_lake
    from pgcdc_assets.projectsource import is_embedded, started_source
    from pgcdc_assets.source.connect.connection import connect
    from pgcdc_assets.source.slot.slot import identity

    settings = Settings.load()
    refuse_other_lake(settings)
    if port is not None and not _is_free(host, port):
        raise MachineError(f"{port} is in use", thing="port", do="name another one in --port, or leave it out")
    stop = threading.Event()
    conninfo = started_source(settings, survive=False)
    with connect(conninfo) as conn:
        claim_instance(identity(conn, settings.slot))
    make_ready(settings, conninfo)
    if is_embedded(settings):
        click.echo(f"embedded PostgreSQL: {shop.server(settings.state).psql}", err=True)
    with ENDING.at_boundary(stop, boundary=None):
        serve(settings, stop, host, port)
    return 0


def serve(settings: Settings, stop: threading.Event, host: str = HOST, port: int | None = None) -> None:
    """Run Dagster's webserver and daemon until ``stop`` is set. Raises MachineError if they end earlier."""
    log = settings.state.absolute() / "up.log"
    url = f"http://{host}:{port or free_port(host)}"
    reloading = Reloading(settings.catalog_file, partial(by_webserver, url))
    process = _start(log, url)
    try:
        _wait_until_ready(process, stop, url, log)
        click.echo(f"Dagster's UI: {url}")
        click.echo("sync_sensor is on; Ctrl-C ends it all", err=True)
        while not stop.wait(0.5):
            if process.poll() is not None:
                raise MachineError(f"ended with code {process.returncode}", thing="Dagster", do=f"see {log}")
            reloading.look()
    finally:
        end(process, settings.layout)


def _start(log: Path, url: str) -> subprocess.Popen[bytes]:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    # At level `info`, the daemon would write a line or two every second.
    quiet = ["--log-level", "warning", "--code-server-log-level", "warning"]
    command = ["--workspace", str(workspace_file()), "--host", host, "--port", port, *quiet]
    with private_log(log) as file:
        return started("pgcdc_assets.cli.dagsterui", command, file, **{SENSOR_ON: "on"})


def started(module: str, arguments: list[str], output: IO[Any], **variables: str) -> subprocess.Popen[bytes]:
    """Start a module of Dagster, or a module that runs Dagster, for this project. If this process is killed, the
    started process ends as by Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        # A file in the project directory, such as queue.py, must not be imported in place of a library's module.
        env={**os.environ, **environment(), **variables, "PYTHONSAFEPATH": "1"},
        # Ctrl-C in the terminal must reach only this process, which ends the children in the right order.
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    """Runs in the child. Has the kernel send SIGINT to the child when its parent is killed, so that it ends as by
    Ctrl-C (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _wait_until_ready(process: subprocess.Popen[bytes], stop: threading.Event, url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not stop.wait(0.2):
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/server_info", timeout=5):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise MachineError("did not start", thing="Dagster", do=f"see {log}")


def end(process: subprocess.Popen[bytes], layout: Layout) -> None:
    """End Dagster and all processes that it started. The run at work is ended first, at its next boundary."""
    family = _family(process.pid)
    writer = lock.holder(layout)
    if writer is not None and writer.is_here and writer.pid in {member.pid for member in family}:
        os.kill(writer.pid, signal.SIGTERM)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    _gone, left = psutil.wait_procs(family, timeout=_END_SECONDS)
    for action in ("terminate", "kill"):
        for member in left:
            with suppress(psutil.NoSuchProcess):
                getattr(member, action)()
        _gone, left = psutil.wait_procs(left, timeout=0.5)
    process.wait()


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def free_port(host: str) -> int:
    for port in range(PORT, PORT + 100):
        if _is_free(host, port):
            return port
    raise MachineError(f"no port from {PORT} to {PORT + 99} is free", do="name one: pgcdc up --port N")


def _is_free(host: str, port: int) -> bool:
    """Whether the port is free. Without this check, we could announce the UI of another program as ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind((host, port))
            return True
    return False
