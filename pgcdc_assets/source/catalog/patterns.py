"""Decides which tables the setting ``tables`` selects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import SettingsError

_PART = re.compile(r'"(?:[^"]|"")+"|[^".\s][^".]*')


@dataclass(frozen=True)
class TablePatterns:
    """Patterns of the form ``schema.table`` with ``*`` and ``?``. A pattern that begins with ``-`` excludes tables.

    A name without a schema is in the schema public. A table is selected if no exclusion matches it and some inclusion
    does, or if there are no inclusions. Names are compared with the names in the catalog, including their case. A part
    in double quotes is taken literally.
    """

    included: tuple[re.Pattern[str], ...] = ()
    excluded: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def parse(cls, patterns: Sequence[str]) -> Self:
        wanted = tuple(_compiled(text) for text in patterns if not text.startswith("-"))
        unwanted = tuple(_compiled(text[1:]) for text in patterns if text.startswith("-"))
        return cls(wanted, unwanted)

    def match(self, table: TableName) -> bool:
        key = f"{table.schema}\0{table.name}"
        if any(pattern.fullmatch(key) for pattern in self.excluded):
            return False
        return not self.included or any(pattern.fullmatch(key) for pattern in self.included)

    def names(self, table: TableName) -> bool:
        """Whether an inclusion selects this table. False if it is selected only because there are no inclusions."""
        return bool(self.included) and self.match(table)


def _compiled(text: str) -> re.Pattern[str]:
    parts = _PART.findall(text.strip())
    if not 1 <= len(parts) <= 2 or ".".join(parts) != text.strip():
        raise SettingsError(f"{text!r} is not a pattern; write schema.table, public.*, or -public.audit_*",
                            thing="setting `tables`")  # fmt: skip
    schema, name = parts if len(parts) == 2 else ("public", parts[0])
    return re.compile(f"{_part(schema)}\0{_part(name)}", re.DOTALL)


def _part(text: str) -> str:
    if text.startswith('"'):
        return re.escape(text[1:-1].replace('""', '"'))
    return "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in text)
