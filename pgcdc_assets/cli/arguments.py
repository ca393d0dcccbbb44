"""Arguments that several commands take, and the help of the commands: all commands by topic, each with a whole sentence
and an example."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import click
from click.shell_completion import CompletionItem

from pgcdc_assets import logs
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import BadRange, PgcdcError, UsageError
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings

LOG_FORMAT = "--log-format"


class LsnType(click.ParamType["Lsn"]):
    name = "LSN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lsn:
        try:
            return value if isinstance(value, Lsn) else Lsn.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class PointType(click.ParamType["Lsn | datetime"]):
    """An LSN, or a time. A time without a zone is local time."""

    name = "LSN|TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lsn | datetime:
        if isinstance(value, Lsn | datetime):
            return value
        try:
            return Lsn.parse(value) if "/" in value else datetime.fromisoformat(value).astimezone()
        except ValueError:
            self.fail(f"{value!r} is neither an LSN like 0/16B3748 nor a time like 2026-11-27T14:00", param, ctx)


class TableType(click.ParamType["TableName"]):
    name = "TABLE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TableName:
        try:
            return value if isinstance(value, TableName) else TableName.parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The tables of the saved catalog, for a shell that completes a command."""
        with suppress(PgcdcError, OSError):
            catalog = load_catalog(Settings.load().catalog_file)
            names = [str(table.name) for table in catalog.tables] if catalog is not None else []
            return [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return []


class RangeType(click.ParamType["LsnRange"]):
    name = "RANGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> LsnRange:
        try:
            return value if isinstance(value, LsnRange) else LsnRange.parse(value)
        except BadRange as error:
            self.fail(str(error), param, ctx)


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


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
