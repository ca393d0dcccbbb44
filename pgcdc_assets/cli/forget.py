"""The command that deletes mirrors of tables that are gone: forget."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from pgcdc_assets.cli.arguments import TableType
from pgcdc_assets.cli.lines import say
from pgcdc_assets.core.names import TableName


@click.command()
@click.argument("tables", nargs=-1, required=True, type=TableType(), metavar="TABLE...")
@click.option("--yes", is_flag=True, help="Do not ask.")
def forget(tables: tuple[TableName, ...], yes: bool) -> int:
    """Delete mirrors and feeds of tables no longer followed. A running sync gives way."""
    from pgcdc_assets.cli.jobs import project_settings
    from pgcdc_assets.flow.engine import Engine
    from pgcdc_assets.flow.reports import Silent

    class Waiting(Silent):
        """Reports on stderr what the command waits for."""

        def progress(self, stage: str, message: str, **numbers: float | str) -> None:
            if stage == "lock":
                say(f"{stage}: {message}", err=True)

    settings = project_settings()
    names = ", ".join(str(table) for table in tables)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"there is no terminal to ask at: say --yes to delete what the lake has of {names}")
        click.confirm(f"Delete what the lake has of {names}?", abort=True, err=True)
    report = Engine(settings, "", Waiting(), _no_spark, f"forget {names}").forget(tables)
    for one in report.tables:
        say(f"{one.table}: {one.files} files deleted ({one.bytes:,} bytes)")
    return 0


def _no_spark() -> NoReturn:
    raise AssertionError("nothing that is deleted is read")
