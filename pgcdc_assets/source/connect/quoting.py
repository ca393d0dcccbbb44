"""Quotes names and values in commands."""

from __future__ import annotations


def identifier(name: str) -> str:
    """The name, quoted for the replication grammar and for publication_names alike."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """The text as a literal with doubled quotes: the replication grammar knows no other escape (so not libpq's
    E'...')."""
    return "'" + value.replace("'", "''") + "'"
