"""Selects the logical messages that the setting ``messages`` asks for, by their prefixes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_VERBATIM = re.compile(r'"((?:[^"]|"")+)"')


@dataclass(frozen=True)
class PrefixPatterns:
    """Patterns for whole prefixes, with ``*`` and ``?``, like the patterns for tables. A leading ``-`` excludes. A
    pattern in double quotes is taken verbatim.

    A prefix is chosen if an inclusion matches it and no exclusion does. Without any pattern no prefix is chosen.
    """

    included: tuple[re.Pattern[str], ...] = ()
    excluded: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def parse(cls, patterns: Sequence[str]) -> Self:
        """Raises ValueError, with a message for the user, for an invalid pattern, or if there are only exclusions."""
        wanted = tuple(_compiled(text, text) for text in patterns if not text.startswith("-"))
        unwanted = tuple(_compiled(text[1:], text) for text in patterns if text.startswith("-"))
        if unwanted and not wanted:
            raise ValueError('excludes prefixes and includes none; write it like ["*", "-debug.*"]')
        return cls(wanted, unwanted)

    def match(self, prefix: str) -> bool:
        if any(pattern.fullmatch(prefix) for pattern in self.excluded):
            return False
        return any(pattern.fullmatch(prefix) for pattern in self.included)


def _compiled(text: str, given: str) -> re.Pattern[str]:
    if verbatim := _VERBATIM.fullmatch(text):
        return re.compile(re.escape(verbatim[1].replace('""', '"')))
    if not text or text != text.strip() or '"' in text or "\0" in text:
        raise ValueError(f'{given!r} is not a pattern; write outbox.*, app, -outbox.debug, or "verbatim"')
    body = "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in text)
    return re.compile(body, re.DOTALL)
