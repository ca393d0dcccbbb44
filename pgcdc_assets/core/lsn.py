"""WAL positions."""

from __future__ import annotations

import re
from typing import Self

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


class Lsn(int):
    """A 64-bit WAL position: an integer that prints as PostgreSQL prints it (``16/B374D848``).

    Comparisons, and conversions to numpy or Arrow, work as for the integer. ``f"{lsn:012X}"`` gives the form of
    partition keys.
    """

    __slots__ = ()

    def __new__(cls, value: int = 0) -> Self:
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{value} is not a 64-bit WAL position")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``X/Y``; raises ValueError for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not an LSN; it is written X/Y in hexadecimal, like 16/B374D848")
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({self})"

    def __format__(self, spec: str) -> str:
        return int(self).__format__(spec) if spec else str(self)


ZERO = Lsn(0)
"""InvalidXLogRecPtr: no position."""
