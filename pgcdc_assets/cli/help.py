"""The help of the commands: all commands by topic, each with a whole sentence, and an example for each command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from pgcdc_assets.cli.arguments import log_format


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
                formatter.write_dl([(name, _summary(self.commands[name])) for name in names])


def _summary(command: click.Command) -> str:
    """The first sentence of the command's help, however long it is."""
    return command.get_short_help_str(limit=1000)


def examples(*lines: str) -> str:
    """The end of a command's help: examples as a user types them."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    # \b keeps click from joining the lines.
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])
