"""Finds which columns of a table a Relation message means, if the table's structure has changed since its copy.

A message names columns by name and type alone, and the catalog that is asked about it may be newer. Names prove
nothing then: a column may have had any name for a while, also that of one that was dropped. But a message lists its
columns in ascending order of attnum, and PostgreSQL gives attnums out in ascending order, and none twice. So columns
are told by their order and types, and a message is understood only if there is one way to read it. Two rules leave most
messages with one:

- a column that the copy knew, and that the catalog still had when it was asked, was there in between;
- so was a column that the catalog still had, if the message has one that was added after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pgcdc_assets.core.catalog import Lineage, PgType, Table
from pgcdc_assets.protocol.shape import Shape, ShapeColumn
from pgcdc_assets.structure.casts import keeps_text

Alignment = tuple[int | None, ...]
"""The attnum of each column of a message, in the message's order; None for a column that is gone."""


def aligned(table: Table, shape: Shape) -> Alignment | None:
    """The one way to read a message of the table itself, or of a leaf under the table's attnums; None if there is none,
    or more than one."""
    lineage = table.descent
    candidates = _candidates(table, lineage, shape)
    ways = _ways(shape.columns, candidates)
    return ways[0] if len(ways) == 1 else None


@dataclass
class _Candidate:
    """A column that the message may have. One without a type came unseen, and may have had any."""

    attnum: int | None
    """None for one that is gone: whatever way it is read, nobody takes its values."""
    types: list[PgType] = field(default_factory=list)
    must: bool = False
    """The message has it for certain."""
    before_others: bool = False
    """The message has it if it has a later one."""

    def fits(self, column: ShapeColumn) -> bool:
        return not self.types or any(_alike(known, column.type) for known in self.types)


def _alike(known: PgType, told: PgType) -> bool:
    """Whether a column may have had both types, one after the other, and no rewrite of the table in between."""
    return keeps_text(known, told) or keeps_text(told, known)


def _candidates(table: Table, lineage: Lineage, shape: Shape) -> list[_Candidate]:
    """In ascending order of attnum."""
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
    # Columns that were added last, and dropped before anybody looked, have left no trace.
    last = [_Candidate(None) for _ in shape.columns]
    return [*(found[attnum] for attnum in sorted(found)), *last]


def _gone(table: Table, attnum: int) -> bool:
    """Whether a column came and went before the look that showed the table."""
    return bool(table.live) and attnum <= table.highest_attnum and attnum not in table.live


def _ways(columns: Sequence[ShapeColumn], candidates: Sequence[_Candidate]) -> list[Alignment]:
    """The ways to read the columns, different in what they say of known attnums; two at most.

    By place in the candidates and number of columns taken so far: each step takes a candidate, or leaves it out.
    """
    needed = max((place for place, one in enumerate(candidates) if one.must), default=-1)
    ways: list[list[Alignment]] = [[()], *([] for _ in columns)]
    ended: list[Alignment] = []
    for place, one in enumerate(candidates):
        if one.before_others and place > needed:
            # Left out here, nothing later is in the message.
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
