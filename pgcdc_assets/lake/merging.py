"""The merge of a net effect into a mirror's files: which of their rows go, and which rows come.

Nothing is rewritten: rows that go are named by file and position, for a deletion vector, and those that
come, changed ones among them, make one new file. What the target must hold is checked on the way: a row
that changes must be there, a row that arrives must not. Where the mirror disagrees nothing is committed,
so that a mirror that differs from its source is never written over.

Arrow and numpy alone. Imported by Spark's workers: no Spark, no Delta.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.lake.collapse import MASK, ORIGIN, PRESENT, UPSERT, key_numbers, map_keys, raw_maps, raw_texts
from pgcdc_assets.lake.feed import HASH, LEAF, OP, RAW, ROW, FeedColumn
from pgcdc_assets.lake.keyindex import KeyIndex
from pgcdc_assets.lake.multiset import COUNT, NetRows
from pgcdc_assets.lake.neteffect import Bools, Ints
from pgcdc_assets.lake.targets import RowGroup, Target, Wanted, wanted

LACKS = "the mirror lacks a row that the source changed"
HOLDS = "the mirror holds a row that the source inserted"
TWICE = "the mirror holds a row twice"


@dataclass(frozen=True)
class Merged:
    """What a merge does to a mirror; counts are rows."""

    rows: pa.Table
    """Those that come, under feed names."""
    gone: dict[str, BitMap64]
    """By file, the positions of the rows that go."""
    inserted: int
    updated: int
    deleted: int


def merge_keyed(
    target: Target, source: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int] = (),
    leaves: Sequence[str] = (),
) -> Merged:  # fmt: skip
    """Merge a source (:class:`pgcdc_assets.lake.collapse.Collapsed`) whose ``masked`` attnums may lack values.

    ``leaves`` are emptied: all their rows go. Raises MergeMismatch where the target does not hold what
    it must.
    """
    match = _Match(source, columns, masked)
    emptied = _Emptied(leaves)
    gone = _Gone()
    for group in target.groups({} if leaves else match.wanted) if leaves or source.num_rows else ():
        left = emptied.of(group)
        at = match.take(group, left)
        gone.add(group, at, np.flatnonzero(left))
    match.check()
    live = match.live
    changed = int((live & (match.hits > 0)).sum())
    return Merged(
        rows=match.filled().filter(pa.array(live)),
        gone=gone.positions,
        inserted=int(live.sum()) - changed,
        updated=changed,
        deleted=gone.count - changed,
    )


def merge_multiset(target: Target, net: NetRows, columns: Sequence[FeedColumn], leaves: Sequence[str] = ()) -> Merged:
    """Take as many copies of each removed row away as it says; one that is not there raises MergeMismatch."""
    emptied = _Emptied(leaves)
    gone = _Gone()
    found = _Copies(net.removed, columns)
    if leaves or net.removed.num_rows:
        for group in target.groups({}):
            gone.add(group, np.flatnonzero(emptied.of(group)))
            found.look(group)
    for path, positions in found.chosen():
        gone.put(path, positions)
    return Merged(net.added, gone.positions, net.added.num_rows, 0, gone.count)


class _Gone:
    """Positions by file, each once."""

    def __init__(self) -> None:
        self.positions: dict[str, BitMap64] = defaultdict(BitMap64)

    @property
    def count(self) -> int:
        return sum(len(positions) for positions in self.positions.values())

    def add(self, group: RowGroup, *places: Ints) -> None:
        for at in places:
            if len(at):
                self.put(group.path, at + group.start)

    def put(self, path: str, positions: Ints) -> None:
        self.positions[path] |= BitMap64(positions.astype(np.uint64))


@dataclass(frozen=True)
class _Emptied:
    """Truncated leaves, by the value of ``_pgcdc_leaf``."""

    leaves: Sequence[str]

    def of(self, group: RowGroup) -> Bools:
        """The rows that they hold in the target."""
        if not self.leaves:
            return np.zeros(group.rows, dtype=bool)
        names = group.read([LEAF])[LEAF]
        held: Bools = pc.is_in(names, pa.array(list(self.leaves), names.type)).to_numpy(zero_copy_only=False)
        return held.astype(bool) & group.alive


class _Match:
    """A merge source against its target, one row group after the other."""

    def __init__(self, source: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int]) -> None:
        self._source = source.combine_chunks()
        keys = [column for column in columns if column.key]
        self._own = KeyIndex(self._source, keys)
        self._kept = [column for column in columns if column.attnum in masked]
        self._lacking = np.zeros(source.num_rows, dtype=bool)
        for column in self._kept:
            self._lacking |= _bools(source[f"{MASK}{column.attnum}"])
        # Rows whose masked values stand under the key that they had before.
        self._moved = np.flatnonzero(_bools(pc.is_valid(source[ORIGIN])))
        origins = self._source[ORIGIN].filter(pc.is_valid(self._source[ORIGIN])).combine_chunks()
        self._origins = pa.Table.from_struct_array(origins)
        self._from = KeyIndex(self._origins, keys)
        self._lacking_here = self._lacking.copy()
        self._lacking_here[self._moved] = False
        self._keys = keys
        self._donors: list[pa.Table] = []
        self._donor_rows: list[Ints] = []
        self.hits = np.zeros(source.num_rows, dtype=np.int64)
        """Per row of the source, how many rows of the target have its key;"""
        self._emptied_hits = np.zeros(source.num_rows, dtype=np.int64)
        """of which so many lie in a leaf that was truncated."""
        self.live: Bools = _bools(pc.equal(source[OP], UPSERT))

    @property
    def wanted(self) -> Wanted:
        both = pa.concat_tables([self._source.select(self._names), self._origins.select(self._names)])
        return wanted({name: both[name] for name in self._names})

    @property
    def _names(self) -> list[str]:
        return [column.name for column in self._keys]

    def take(self, group: RowGroup, emptied: Bools) -> Ints:
        """Match one row group; the positions in it that have a key of the source."""
        if not self._keys:
            return np.zeros(0, dtype=np.int64)
        keys = group.read(list(dict.fromkeys([*self._own.columns, *self._from.columns])))
        at, rows = _alive(group, *self._own.find(keys))
        self.hits += np.bincount(rows, minlength=len(self.hits))
        self._emptied_hits += np.bincount(rows[emptied[at]], minlength=len(self.hits))
        if self._kept:
            here = self._lacking_here[rows]
            moved_at, moved = _alive(group, *self._from.find(keys))
            self._give(group, np.concatenate((at[here], moved_at)), np.concatenate((rows[here], self._moved[moved])))
        return at

    def _give(self, group: RowGroup, at: Ints, rows: Ints) -> None:
        if len(at):
            values = group.read([*(column.name for column in self._kept), RAW])
            self._donors.append(values.take(pa.array(at)))
            self._donor_rows.append(rows)

    def check(self) -> None:
        """MergeMismatch where the target did not hold what it must, or held it twice."""
        present = self._source[PRESENT]
        must, must_not = _bools(pc.fill_null(present, False)), ~_bools(pc.fill_null(present, True))
        given = np.bincount(np.concatenate([*self._donor_rows, self._moved[:0]]), minlength=len(self.hits))
        if (must & (self.hits == 0)).any() or (self._lacking & (given == 0)).any():
            raise MergeMismatch(LACKS)
        if (must_not & (self.hits > self._emptied_hits)).any():
            raise MergeMismatch(HOLDS)
        if max(self.hits.max(initial=0), given.max(initial=0)) > 1:
            raise MergeMismatch(TWICE)

    def filled(self) -> pa.Table:
        """The source with every masked value, and its text, put in from the target's row."""
        if not self._donors:
            return self._source
        donors = pa.concat_tables(self._donors)
        places = np.concatenate(self._donor_rows)
        rows = self._source
        here = np.arange(rows.num_rows, dtype=np.int64)
        donor = np.zeros(rows.num_rows, dtype=np.int64)
        donor[places] = rows.num_rows + np.arange(len(places))
        takes: dict[str, Ints] = {}
        for column in self._kept:
            mask = _bools(rows[f"{MASK}{column.attnum}"])
            takes[column.source] = np.where(mask, donor, here)
            values = _taken(rows[column.name], donors[column.name], takes[column.source])
            rows = rows.set_column(rows.schema.get_field_index(column.name), column.name, values)
        raw = _raw_filled(rows[RAW], donors[RAW], takes)
        return rows.set_column(rows.schema.get_field_index(RAW), RAW, raw)


def _raw_filled(own: pa.ChunkedArray, given: pa.ChunkedArray, takes: dict[str, Ints]) -> pa.Array | pa.ChunkedArray:
    """The ``_pgcdc_raw`` of each row: the texts of masked columns come from where their values come from."""
    both = pa.chunked_array([*own.chunks, *given.chunks], own.type)
    if both.null_count == len(both):
        return own
    here = np.arange(len(own), dtype=np.int64)
    names = pc.unique(map_keys(both)).to_pylist()
    texts = {name: _whole(raw_texts(both, name)).take(pa.array(takes.get(name, here))) for name in names}
    return raw_maps(texts, len(own), own.type)


@dataclass
class _Copies:
    """Rows of the target that are alike to the removed ones of a multiset."""

    removed: pa.Table
    columns: Sequence[FeedColumn]
    _found: list[pa.Table] = field(default_factory=list)
    _paths: list[str] = field(default_factory=list)
    _positions: list[Ints] = field(default_factory=list)

    @property
    def _alike(self) -> list[FeedColumn]:
        """What tells rows apart."""
        own = [name for name in (HASH, LEAF) if name in self.removed.column_names]
        return [*(FeedColumn(name, name, 0, True) for name in own), *(replace(c, key=True) for c in self.columns)]

    def look(self, group: RowGroup) -> None:
        """Note the rows of a row group that may be copies: those with one of the hashes."""
        hashes = pc.unique(self.removed[HASH])
        same = _bools(pc.is_in(group.read([HASH])[HASH], hashes)) & group.alive
        at = np.flatnonzero(same)
        if len(at):
            names = [*(column.name for column in self._alike), RAW, ROW]
            self._found.append(group.read(names).take(pa.array(at)))
            self._paths += [group.path]
            self._positions.append(at + group.start)

    def chosen(self) -> list[tuple[str, Ints]]:
        """The copies to take away, by file. Which of several does not matter; the first by identity."""
        names = [*(column.name for column in self._alike), RAW]
        rows = self.removed.num_rows
        both = pa.concat_tables([self.removed.select(names), *(table.select(names) for table in self._found)])
        number = key_numbers(both.combine_chunks(), self._alike)
        counts = np.zeros(int(number.max(initial=-1)) + 1, dtype=np.int64)
        counts[number[:rows]] = self.removed[COUNT].to_numpy()
        group = number[rows:]
        if (np.bincount(group, minlength=len(counts)) < counts).any():
            raise MergeMismatch(LACKS)
        if not self._found:
            return []
        identities = pa.concat_tables([table.select([ROW]) for table in self._found])[ROW]
        order = pc.sort_indices(pa.table({"group": group, "row": identities}),
                                sort_keys=[("group", "ascending"), ("row", "ascending")]).to_numpy()  # fmt: skip
        by_group = group[order]
        starts = np.flatnonzero(np.diff(by_group, prepend=-1))
        place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
        taken = np.zeros(len(order), dtype=bool)
        taken[order[place < counts[by_group]]] = True
        pieces = np.split(taken, np.cumsum([len(positions) for positions in self._positions])[:-1])
        found = zip(self._paths, self._positions, pieces, strict=True)
        return [(path, positions[piece]) for path, positions, piece in found if piece.any()]


def _alive(group: RowGroup, at: Ints, rows: Ints) -> tuple[Ints, Ints]:
    there = group.alive[at]
    return at[there], rows[there]


def _taken(own: pa.ChunkedArray, given: pa.ChunkedArray, take: Ints) -> pa.ChunkedArray:
    return pa.chunked_array([*own.chunks, *given.chunks], own.type).take(pa.array(take))


def _whole(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _bools(values: pa.ChunkedArray | pa.Array) -> Bools:
    found: Bools = values.to_numpy() if isinstance(values, pa.ChunkedArray) else values.to_numpy(zero_copy_only=False)
    return found.astype(bool)
