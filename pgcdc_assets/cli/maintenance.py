"""The command that keeps the lake small: maintain."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from pgcdc_assets.cli.arguments import as_json
from pgcdc_assets.cli.lines import say
from pgcdc_assets.errors import PgcdcError

if TYPE_CHECKING:
    from pgcdc_assets.flow.maintenance import MaintenanceReport


@click.command()
@as_json
def maintain(as_json: bool) -> int:
    """Delete data older than `retention`, and merge small files. A running sync gives way."""
    from pgcdc_assets.cli.console import ConsoleProgress
    from pgcdc_assets.cli.jobs import project_settings, run_maintenance

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


def maintenance_json(report: MaintenanceReport) -> dict[str, Any]:
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
        f"forgotten: {report.log_files} files of the log, {report.feed_files} of feeds, {report.points} points; "
        f"mirrors: {len(report.optimized)} optimized, {report.deleted_files} files deleted "
        f"({report.deleted_bytes:,} bytes); {report.seconds:.1f} s"
    )
    if report.runs:
        say(f"forgotten of Dagster: {report.runs} runs, with their events")
    say(f"the log starts at {report.log_start}; the oldest consistent point is {report.oldest_point or 'none'}")
    if report.left:
        say(f"pgcdc: ended before {len(report.left)} tables; the next maintenance goes on", err=True)
    for _, error in report.failed:
        say(f"pgcdc: {error}", err=True)
