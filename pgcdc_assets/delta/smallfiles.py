"""Finds small files of a table that are worth writing as one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

File = TypeVar("File")


def neighbours(
    files: Iterable[File], weight: Callable[[File], int], *, largest: int, full: int, fewest: int = 2
) -> Iterator[list[File]]:
    """Groups of the files in their order; each group becomes one file of at most ``full``.

    Files of ``largest`` and more are left alone. The last group, which may still grow, has at least ``fewest`` files.
    """
    group: list[File] = []
    size = 0
    for file in files:
        more = weight(file)
        if more >= largest:
            continue
        if size + more > full:
            if len(group) > 1:
                yield group
            group, size = [], 0
        group.append(file)
        size += more
    if len(group) >= fewest:
        yield group
