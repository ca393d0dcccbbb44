"""Which tables the setting ``tables`` means."""

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
    """``schema.table`` with ``*`` and ``?``; a leading ``-`` excludes. A bare name means public.

    A table is meant if no exclusion matches it, and an inclusion does or there is no inclusion. Names are compared as
    they are written in the catalog; a part in double quotes is taken verbatim.
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
        """Whether an inclusion asks for this table, not merely the lack of one."""
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
