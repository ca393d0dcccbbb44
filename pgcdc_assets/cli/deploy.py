"""The commands for a project whose parts run on other machines: code-server, pack. ``pgcdc code-server`` serves the
project to a Dagster webserver and daemon elsewhere. When it is stopped, it first ends the running sync at the sync's
next boundary. Dagster's own ``code-server start`` would wait until the sync ends by itself, so stopping its container
would kill the sync."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

import click

from pgcdc_assets.cli.arguments import examples
from pgcdc_assets.cli.console import say
from pgcdc_assets.cli.jobs import project_settings
from pgcdc_assets.cli.up import HOST, Reloading, by_code_server, end, started
from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.errors import MachineError
from pgcdc_assets.project import LOCATION
from pgcdc_assets.settings import Settings

PORT = 4000
"""The port that Dagster's own examples use."""


@click.command("code-server", epilog=examples("pgcdc code-server --host 0.0.0.0 --port 4000"))
@click.option("--port", type=click.IntRange(1, 65535), default=PORT, show_default=True, help="Port of the gRPC server.")
@click.option("--host", default=HOST, show_default=True, help="Address to listen on; the server has no login.")
def code_server(port: int, host: str) -> int:
    """Serve this project's definitions to a Dagster that runs elsewhere."""
    settings = project_settings(set_up=False)
    stop = threading.Event()
    with ENDING.at_boundary(stop, boundary=None):
        serve(settings, stop, host, port)
    return 0


def serve(settings: Settings, stop: threading.Event, host: str, port: int) -> None:
    """Run the server until ``stop`` is set, then end the running sync and the server. Raises MachineError if the server
    ends earlier."""
    command = ["code-server", "start", "--module-name", "pgcdc_assets.definitions", "--location-name", LOCATION]
    reloading = Reloading(settings.catalog_file, partial(by_code_server, host, port))
    process = started("dagster", [*command, "--host", host, "--port", str(port), "--log-level", "warning"], sys.stderr)
    try:
        while not stop.wait(0.5):
            if process.poll() is not None:
                raise MachineError(f"ended with code {process.returncode}", thing="Dagster's code server")
            reloading.look()
    finally:
        end(process, settings.layout)


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
