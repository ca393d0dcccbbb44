"""A problem, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Problem:
    """A problem: the thing that has it, what is wrong, and what to do. An ``error`` means that the lake does not follow
    the source, or that the source is at risk."""

    severity: Severity
    thing: str
    what: str
    do: str


def error(thing: str, what: str, do: str) -> Problem:
    return Problem("error", thing, what, do)


def warning(thing: str, what: str, do: str) -> Problem:
    return Problem("warning", thing, what, do)


def size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
