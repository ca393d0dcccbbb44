"""Quotes names and values in commands, and holds the options of pgoutput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def plugin_options(publications: Sequence[str], more: Mapping[str, str], *, proto: int = 1) -> dict[str, str]:
    """The options of pgoutput, for START_REPLICATION and for the SQL functions."""
    names = ",".join(identifier(name) for name in publications)
    return {"proto_version": str(proto), "publication_names": names, **more}


def identifier(name: str) -> str:
    """The name, quoted for the replication grammar and for publication_names alike."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """The text as a literal with doubled quotes: the replication grammar knows no other escape (so not libpq's
    E'...')."""
    return "'" + value.replace("'", "''") + "'"
