"""Writes the output of commands, line by line: names come from the source, and may hold any character."""

from __future__ import annotations

import click


def visible(text: str) -> str:
    r"""The text on one line: control characters, and those that turn a line's direction, become ``\n``, ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def say(text: str, *, err: bool = False) -> None:
    """Write one line of a command's result or, with ``err``, of its remarks."""
    click.echo(visible(text), err=err)
