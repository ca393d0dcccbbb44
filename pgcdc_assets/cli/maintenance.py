"""The commands that delete data from the lake: maintain, forget."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn

import click

from pgcdc_assets.cli.arguments import TABLE, as_json, confirm, examples, with_yes
from pgcdc_assets.cli.console import ConsoleProgress, say
from pgcdc_assets.cli.jobs import project_settings, run_maintenance
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import PgcdcError

if TYPE_CHECKING:
    from pgcdc_assets.checks.documents import MaintainDocument
    from pgcdc_assets.flow.maintenance import MaintenanceReport


@click.command(epilog=examples("pgcdc maintain"))
@as_json
def maintain(as_json: bool) -> int:
    """Delete data older than `retention`, and merge small files. Also works while `pgcdc follow` runs."""
    settings = project_settings()
    progress = ConsoleProgress()
    with progress.shown("maintain"):
        try:
            run_maintenance(settings, progress)
        except PgcdcError:
            # If one mirror failed, there is still a report of everything that was done. It is printed below.
            if progress.maintenance is None:
                raise
    report = progress.maintenance
    assert report is not None
    if as_json:
        click.echo(json.dumps(maintenance_json(report), indent=1))
    else:
        _print(report)
    return 1 if report.failed else 0


def maintenance_json(report: MaintenanceReport) -> MaintainDocument:
    return {
        "ok": not report.failed,
        "log_start": str(report.log_start),
        "oldest_point": None if report.oldest_point is None else str(report.oldest_point),
        "log_files": report.log_files,
        "feed_files": report.feed_files,
        "points": report.points,
        "optimized": [str(name) for name in report.optimized],
        "vacuumed": [str(name) for name in report.vacuumed],
        "deleted_files": report.deleted_files,
        "deleted_bytes": report.deleted_bytes,
        "runs": report.runs,
        "left": [str(name) for name in report.left],
        "failed": [{"name": str(name), "error": error} for name, error in report.failed],
        "seconds": round(report.seconds, 3),
    }


def _print(report: MaintenanceReport) -> None:
    say(
        f"deleted: {report.log_files} files of the change log, {report.feed_files} of change feeds, {report.points} "
        f"consistent points; mirrors: {len(report.optimized)} optimized, {report.deleted_files} files deleted "
        f"({report.deleted_bytes:,} bytes); {report.seconds:.1f} s"
    )
    if report.runs:
        say(f"deleted from Dagster: {report.runs} runs with their events")
    say(f"the change log starts at {report.log_start}; the oldest consistent point is {report.oldest_point or 'none'}")
    if report.left:
        say(f"pgcdc: maintenance ended early; tables left for the next maintenance: {len(report.left)}", err=True)
    for _, error in report.failed:
        say(f"pgcdc: {error}", err=True)


@click.command(epilog=examples("pgcdc forget public.old_orders"))
@click.argument("tables", nargs=-1, required=True, type=TABLE, metavar="TABLE...")
@with_yes
def forget(tables: tuple[TableName, ...], yes: bool) -> int:
    """Delete mirrors and feeds of tables that are no longer replicated. Also works while `pgcdc follow` runs."""
    from pgcdc_assets.flow.engine import Engine
    from pgcdc_assets.flow.reports import Silent

    class Waiting(Silent):
        """Reports on stderr what the command waits for."""

        def progress(self, stage: str, message: str, **numbers: float | str) -> None:
            if stage == "lock":
                say(f"{stage}: {message}", err=True)

    def no_spark() -> NoReturn:
        raise AssertionError("forget must not start Spark")

    settings = project_settings()
    names = ", ".join(str(table) for table in tables)
    if not yes:
        confirm("delete", f"the mirrors and feeds of {names}")
    for one in Engine(settings, "", Waiting(), no_spark, f"forget {names}").forget(tables):
        say(f"{one.table}: {one.files} files deleted ({one.bytes:,} bytes)")
    return 0
