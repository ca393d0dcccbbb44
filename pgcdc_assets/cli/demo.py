"""``pgcdc demo``: copies and follows a sample shop in a new folder, and verifies it at the end."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import psycopg
import yaml

from pgcdc_assets.cli.arguments import examples
from pgcdc_assets.cli.console import ConsoleProgress, say
from pgcdc_assets.cli.source import make_ready
from pgcdc_assets.cli.status_verify import in_a_sentence, print_report
from pgcdc_assets.cli.up import serve
from pgcdc_assets.core.layout import LOCAL, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LakeError
from pgcdc_assets.projectfile import EMBEDDED, SETTINGS_FILE, save_source
from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from pgcdc_assets.checks.report import VerifyReport
    from pgcdc_assets.demo.shop import Generator
    from pgcdc_assets.flow.reports import SyncReport

SECONDS = 30
RATE = 50.0
"""Transactions per second: like a busy shop, but a light load for a machine with two cores that also runs Spark."""
LONGEST_SECONDS = 60
_FOLLOW_SECONDS = 165
"""Seconds for the start of the JVM, the copy, live changes and the final ``verify``. With the steps before them, the
demo takes less than three minutes on an idle machine."""
_PROOF_SECONDS = 60
"""Seconds reserved for the final ``verify``. If the copy takes long, live changes are followed for a shorter time."""
_END_SECONDS = 900
"""Seconds after which the sync ends even if ``verify`` has not ended. The limit is high, so that the demo succeeds on a
busy machine, too."""


@click.command(epilog=examples("pgcdc demo", "pgcdc demo --seconds 10 --ui"))
@click.option("--seconds", type=click.IntRange(1, LONGEST_SECONDS), default=SECONDS, show_default=True,
              help="Seconds for which live changes are followed after the copy.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(0.1, 5000), default=RATE, show_default=True,
              help="Transactions per second that the generator writes.")  # fmt: skip
@click.option(
    "--lake",
    metavar="URL",
    help="Put the lake into a new folder below this URL of an object store, like s3://bucket/x.",
)
@click.option("--ui", is_flag=True, help="Start Dagster's UI at the end, and leave it open.")
def demo(seconds: int, rate: float, lake: str | None, ui: bool) -> int:
    """Copy and follow a live sample shop, then compare every table."""
    from pgcdc_assets.projectsource import started_source

    folder = fresh_folder(lake)
    # For a JVM that lives for two minutes, the optimising compiler costs more time than it saves.
    os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")
    progress = ConsoleProgress()
    progress.note(f"working in {folder}")
    settings = Settings.load()
    with progress.shown("starting PostgreSQL"):
        conninfo = started_source(settings, survive=False)
        tables = len(make_ready(settings, conninfo).catalog.tables)
        progress.note(f"PostgreSQL is running; slot and publication for {tables} tables were created")
    show = Show(settings, conninfo, progress, tables, seconds)
    proof = show.run(rate)
    _print(progress.report, show.transactions, proof, folder, settings.layout.root)
    if ui:
        serve(settings)
    return proof.exit_code


def fresh_folder(lake: str | None) -> Path:
    """Make and enter a project directory that does not depend on the caller's settings. Its lake is in the directory,
    or in a new folder of ``lake``."""
    for name in [name for name in os.environ if name.startswith("PGCDC_") or name == "DAGSTER_HOME"]:
        del os.environ[name]
    folder = Path(tempfile.mkdtemp(prefix="pgcdc-demo-"))
    # The embedded server may run as another user, who must be able to reach its folder.
    folder.chmod(0o755)
    os.chdir(folder)
    save_source(EMBEDDED)
    if lake is not None:
        with SETTINGS_FILE.open("a") as file:
            yaml.safe_dump({"lake": f"{lake.rstrip('/')}/{folder.name}"}, file)
    return folder


class Show:
    """Runs the demo: a sync in this thread, the generator of changes in a second thread, and ``verify`` in a third. The
    end of ``verify`` ends the sync."""

    def __init__(self, settings: Settings, conninfo: str, progress: ConsoleProgress, tables: int, seconds: int) -> None:
        self._settings = settings
        self._conninfo = conninfo
        self._progress = progress
        self._tables = tables
        self._seconds = seconds
        self._started = time.monotonic()
        self._proof: VerifyReport | BaseException | None = None
        self.transactions = 0

    def run(self, rate: float) -> VerifyReport:
        from pgcdc_assets.cli.jobs import run_sync
        from pgcdc_assets.demo.shop import Generator

        generator = Generator(self._conninfo, rate)
        threads = [
            threading.Thread(target=self._write, args=(generator,), name="generator", daemon=True),
            threading.Thread(target=self._prove, name="verify", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            with self._progress.shown("follow"):
                run_sync(self._settings, self._progress, command="demo", follow=True, max_seconds=_END_SECONDS)
        finally:
            self._progress.stop.set()
            generator.stop()
            for thread in threads:
                thread.join()
        self.transactions = generator.transactions
        if isinstance(self._proof, BaseException):
            raise self._proof
        assert self._proof is not None
        return self._proof

    def _write(self, generator: Generator) -> None:
        from pgcdc_assets.source.connect.failures import of_exception

        try:
            generator.run()
        except psycopg.Error as error:
            self._progress.note(f"the generator of transactions stopped: {of_exception(error).message}")

    def _prove(self) -> None:
        """Wait until all tables are copied and were followed for some time. Then compare source and mirrors, while
        writers and sync continue."""
        from pgcdc_assets.cli.status_verify import verified

        stop = self._progress.stop
        while len(self._progress.copies) < self._tables and not stop.wait(0.1):
            pass
        left = _FOLLOW_SECONDS - _PROOF_SECONDS - (time.monotonic() - self._started)
        stop.wait(max(1.0, min(self._seconds, left)))
        try:
            self._proof = verified(self._settings, self._conninfo, None, self._progress, _too_late)
        except BaseException as error:  # noqa: BLE001  (raised again by the main thread)
            self._proof = error
        finally:
            stop.set()


def _too_late(lsn: Lsn, max_seconds: float | None) -> None:
    do = "try again on a less busy machine"
    raise LakeError("the sync ended before the mirrors reached the LSN of the comparison", lsn=lsn, do=do)


def _print(report: SyncReport | None, committed: int, proof: VerifyReport, folder: Path, root: Location) -> None:
    print_report(proof)
    if report is not None:
        click.echo(
            f"{len(report.copied)} tables copied, {report.transactions} transactions and {report.rows} rows replicated "
            f"in {report.seconds:.0f} s; the generator committed {committed} transactions"
        )
    click.echo(in_a_sentence(proof))
    where = folder if root.scheme == LOCAL else f"{root} and {folder}"
    say(f"pgcdc: the lake and Dagster's runs stay in {where}; to see them: cd {folder} && pgcdc up", err=True)
