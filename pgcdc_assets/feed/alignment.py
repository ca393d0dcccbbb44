"""Finds which columns of a table a Relation message means, if the table's structure has changed since its copy.

A message names columns by name and type alone, in ascending order of attnum, and the catalog that is asked about it may
be newer. So columns are told by their order: PostgreSQL gives attnums out in ascending order, and none twice. A message
is understood only if there is one way to read it. Two rules leave most messages with one:

- a column that the copy knew, and that the catalog still had when it was asked, was there in between;
- so was a column that the catalog still had, if the message has one that was added after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pgcdc_assets.core.catalog import Column, Lineage, PgType, Table
from pgcdc_assets.protocol.shape import Shape, ShapeColumn

Alignment = tuple[int | None, ...]
"""The attnum of each column of a message, in the message's order; None for a column that is gone."""


def aligned(table: Table, shape: Shape) -> Alignment | None:
    """The one way to read a message of the table itself (not of a leaf); None if there is none, or more than one."""
    lineage = table.lineage or Lineage(0, table.highest_attnum, 0)
    candidates = _candidates(table, lineage, shape)
    ways = _ways(shape.columns, candidates)
    return ways[0] if len(ways) == 1 else None


@dataclass
class _Candidate:
    """A column that the message may have. One without a label came and went unseen, and may have had any name."""

    attnum: int | None
    names: set[str] = field(default_factory=set)
    types: set[tuple[int, int]] = field(default_factory=set)
    must: bool = False
    """The message has it for certain."""
    before_others: bool = False
    """The message has it if it has a later one."""

    def fits(self, column: ShapeColumn) -> bool:
        return not self.names or (column.name in self.names and same_type(column.type) in self.types)

    def label(self, name: str, type_: PgType) -> None:
        self.names.add(name)
        self.types.add(same_type(type_))


def same_type(type_: PgType) -> tuple[int, int]:
    """What tells a type from others; its name may change."""
    return type_.oid, type_.typmod


def _candidates(table: Table, lineage: Lineage, shape: Shape) -> list[_Candidate]:
    """In ascending order of attnum."""
    found: dict[int, _Candidate] = {}
    for attnum, name, type_ in _labels([*table.columns, *lineage.former], shape):
        found.setdefault(attnum, _Candidate(attnum)).label(name, type_)
    highest = max((*found, *table.live, *shape.live), default=0)
    unseen = set(range(lineage.copied + 1, highest)) - found.keys() - set(table.live) - shape.live
    for attnum, one in found.items():
        one.must = attnum in shape.live and attnum <= lineage.copied
        one.before_others = attnum in shape.live
    found |= {attnum: _Candidate(None) for attnum in unseen}
    for attnum in {column.attnum for column in lineage.former} - {column.attnum for column in table.columns}:
        # Whatever way such a column is read, nobody takes its values.
        found[attnum].attnum = None
    # Columns that were added last, and dropped before anybody looked, have left no trace.
    last = [_Candidate(None) for _ in shape.columns]
    return [*(found[attnum] for attnum in sorted(found)), *last]


def _labels(known: Iterable[Column], shape: Shape) -> Iterable[tuple[int, str, PgType]]:
    yield from ((column.attnum, column.name, column.type) for column in known)
    for column in shape.columns:
        if column.attnum is not None:
            yield column.attnum, column.name, column.type


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
        for count in range(len(columns) + 1):
            left_out = [] if one.before_others else ways[count]
            taken[count] = _two(taken[count] + left_out)
        ways = taken
    return _two(ended + ways[len(columns)])


def _two(ways: Iterable[Alignment]) -> list[Alignment]:
    return list(dict.fromkeys(ways))[:2]
