"""``pgcdc``: what a user types. Results on stdout, progress and errors on stderr.

Exit codes: 0 well; 1 a difference, failure or fault found; 2 wrong usage or settings. Commands import
what they need when they run, so that help and ``status`` come at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

import click

from pgcdc_assets.cli.demo import demo
from pgcdc_assets.cli.looking import status, verify
from pgcdc_assets.cli.maintenance import maintain
from pgcdc_assets.cli.running import follow, repair, snapshot, sync
from pgcdc_assets.cli.serving import up
from pgcdc_assets.cli.source import setup, teardown
from pgcdc_assets.errors import PgcdcError

FAILURE_FILE = ".pgcdc/failure.txt"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("pgcdc_assets"), prog_name="pgcdc")
def pgcdc() -> None:
    """Delta Lake tables kept exactly equal to a PostgreSQL database.

    The project directory is the working directory: settings come from PGCDC_... in the environment, then
    from pgcdc.yaml; the lake stands in ./lake. Without a source, an embedded PostgreSQL with a sample shop
    is used.
    """


for command in (demo, up, setup, teardown, sync, follow, status, verify, snapshot, repair, maintain):
    pgcdc.add_command(command)


def main() -> None:
    """The entry point of the installed command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code and lets no exception out."""
    try:
        return int(pgcdc.main(list(arguments), prog_name="pgcdc", standalone_mode=False) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort:
        click.echo("pgcdc: nothing was done", err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return 2
    except PgcdcError as error:
        click.echo(f"pgcdc: {error}", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        click.echo("pgcdc: interrupted", err=True)
        return 1
    except BrokenPipeError:
        # Who read us has gone: Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001  (the last resort: one line, and where the rest stands)
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """A fault of ours. The message may quote anything, so it stays in the file with its traceback."""
    where = ""
    try:
        os.makedirs(os.path.dirname(FAILURE_FILE), exist_ok=True)
        with open(FAILURE_FILE, "w") as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"; the traceback is in {FAILURE_FILE}"
    except OSError:
        where = f": {error}"
    click.echo(f"pgcdc: unexpected {type(error).__name__}{where}", err=True)
    return 1
