"""The command ``pgcdc``. It writes results to stdout, and progress and errors to stderr. Commands import what they need
when they run, so that help and ``status`` are fast.

Exit codes: 0 success; 1 failure, or a difference or fault was found; 2 wrong usage or settings; 3 the run succeeded,
but some tables are left behind or could not be compared.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise

import click

from pgcdc_assets import logs, projectfile
from pgcdc_assets.cli.arguments import LOG_FORMAT, CommandGroup, examples, log_format, of_component
from pgcdc_assets.cli.console import say, visible
from pgcdc_assets.cli.demo import demo
from pgcdc_assets.cli.maintenance import forget, maintain
from pgcdc_assets.cli.metrics import metrics
from pgcdc_assets.cli.source import setup, teardown
from pgcdc_assets.cli.sql import sql
from pgcdc_assets.cli.status_verify import positions, status, verify
from pgcdc_assets.cli.sync import follow, heal, pause, repair, resume, snapshot, sync, until
from pgcdc_assets.cli.up import code_server, pack, up
from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.errors import PgcdcError, SettingsError
from pgcdc_assets.settings import STATE_FOLDER, unknown_variables
from pgcdc_assets.store.localfiles import private_log

FAILURE_FILE = STATE_FOLDER / "failure.txt"
_INTERRUPTED = "interrupted; nothing is half done, and the next run continues where this one stopped"


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
             epilog=examples("pgcdc demo", "pgcdc sync --help"), params=[log_format()])  # fmt: skip
@click.version_option(version("pgcdc_assets"), prog_name="pgcdc")
@click.option(
    "--component", metavar="NAME", callback=of_component, expose_value=False, is_eager=True,
    help="Take the settings from this component of the Dagster project in the working directory.",
)  # fmt: skip
def pgcdc() -> None:
    """Keeps Delta Lake tables exactly equal to a PostgreSQL database.

    The working directory is the project directory. Settings are PGCDC_... variables, which take precedence, and lines
    of pgcdc.yaml. The lake is in ./lake by default. The source `embedded` is a PostgreSQL with a sample shop.
    """


TOPICS = {
    "Start and end": (demo, setup, teardown),
    "Follow": (sync, follow, until, pause, resume),
    "Check": (status, positions, verify, metrics),
    "Read": (sql,),
    "Repair": (snapshot, heal, repair),
    "Delete old data": (maintain, forget),
    "Dagster and clusters": (up, code_server, pack),
}

for title, commands in TOPICS.items():
    pgcdc.add_topic(title, commands)


def main() -> None:
    """The entry point of the installed command. After a signal that asks the process to end, exits without waiting for
    other threads."""
    ENDING.own()
    with ENDING.at_once():
        code = run(sys.argv[1:])
    if ENDING.asked:
        # Exit without waiting for threads, and without the exit handlers of libraries.
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command. Returns the exit code, and raises no exception."""
    logs.begin(as_json=_log_format(arguments) == logs.JSON)
    for line in unknown_variables():
        say(f"pgcdc: {line}", err=True)
    try:
        return int(pgcdc.main(list(arguments), prog_name="pgcdc", standalone_mode=False) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort as end:
        interrupted = isinstance(end.__cause__, KeyboardInterrupt)
        say(f"pgcdc: {_INTERRUPTED if interrupted else 'nothing was done'}", err=True)
        return 1
    except click.ClickException as error:
        if logs.as_json():
            say(f"error: {error.format_message()}", err=True)
        else:
            error.show()
        return 2
    except PgcdcError as error:
        if logs.as_json():
            say(f"error: {error}", err=True, **error.to_plain(), docs=error.docs)
        else:
            told = "\n".join(visible(line) for line in error.told)
            click.echo(f"pgcdc: {told}\nSee {error.docs}", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        say(f"pgcdc: {_INTERRUPTED}", err=True)
        return 1
    except BrokenPipeError:
        # The reader of our output has closed the pipe. Without this, Python would print an error when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001  (prints one line; the traceback goes to a file)
        if ENDING.asked:
            # A library may have turned the interruption into any error.
            say(f"pgcdc: {_INTERRUPTED}", err=True)
            return 1
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """Report an unexpected error. Message and traceback go only to the file, because they may quote secret data. The
    file keeps earlier failures."""
    where = ""
    try:
        with private_log(FAILURE_FILE) as file:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            file.write("".join([f"{now}\n", *traceback.format_exception(error), "\n"]).encode())
        where = f"; the traceback is in {FAILURE_FILE}"
    except OSError:
        where = f": {error}"
    say(f"error: unexpected {type(error).__name__}{where}" if logs.as_json()
        else f"pgcdc: unexpected {type(error).__name__}{where}", err=True)  # fmt: skip
    return 1


def _log_format(arguments: Sequence[str]) -> str | None:
    """The format of log lines. It is found before click parses the arguments, so that errors in arguments and settings
    have this format, too. Wrong formats are reported elsewhere."""
    for argument, after in pairwise([*arguments, ""]):
        name, _, value = argument.partition("=")
        if name == LOG_FORMAT:
            return value or after
    with suppress(SettingsError):
        return os.environ.get(logs.VARIABLE) or projectfile.content().get("log_format")
    return None
