"""Finds out which columns a Relation message lists, if the table's structure has changed since the table was copied.

A Relation message gives the name and type of each column, but not its attnum. The catalog is read after the message was
written, so names prove nothing: a column may have had any name for a time, even the name of a dropped column. But the
message lists its columns by ascending attnum, and PostgreSQL assigns each attnum only once, in ascending order. So the
attnums are found by the order and the types of the columns. The message is used only if there is exactly one way to
assign attnums to its columns. Two rules leave one way for most messages:

- a column that the copy had, and that the catalog still had when it was read for the message, is in the message;
- if the message has a column that was added later than a column that the catalog still had, the message has this
  earlier column too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pgcdc_assets.core.catalog import Lineage, PgType, Table
from pgcdc_assets.protocol.shape import Shape, ShapeColumn
from pgcdc_assets.structure.successor import keeps_text

Alignment = tuple[int | None, ...]
"""The attnum of each column of a message, in the order of the message; None for a column that was dropped."""


def aligned(table: Table, shape: Shape) -> Alignment | None:
    """The attnums of the columns of the message ``shape``; None if there is not exactly one way to assign them. For a
    leaf, the shape must have the attnums of the root."""
    lineage = table.descent
    candidates = _candidates(table, lineage, shape)
    ways = _ways(shape.columns, candidates)
    return ways[0] if len(ways) == 1 else None


@dataclass
class _Candidate:
    """A column that the message may have. If no catalog check has ever shown it, ``types`` is empty, and it may have
    had any type."""

    attnum: int | None
    """None for a column that was dropped: its values are read and ignored."""
    types: list[PgType] = field(default_factory=list)
    must: bool = False
    """Whether the message certainly has this column."""
    before_others: bool = False
    """Whether the message must have this column if it has any later column."""

    def fits(self, column: ShapeColumn) -> bool:
        """Whether the column may have had this type when the message was written. ALTER TABLE can change a type without
        a rewrite of the table if all values keep their text."""
        told = column.type
        return not self.types or any(keeps_text(known, told) or keeps_text(told, known) for known in self.types)


def _candidates(table: Table, lineage: Lineage, shape: Shape) -> list[_Candidate]:
    """The columns that the message may have, in ascending order of attnum."""
    now = {column.attnum for column in table.columns}
    found: dict[int, _Candidate] = {}
    for column in (*table.columns, *lineage.former):
        attnum = column.attnum if column.attnum in now else None
        found.setdefault(column.attnum, _Candidate(attnum)).types.append(column.type)
    for attnum in shape.attnums - found.keys():
        if attnum > lineage.copied:
            found[attnum] = _Candidate(None if _gone(table, attnum) else attnum)
    highest = max((*found, *table.live, *shape.live), default=0)
    unseen = set(range(lineage.copied + 1, highest)) - found.keys() - set(table.live) - shape.live
    for attnum, one in found.items():
        one.must = attnum in shape.live and attnum <= lineage.copied
        one.before_others = attnum in shape.live
    found |= {attnum: _Candidate(None) for attnum in unseen}
    # Columns that were added last, and dropped before the next catalog check, have left no trace in the catalog. So
    # each of the message's last columns may be such a column.
    last = [_Candidate(None) for _ in shape.columns]
    return [*(found[attnum] for attnum in sorted(found)), *last]


def _gone(table: Table, attnum: int) -> bool:
    """Whether the column was added and dropped before the catalog check that showed the table."""
    return bool(table.live) and attnum <= table.highest_attnum and attnum not in table.live


def _ways(columns: Sequence[ShapeColumn], candidates: Sequence[_Candidate]) -> list[Alignment]:
    """The ways to assign attnums to the columns; at most two, because a second way already makes the message unusable.
    Ways that differ only in dropped columns count as one. The search takes the candidates in turn. It assigns each
    candidate to the next column of the message, or leaves the candidate out."""
    needed = max((place for place, one in enumerate(candidates) if one.must), default=-1)
    ways: list[list[Alignment]] = [[()], *([] for _ in columns)]
    ended: list[Alignment] = []
    for place, one in enumerate(candidates):
        if one.before_others and place > needed:
            # If the message lacks this candidate, it has no later column either.
            ended += ways[len(columns)]
        taken: list[list[Alignment]] = [[], *([] for _ in columns)]
        for count, column in enumerate(columns):
            if ways[count] and one.fits(column):
                taken[count + 1] = [(*way, one.attnum) for way in ways[count]]
        if not one.before_others:
            taken = [_two(new + old) if new and old else new or old for new, old in zip(taken, ways, strict=True)]
        ways = taken
    return _two(ended + ways[len(columns)])


def _two(ways: Iterable[Alignment]) -> list[Alignment]:
    return list(dict.fromkeys(ways))[:2]
