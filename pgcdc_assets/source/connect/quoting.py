"""How names and values are written in a command, and what pgoutput is told in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def plugin_options(publications: Sequence[str], more: Mapping[str, str], *, proto: int = 1) -> dict[str, str]:
    """What pgoutput is told, by START_REPLICATION or by the SQL functions."""
    names = ",".join(identifier(name) for name in publications)
    return {"proto_version": str(proto), "publication_names": names, **more}


def identifier(name: str) -> str:
    """Quoted for the replication grammar and for publication_names alike."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """The replication grammar knows no escape but the doubled quote (so not libpq's E'...')."""
    return "'" + value.replace("'", "''") + "'"
