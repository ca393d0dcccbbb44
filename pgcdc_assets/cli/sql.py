"""The command that reads mirrors: sql."""

from __future__ import annotations

import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pgcdc_assets import logs
from pgcdc_assets.cli.arguments import POINT, examples
from pgcdc_assets.cli.console import say, show, visible
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import UsageError
from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


@click.command(
    epilog=examples('pgcdc sql "SELECT count(*) FROM orders"', 'pgcdc sql --at 0/16B3748 "FROM shop.orders"')
)
@click.argument("query")
@click.option("--at", type=POINT, help="An LSN, or a time like 2026-11-27T14:00. Default: the newest consistent point.")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True,
              help="`table` shows the first and the last rows. `json` writes one object per line.")  # fmt: skip
def sql(query: str, at: Lsn | datetime | None, form: str) -> None:
    """Query all mirrors at one LSN, in DuckDB's SQL.

    If QUERY is `-`, it is read from stdin. Tables of `public` need no schema: pgcdc sql "SELECT count(*) FROM orders"
    """
    from pgcdc_assets.flow.ownlake import refuse_other_lake
    from pgcdc_assets.lake.lake import Lake
    from pgcdc_assets.lake.views import package

    settings = Settings.load()
    refuse_other_lake(settings)
    if sys.stdout is None:
        raise click.ClickException("the result cannot be written: stdout is closed")
    wanted = (sys.stdin.read() if query == "-" else query).strip().rstrip(";")
    duckdb = package("duckdb")
    lake = Lake(settings.layout.root)
    point = lake.at(at)
    # An LSN above the newest point may not be applied yet.
    newest = isinstance(at, Lsn) and at > point.lsn and point.lsn == lake.at().lsn
    say(f"at LSN {point.lsn}{', the newest consistent point' if newest else ''}", err=True)
    try:
        if (count := len(duckdb.extract_statements(wanted))) != 1:
            raise UsageError(f"has {count} statements; write exactly one", thing="query")
        point.in_duckdb(wanted, lambda connection: _write(connection, wanted, form))
    except duckdb.Error as error:
        # A message may quote a value of a row, and log lines in JSON must not contain values. Errors of these three
        # classes are raised before rows are read, so their messages contain no values.
        before = isinstance(error, duckdb.ParserException | duckdb.BinderException | duckdb.CatalogException)
        told = str(error) if before or not logs.as_json() else f"the query failed: {type(error).__name__}"
        raise click.ClickException("\n".join(visible(line) for line in told.splitlines())) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.ClickException(f"the result cannot be written: {error.strerror}") from None


def _write(connection: DuckDBPyConnection, query: str, form: str) -> None:
    if form == "table":
        for line in str(connection.sql(query) or "").splitlines():
            say(line)
        return
    # DuckDB writes to a temporary file. If it wrote to /dev/stdout, it would empty a file to which stdout appends.
    with tempfile.TemporaryDirectory(prefix="pgcdc-sql-") as folder:
        result = Path(folder) / "result"
        options = "FORMAT csv, HEADER" if form == "csv" else "FORMAT json"
        connection.execute(f"COPY (\n{query}\n) TO '{result}' ({options})")
        if sys.stdout.isatty():
            show(result.read_text())
            return
        with result.open("rb") as written:
            shutil.copyfileobj(written, sys.stdout.buffer)
