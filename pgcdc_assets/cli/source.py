"""The commands that make ready, and clear away: setup, teardown."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from pgcdc_assets.cli.arguments import as_json

if TYPE_CHECKING:
    from pgcdc_assets.core.catalog import Catalog
    from pgcdc_assets.settings import Settings
    from pgcdc_assets.source.findings import Finding
    from pgcdc_assets.source.holders import Holder
    from pgcdc_assets.source.setup import SetupReport


@click.command()
@as_json
def setup(as_json: bool) -> int:
    """Check the source, make publication and slot, save the catalog; twice is fine."""
    from pgcdc_assets.defs.project import started_source
    from pgcdc_assets.settings import Settings

    settings = Settings.load()
    report = make_ready(settings, started_source(settings))
    if as_json:
        click.echo(json.dumps(setup_json(report), indent=1))
    else:
        _print(report)
    return 0


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--lake", "lake_too", is_flag=True, help="Remove the lake as well.")
def teardown(yes: bool, lake_too: bool) -> int:
    """Remove what setup made: slot, publication, saved catalog. The lake stays unless --lake."""
    from pgcdc_assets.settings import Settings

    settings = Settings.load()
    what = f"slot {settings.slot} and publication {settings.publication}"
    if lake_too:
        what += f", and the lake {settings.layout.root}"
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("there is no terminal to ask at: say --yes to remove " + what)
        click.confirm(f"Remove {what}?", abort=True, err=True)
    for line in _removed(settings, lake_too):
        click.echo(line)
    return 0


def make_ready(settings: Settings, conninfo: str) -> SetupReport:
    """Publication, slot and saved catalog, made where they are missing."""
    from pgcdc_assets.settings import CATALOG_FILE
    from pgcdc_assets.source.setup import setup

    report = setup(settings, conninfo, on_wait=_tell_waiting)
    report.catalog.save(CATALOG_FILE)
    return replace(report, findings=[*_refused(report.catalog), *report.findings])


def _refused(catalog: Catalog) -> list[Finding]:
    """Tables that are published and cannot be mirrored: also said by sync, status and verify."""
    from pgcdc_assets.lake.mirrors import refusal, way_back
    from pgcdc_assets.source.findings import Finding

    reasons = {table.name: reason for table in catalog.tables if (reason := refusal(table)) is not None}
    return [
        Finding("warning", f"table {name}", f"will be set aside: {reason}", way_back(name, refused=True))
        for name, reason in reasons.items()
    ]


def _tell_waiting(holders: Sequence[Holder]) -> None:
    click.echo(f"PostgreSQL waits for {'; '.join(str(holder) for holder in holders)}", err=True)


def _removed(settings: Settings, lake_too: bool) -> list[str]:
    """Clear away under the lake's lock, so that nobody writes meanwhile."""
    from pgcdc_assets.defs.project import started_source
    from pgcdc_assets.demo import shop
    from pgcdc_assets.flow.lock import lake_lock
    from pgcdc_assets.settings import CATALOG_FILE
    from pgcdc_assets.source.setup import teardown

    # Without a lake there is no writer, and no folder should come of looking for one.
    with lake_lock(settings.layout, "teardown") if settings.layout.own.is_dir() else nullcontext():
        conninfo = started_source(settings)
        gone = [f"removed {thing}" for thing in teardown(settings, conninfo)]
        gone += _retired_log(settings, conninfo)
        CATALOG_FILE.unlink(missing_ok=True)
        if settings.embedded:
            shop.server().stop()
        if lake_too:
            shutil.rmtree(settings.layout.root, ignore_errors=True)
            gone.append(f"removed lake {settings.layout.root}")
    return gone


def _retired_log(settings: Settings, conninfo: str) -> list[str]:
    """A log whose slot is gone can never go on: it makes way for the log of the next slot, and is kept."""
    from pgcdc_assets.log.table import ChangeLog
    from pgcdc_assets.source.connection import connect
    from pgcdc_assets.source.slots import slot_status

    log = ChangeLog(settings.layout)
    if not log.exists:
        return []
    with connect(conninfo) as conn:
        if slot_status(conn, settings.slot) is not None:
            return []
    place = log.path.with_name(f"{log.path.name}-{log.position():012X}")
    log.path.rename(place)
    return [f"kept the change log as {place}"]


def setup_json(report: SetupReport) -> dict[str, object]:
    return {
        "ok": True,
        "created": list(report.created),
        "tables": [str(table.name) for table in report.catalog.tables],
        "findings": [{"severity": f.severity, "thing": f.thing, "what": f.what, "do": f.do} for f in report.findings],
    }


def _print(report: SetupReport) -> None:
    for finding in report.findings:
        click.echo(f"{finding.severity}: {finding}", err=True)
    for line in report.created:
        click.echo(f"created {line}")
    tables = report.catalog.tables
    click.echo(f"{len(tables)} tables are published; run `pgcdc sync`")
    for table in tables:
        click.echo(f"  {table.name}{'' if table.updates_seen else '  (inserts only)'}")
