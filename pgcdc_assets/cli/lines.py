"""Writes the output of commands, line by line. Control characters are made visible, because names come from the source
and may contain any character."""

from __future__ import annotations

import click


def visible(text: str) -> str:
    r"""The text on one line. Control characters, and characters that change the direction of text, are written as
    escapes, like ``\n`` and ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def say(text: str, *, err: bool = False) -> None:
    """Write one line to stdout, or with ``err`` to stderr."""
    click.echo(visible(text), err=err)
