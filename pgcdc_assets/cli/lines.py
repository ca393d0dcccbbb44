"""What commands say, line by line: names come from the source, and may hold any character."""

from __future__ import annotations

import click


def visible(text: str) -> str:
    r"""On one line: control characters, and those that turn a line's direction, as ``\n``, ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def say(text: str, *, err: bool = False) -> None:
    """One line of a command's result, or with ``err`` of its remarks."""
    click.echo(visible(text), err=err)
