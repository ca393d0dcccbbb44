"""Quotes names and values in commands."""

from __future__ import annotations


def identifier(name: str) -> str:
    """Quotes a name, both for the replication grammar and for publication_names."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Quotes a text as a literal, with doubled quotes. The replication grammar has no other escape, such as libpq's
    E'...'."""
    return "'" + value.replace("'", "''") + "'"
