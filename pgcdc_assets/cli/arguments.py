"""Arguments that several commands take, and the help of the commands: all commands by topic, each with a whole sentence
and an example. With the option ``--component``, a command takes its settings from a component of a Dagster project."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem
from pydantic import ValidationError

from pgcdc_assets import logs
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import PgcdcError, SettingsError
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import PREFIX, Settings

T = TypeVar("T")
LOG_FORMAT = "--log-format"
_COMPONENT = "pgcdc.component"


class Parsed(click.ParamType[T]):
    """The type of an argument that ``parse`` turns into a ``kind``. It raises ValueError or PgcdcError for a wrong
    text."""

    def __init__(self, name: str, kind: type[T] | tuple[type[T], ...], parse: Callable[[str], T]) -> None:
        self.name = name
        self._kind = kind
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            return value if isinstance(value, self._kind) else self._parse(value)
        except (ValueError, PgcdcError) as error:
            self.fail(str(error), param, ctx)


class _TableType(Parsed[TableName]):
    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The tables of the saved catalog, for a shell that completes a command."""
        with suppress(PgcdcError, OSError):
            catalog = load_catalog(Settings.load().catalog_file)
            names = [str(table.name) for table in catalog.tables] if catalog is not None else []
            return [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return []


def _point(text: str) -> Lsn | datetime:
    """An LSN, or a time. A time without a zone is local time."""
    try:
        return Lsn.parse(text) if "/" in text else datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise ValueError(f"{text!r} is neither an LSN like 0/16B3748 nor a time like 2026-11-27T14:00") from None


LSN: Final = Parsed("LSN", Lsn, Lsn.parse)
RANGE: Final = Parsed("RANGE", LsnRange, LsnRange.parse)
TABLE: Final = _TableType("TABLE", TableName, TableName.parse)
POINT: Final = Parsed[Lsn | datetime]("LSN|TIME", (Lsn, datetime), _point)

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
with_yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def confirm(verb: str, what: str) -> None:
    """Ask whether to do it, and abort the command if not. Without a terminal, refuses the command."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"no terminal to ask for confirmation: use --yes to {verb} {what}")
    click.confirm(f"{verb.capitalize()} {what}?", abort=True, err=True)


def use_log_format(value: str) -> None:
    """Write log lines in this format, also in child processes."""
    os.environ[logs.VARIABLE] = value
    logs.begin(as_json=value == logs.JSON)


def log_format() -> click.Option:
    """The option ``--log-format``, which every command has."""

    def keep(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.meta[LOG_FORMAT] = value
            use_log_format(value)

    return click.Option(
        [LOG_FORMAT], type=click.Choice([logs.TEXT, logs.JSON]), expose_value=False, is_eager=True, callback=keep,
        help="The format of the lines on stderr.",
    )  # fmt: skip


def of_component(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    """Set the variables ``PGCDC_...`` to the component's settings, for this process and the processes that it starts.
    Such variables of the shell are ignored. ``name``: the component's folder below ``defs``. Raises SettingsError if
    the working directory is not in a Dagster project, or if the component cannot be loaded."""
    if name is not None:
        # Load the component before any variable is changed, because its file may refer to one of these variables, for
        # example by `source: "{{ env.PGCDC_SOURCE }}"`.
        given = _settings(name)
        for field in Settings.model_fields:
            os.environ.pop(PREFIX + field.upper(), None)
        os.environ.update({PREFIX + field.upper(): _text(value) for field, value in given.items()})
        context.meta[_COMPONENT] = name
        if asked := context.meta.get(LOG_FORMAT) or given.get("log_format"):
            use_log_format(asked)
    return name


def is_component() -> bool:
    """Whether the running command was given a component."""
    context = click.get_current_context(silent=True)
    return context is not None and _COMPONENT in context.meta


def _settings(name: str) -> dict[str, Any]:
    import dagster as dg

    from pgcdc_assets.defs.pipeline import PgcdcComponent

    try:
        tree = dg.ComponentTree.for_project(Path.cwd())
        found = tree.load_component(name, PgcdcComponent)
    except Exception as error:  # noqa: BLE001
        # Dagster imports the project's modules here, so any exception is possible.
        raise SettingsError(
            f"cannot be loaded: {_cause(error)}",
            thing=f"component {name}",
            do="run the command in the Dagster project, give the component's folder below `defs` as NAME, and set the "
            "environment variables that its file reads",
        ) from None
    root = tree.project_root
    own = {"name": found.name, "source": found.source, "lake": found.lake_of(root), "state": found.state_of(root)}
    return {**found.settings, **own, "tables": found.tables}


def _cause(error: BaseException) -> str:
    """The error at which the chain of causes begins, in one line. For a wrong attribute, its value is left out,
    because it may be a password."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"attribute `{'.'.join(map(str, first['loc']))}`: {first['msg']}"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _text(value: Any) -> str:
    """The value as text, as an environment variable holds it: lists and maps as JSON."""
    return str(value) if isinstance(value, (str, Path)) else json.dumps(value)


class CommandGroup(click.Group):
    """A group that lists its commands under topics."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.topics: dict[str, list[str]] = {}

    def add_topic(self, title: str, commands: Sequence[click.Command]) -> None:
        for command in commands:
            command.params.append(log_format())
            self.add_command(command)
        self.topics[title] = [str(command.name) for command in commands]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.topics.items():
            with formatter.section(title):
                # The limit is high, so that the whole first sentence of each command is shown.
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=1000)) for name in names])


def examples(*lines: str) -> str:
    """The end of a command's help: examples as a user types them."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    # \b keeps click from joining the lines.
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])
