"""Names of tables, as SQL writes them and as folders of the lake."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Self

from pgcdc_assets.errors import UsageError

_PART = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\W\d][\w$]*))\s*')
_ODD = re.compile(r"[/\\%~\[\]^|\x00-\x1f\x7f]")
_PLAIN = re.compile(r"[a-z_][a-z0-9_$]*")


@dataclass(frozen=True, order=True)
class TableName:
    """A table's schema and name, verbatim (unquoted)."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an SQL identifier: ``t``, ``public.t``, ``"Odd Schema"."Select"``; unqualified means public."""
        parts: list[str] = []
        at = 0
        while True:
            match = _PART.match(text, at)
            if match is None:
                raise UsageError(f'{text!r} is not a table name; write t, schema.t or "Odd Schema"."Select"')
            parts.append(match[1].replace('""', '"') if match[1] is not None else match[2].lower())
            at = match.end()
            if at == len(text):
                break
            if text[at] != "." or len(parts) == 2:
                raise UsageError(f'{text!r} is not a table name; write t, schema.t or "Odd Schema"."Select"')
            at += 1
        return cls(*parts) if len(parts) == 2 else cls("public", parts[0])

    def __str__(self) -> str:
        return f"{_in_sql(self.schema)}.{_in_sql(self.name)}"

    @property
    def shell(self) -> str:
        """The name quoted for a shell, for the commands that errors advise."""
        return shlex.quote(str(self))

    @property
    def folder(self) -> str:
        """Relative folder in the lake: ``<schema>/<table>``. No two names have the same folder."""
        return f"{encoded(self.schema)}/{encoded(self.name)}"


def quoted(name: str) -> str:
    """The name as a quoted identifier. PostgreSQL, DataFusion and DuckDB have the same syntax."""
    return '"' + name.replace('"', '""') + '"'


def _in_sql(part: str) -> str:
    return part if _PLAIN.fullmatch(part) else quoted(part)


def encoded(part: str) -> str:
    """The folder name for a schema or table. A character that a file system, the lake's layout or an engine would
    misread is written as ``~`` and two hex digits.

    These characters are ``/``, ``%``, ``\\``, ``[``, ``]``, ``^``, ``|``, control characters, and ``~`` itself, because
    a code begins with it. delta-rs does not find a folder with one of the others in its path, not even if ``/`` is
    written as ``%2F``.

    The names ``.``, ``..`` and ``_delta_log``, and all names that begin with ``_pgcdc``, have another meaning as
    folders. The first character of such a name is also written as ``~`` and two hex digits. For example, a folder
    ``_delta_log`` would turn the schema's folder into a Delta table.
    """
    text = _ODD.sub(lambda match: f"~{ord(match[0]):02X}", part)
    if text in (".", "..", "_delta_log") or text.startswith("_pgcdc"):
        return f"~{ord(text[0]):02X}{text[1:]}"
    return text


def decoded(folder: str) -> str:
    """The inverse of :func:`encoded`."""
    return re.sub(r"~([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), folder)


def nearest(name: str, tables: Iterable[TableName]) -> TableName | None:
    """The table whose name, without its schema, is most similar to a mistyped ``name``; None if no name is similar."""
    by_name = {table.name: table for table in tables}
    close = get_close_matches(name, by_name, 1)
    return by_name[close[0]] if close else None
