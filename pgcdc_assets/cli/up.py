"""The commands that run Dagster, or prepare the parts of a project for other machines: up, code-server, pack.

``pgcdc up`` runs Dagster's UI and daemon, with the sensor that starts syncs. ``pgcdc code-server`` serves the project
to a Dagster webserver and daemon elsewhere. When such a command is stopped, it ends the running sync at the sync's next
boundary, and then all processes that it started. Dagster's own ``code-server start`` would wait until the sync ends by
itself, so stopping its container would kill the sync. When the saved catalog shows that tables were added, removed or
altered, the commands make Dagster load the project's definitions again, because the definitions are created from this
catalog.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import click
import psutil

from pgcdc_assets.cli.arguments import examples
from pgcdc_assets.cli.console import say
from pgcdc_assets.cli.jobs import claim_instance, environment, project_settings
from pgcdc_assets.cli.source import make_ready
from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.demo import shop
from pgcdc_assets.errors import MachineError, PgcdcError
from pgcdc_assets.flow import lock
from pgcdc_assets.project import LOCATION, SENSOR_ON, load_catalog, workspace_file
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.localfiles import private_log, rotate

PORT = 3000
"""Dagster's own default. If it is in use, the next free port is taken."""
HOST = "127.0.0.1"
"""The UI has no login, so it listens on loopback only."""
CODE_PORT = 4000
"""The port of the code server. Dagster's own examples use it."""

_READY_SECONDS = 120
_END_SECONDS = 6.5
"""Seconds for Dagster and the running sync to end. If the sync has not reached its next boundary then, it is
terminated."""
_PR_SET_PDEATHSIG = 1

_MUTATION = """mutation ($name: String!) {
  reloadRepositoryLocation(repositoryLocationName: $name) { __typename }
}"""
_RELOAD_SECONDS = 60.0
"""Time limit in seconds for Dagster to import the definitions again, also on a busy machine."""


@click.command(epilog=examples("pgcdc up", "pgcdc up --port 3005"))
@click.option("--port", type=click.IntRange(1, 65535), help=f"Port of the UI. Default: {PORT}, or the next free port.")
@click.option("--host", default=HOST, show_default=True, help="Address to listen on; the UI has no login.")
def up(port: int | None, host: str) -> int:
    """Run Dagster's UI and daemon, with the sensor that keeps mirrors up to date."""
    from pgcdc_assets.flow.ownlake import refuse_other_lake
    from pgcdc_assets.projectsource import is_embedded, started_source
    from pgcdc_assets.source.connect.connection import connect
    from pgcdc_assets.source.slot.slot import identity

    settings = Settings.load()
    refuse_other_lake(settings)
    if port is not None and not _is_free(host, port):
        raise MachineError(f"{port} is in use", thing="port", do="choose another port, or omit --port")
    conninfo = started_source(settings, survive=False)
    with connect(conninfo) as conn:
        claim_instance(settings, identity(conn, settings.slot))
    make_ready(settings, conninfo)
    if is_embedded(settings):
        say(f"embedded PostgreSQL: {shop.server(settings.state).psql}", err=True)
    serve(settings, host, port)
    return 0


def serve(settings: Settings, host: str = HOST, port: int | None = None) -> None:
    """Run Dagster's webserver and daemon until a signal asks this process to end. Raises MachineError if they end
    earlier."""
    log = settings.state.absolute() / "up.log"
    url = f"http://{host}:{port or free_port(host)}"
    reloading = Reloading(settings.catalog_file, partial(by_webserver, url))
    with ENDING.at_boundary(stop := threading.Event(), boundary=None):
        process = _start(log, url)
        try:
            _wait_until_ready(process, stop, url, log)
            click.echo(f"Dagster's UI: {url}")
            say(
                f"{settings.name}_sync_sensor is on and keeps mirrors up to date; Ctrl-C stops Dagster and the sync",
                err=True,
            )
            while not stop.wait(0.5):
                if process.poll() is not None:
                    raise MachineError(f"ended with code {process.returncode}", thing="Dagster", do=f"see {log}")
                reloading.look()
                rotate(log)
        finally:
            end(process, settings.layout)


@click.command("code-server", epilog=examples("pgcdc code-server --host 0.0.0.0 --port 4000"))
@click.option(
    "--port", type=click.IntRange(1, 65535), default=CODE_PORT, show_default=True, help="Port of the gRPC server."
)
@click.option("--host", default=HOST, show_default=True, help="Address to listen on; the server has no login.")
def code_server(port: int, host: str) -> int:
    """Serve this project's definitions to a Dagster that runs elsewhere."""
    settings = project_settings(set_up=False)
    command = ["code-server", "start", "--module-name", "pgcdc_assets.definitions", "--location-name", LOCATION]
    command += ["--host", host, "--port", str(port), "--log-level", "warning"]
    with ENDING.at_boundary(stop := threading.Event(), boundary=None):
        reloading = Reloading(settings.catalog_file, partial(by_code_server, host, port))
        process = started("dagster", command, sys.stderr)
        try:
            while not stop.wait(0.5):
                if process.poll() is not None:
                    raise MachineError(f"ended with code {process.returncode}", thing="Dagster's code server")
                reloading.look()
        finally:
            end(process, settings.layout)
    return 0


def _start(log: Path, url: str) -> subprocess.Popen[bytes]:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    # At level `info`, the daemon would write a line or two every second.
    quiet = ["--log-level", "warning", "--code-server-log-level", "warning"]
    command = ["--workspace", str(workspace_file(log.parent)), "--host", host, "--port", port, *quiet]
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
    """Runs in the child: when the parent is killed, the kernel sends SIGINT, as Ctrl-C would (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _wait_until_ready(process: subprocess.Popen[bytes], stop: threading.Event, url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not stop.wait(0.2):
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/server_info", timeout=5):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise MachineError("did not start", thing="Dagster", do=f"see {log}")


def end(process: subprocess.Popen[bytes], layout: Layout) -> None:
    """End Dagster and all processes that it started. A running sync is asked first to end at its next boundary."""
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
    raise MachineError(f"no port from {PORT} to {PORT + 99} is free", do="choose a free port: pgcdc up --port N")


def _is_free(host: str, port: int) -> bool:
    """Whether the port is free. Without this check, we could announce another program's UI as Dagster's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind((host, port))
            return True
    return False


class Reloading:
    """Makes Dagster load the definitions again when the saved catalog shows other tables. ``reload`` asks Dagster to do
    so, and returns whether it succeeded. Create this object when Dagster first loads the definitions, because the
    object remembers the catalog's tables at that time."""

    def __init__(self, catalog_file: Path, reload: Callable[[], bool]) -> None:
        self._file = catalog_file
        self._reload = reload
        self._seen = self._written()
        self._loaded = self._tables()
        self._under_way: threading.Thread | None = None

    def look(self) -> None:
        """Start a reload if the catalog shows other tables; returns at once. A failed reload is tried again later."""
        if self._under_way is not None and self._under_way.is_alive():
            return
        if self._written() != self._seen:
            # A daemon thread, so that the end of the process does not wait for it.
            self._under_way = threading.Thread(target=self.load, daemon=True)
            self._under_way.start()

    def load(self) -> None:
        """Reload the definitions if the catalog shows other tables."""
        written, tables = self._written(), self._tables()
        if tables is None or tables == self._loaded or self._reload():
            self._seen, self._loaded = written, tables if tables is not None else self._loaded

    def _written(self) -> int:
        """When the catalog was last written; 0 if there is no catalog."""
        try:
            return self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _tables(self) -> frozenset[tuple[Table, object]] | None:
        """The tables as the definitions show them, with columns and comments. None if the catalog cannot be read."""
        try:
            catalog = load_catalog(self._file)
        except (PgcdcError, ValueError, KeyError, TypeError):
            return None
        tables = catalog.tables if catalog is not None else ()
        return frozenset((table.without_volatile(), table.comments) for table in tables)


def by_webserver(url: str) -> bool:
    """Ask the webserver to reload, as its button does."""
    body = json.dumps({"query": _MUTATION, "variables": {"name": LOCATION}}).encode()
    request = urllib.request.Request(f"{url}/graphql", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_RELOAD_SECONDS) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return False
    told = (found.get("data") or {}).get("reloadRepositoryLocation") or {}
    return bool(told.get("__typename") == "WorkspaceLocationEntry")


def by_code_server(host: str, port: int) -> bool:
    """Ask the code server to reload. It informs webserver and daemon."""
    from dagster._core.errors import DagsterUserCodeUnreachableError
    from dagster._grpc.client import DagsterGrpcClient

    try:
        DagsterGrpcClient(port=port, host=host).reload_code(timeout=int(_RELOAD_SECONDS))
    except DagsterUserCodeUnreachableError:
        return False
    return True


@click.command(epilog=examples("pgcdc pack -o pgcdc_env.tar.gz"))
@click.option("-o", "output", type=click.Path(dir_okay=False, path_type=Path), default=Path("pgcdc_env.tar.gz"),
              show_default=True, help="The archive's file.")  # fmt: skip
def pack(output: Path) -> int:
    """Pack this Python environment for executors of a Spark cluster. Name the archive in `spark: {archive: ...}`."""
    from pgcdc_assets.spark import archive
    from pgcdc_assets.spark.attempt import versions

    if not output.name.endswith((".tar.gz", ".tgz")):
        raise click.BadParameter("must end with .tar.gz or .tgz", param_hint="-o")
    packed = archive.pack(output.absolute())
    ours = versions()
    say(f"wrote {output}: {packed.bytes / 1e6:.0f} MB, pgcdc_assets {ours['pgcdc_assets']} and "
        f"{len(packed.packages) - 1} packages, for nodes with Python {ours['Python']}")  # fmt: skip
    return 0
