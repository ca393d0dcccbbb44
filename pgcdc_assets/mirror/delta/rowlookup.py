"""Merges the net changes of a table (the *merge source*) into its mirror (the *target*): finds the rows to delete, and
writes the rows to add.

No file is rewritten. Rows to delete are named by file and position, for a deletion vector. Rows to add, including the
new versions of changed rows, are written to one new file. The merge also checks the mirror: a row that changes must
exist, and a row that is inserted must not exist yet. Otherwise nothing is committed, because the mirror differs from
its source. Imported by Spark's workers, so it must not import Spark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from pgcdc_assets.core.arrays import Bools, Ints, first_of_groups, whole
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.feed.schema import HASH, LEAF, OP, RAW, FeedColumn
from pgcdc_assets.mirror.delta.keyindex import KeyIndex
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget, RowGroup, RowGroups, WantedKeys, wanted
from pgcdc_assets.mirror.net.neteffect import (
    COUNT,
    MASK,
    ORIGIN,
    PRESENT,
    UPSERT,
    NetRows,
    key_numbers,
    map_keys,
    raw_maps,
    raw_texts,
)

LACKS = "the mirror lacks a row that the source changed"
HOLDS = "the mirror already has a row that the source inserted"
TWICE = "the mirror has two rows with the same key"


FETCHED_BYTES = 64 << 20
"""How many bytes of unchanged TOAST values, fetched from the target, are kept in memory before they are written with
their rows. A change of a few bytes may need megabytes of such values, because PostgreSQL does not send them again."""

Write = Callable[[pa.Table], None]
"""A function that receives the rows to add, under the feed's column names. If the merge fails, the rows are
discarded."""


@dataclass(frozen=True)
class Effect:
    """What a merge changes in the mirror. Counts are rows."""

    added: FileReport | None = None
    """The new file with the rows to add; None if there are no rows."""
    gone: dict[str, BitMap64] = field(default_factory=dict)
    """The positions of the rows to delete, by file of the mirror."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    mismatch: MergeMismatch | None = None
    """Set if the changes contradict each other or the mirror, or if a file cannot be read. The mirror then must not be
    changed."""


def merge_keyed(
    target: MergeTarget, source: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int], leaves: Sequence[str],
    write: Write,
) -> Effect:  # fmt: skip
    """Merge ``source``, the result of :func:`pgcdc_assets.mirror.net.neteffect.collapse`, into the target. ``masked``:
    the attnums of columns for which some rows of ``source`` lack a value (unchanged TOAST); these values are read from
    the target. ``leaves``: truncated leaf partitions, whose rows are deleted. Raises MergeMismatch if source and target
    contradict each other."""
    match = _Match(source, columns, masked, write)
    emptied = _Emptied(leaves)
    gone = _Gone()
    looked_at = target.files_groups({} if leaves else match.wanted) if leaves or source.num_rows else ()
    for of_file in looked_at:
        for rows in RowGroups.read(of_file, [*match.columns, *emptied.columns]):
            left = emptied.of(rows)
            gone.add(rows, match.take(rows, left), np.flatnonzero(left))
    match.check()
    match.finish()
    changed = int((match.live & (match.hits > 0)).sum())
    return Effect(None, gone.positions, int(match.live.sum()) - changed, changed, gone.count - changed)


def merge_multiset(
    target: MergeTarget, net: NetRows, columns: Sequence[FeedColumn], leaves: Sequence[str], write: Write
) -> Effect:
    """Merge the net changes of a table without a key. For each row of ``net.removed``, COUNT equal rows of the target
    are deleted. Raises MergeMismatch if the target has fewer equal rows."""
    emptied = _Emptied(leaves)
    gone = _Gone()
    copies = _Copies(net.removed, columns)
    if leaves or net.removed.num_rows:
        for of_file in target.files_groups({}):
            for rows in RowGroups.read(of_file, [HASH, *emptied.columns]):
                gone.add(rows, np.flatnonzero(emptied.of(rows)), copies.take(rows))
    copies.check()
    write(net.added)
    return Effect(None, gone.positions, net.added.num_rows, 0, gone.count)


class _Gone:
    """The positions of the rows to delete, by file. If :meth:`add` gets a position twice, it is counted once."""

    def __init__(self) -> None:
        self.positions: dict[str, BitMap64] = defaultdict(BitMap64)

    @property
    def count(self) -> int:
        return sum(len(positions) for positions in self.positions.values())

    def add(self, rows: RowGroups, *places: Ints) -> None:
        for at in places:
            if len(at):
                self.positions[rows.path] |= BitMap64(rows.positions[at].astype(np.uint64))


@dataclass(frozen=True)
class _Emptied:
    """Finds the rows of truncated leaf partitions. ``leaves`` are values of ``_pgcdc_leaf``."""

    leaves: Sequence[str]

    @property
    def columns(self) -> list[str]:
        return [LEAF] if self.leaves else []

    def of(self, rows: RowGroups) -> Bools:
        """For each place (see :class:`RowGroups`), whether the row is live and in one of these leaves."""
        if not self.leaves:
            return np.zeros(len(rows.alive), dtype=bool)
        names = rows.columns[LEAF]
        return _bools(pc.is_in(names, pa.array(list(self.leaves), names.type))) & rows.alive


class _Match:
    """Finds the rows of the target with the keys of a merge source, some row groups at a time. Counts the matches, and
    fetches the values that the source lacks."""

    def __init__(
        self, source: pa.Table, columns: Sequence[FeedColumn], masked: Sequence[int], write: Write
    ) -> None:  # fmt: skip
        self._write = write
        self._source = source.combine_chunks()
        keys = [column for column in columns if column.key]
        self._own = KeyIndex(self._source, keys)
        self._kept = [column for column in columns if column.attnum in masked]
        self._lacking = np.zeros(source.num_rows, dtype=bool)
        for column in self._kept:
            self._lacking |= _bools(source[f"{MASK}{column.attnum}"])
        # These rows of the source have changed their keys, and lack values. The target has these values in the row with
        # the old key.
        self._moved = np.flatnonzero(_bools(pc.is_valid(source[ORIGIN])))
        origins = self._source[ORIGIN].filter(pc.is_valid(self._source[ORIGIN])).combine_chunks()
        self._origins = pa.Table.from_struct_array(origins)
        self._from = KeyIndex(self._origins, keys)
        self._lacking_here = self._lacking.copy()
        self._lacking_here[self._moved] = False
        self._keys = keys
        self._fetched: list[tuple[Ints, pa.Table]] = []
        self._fetched_count = np.zeros(source.num_rows, dtype=np.int64)
        self.hits = np.zeros(source.num_rows, dtype=np.int64)
        """For each row of the source, how many rows of the target have the same key."""
        self._emptied_hits = np.zeros(source.num_rows, dtype=np.int64)
        """For each row of the source, how many of the rows counted in ``hits`` lie in a truncated leaf."""
        self.live: Bools = _bools(pc.equal(source[OP], UPSERT))

    @property
    def wanted(self) -> WantedKeys:
        both = pa.concat_tables([self._source.select(self._names), self._origins.select(self._names)])
        return wanted({name: both[name] for name in self._names})

    @property
    def _names(self) -> list[str]:
        return [column.name for column in self._keys]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([*self._own.columns, *self._from.columns]))

    def take(self, rows: RowGroups, emptied: Bools) -> Ints:
        """Match these row groups. Returns the places of the live rows whose key is in the source. ``emptied``: for each
        place, whether the row is in a truncated leaf."""
        at, of = _alive(rows, *self._own.find(rows.columns))
        self.hits += np.bincount(of, minlength=len(self.hits))
        self._emptied_hits += np.bincount(of[emptied[at]], minlength=len(self.hits))
        if self._kept:
            here = self._lacking_here[of]
            moved_at, moved = _alive(rows, *self._from.find(rows.columns))
            places, of = np.concatenate((at[here], moved_at)), np.concatenate((of[here], self._moved[moved]))
            for group, mine, own_places in rows.apart(places):
                self._fetch_kept(group, own_places, of[mine])
        return at

    def _fetch_kept(self, group: RowGroup, at: Ints, rows: Ints) -> None:
        """Fetch values that were not sent (unchanged TOAST) from rows of the target. ``at``: the rows' numbers in the
        group. ``rows``: the rows of the source that need the values."""
        values = group.read([*(column.name for column in self._kept), RAW])
        self._fetched.append((rows, values.take(pa.array(at))))
        self._fetched_count += np.bincount(rows, minlength=len(self._fetched_count))
        if sum(given.nbytes for _, given in self._fetched) >= FETCHED_BYTES:
            self._write_fetched()

    def check(self) -> None:
        """Raise MergeMismatch if the target lacks a row that must exist, has a row that must not exist, or has two rows
        with the same key."""
        present = self._source[PRESENT]
        must, must_not = _bools(pc.fill_null(present, False)), ~_bools(pc.fill_null(present, True))
        if (must & (self.hits == 0)).any() or (self._lacking & (self._fetched_count == 0)).any():
            raise MergeMismatch(LACKS)
        if (must_not & (self.hits > self._emptied_hits)).any():
            raise MergeMismatch(HOLDS)
        if max(self.hits.max(initial=0), self._fetched_count.max(initial=0)) > 1:
            raise MergeMismatch(TWICE)

    def finish(self) -> None:
        self._write_fetched()
        self._write(self._source.filter(pa.array(self.live & (self._fetched_count == 0))))

    def _write_fetched(self) -> None:
        """Write the rows for which values were fetched, completed with these values and with their texts in
        ``_pgcdc_raw``."""
        if not self._fetched:
            return
        rows = self._source.take(pa.array(np.concatenate([at for at, _ in self._fetched])))
        given = pa.concat_tables([values for _, values in self._fetched])
        self._fetched = []
        masks = {column.source: rows[f"{MASK}{column.attnum}"] for column in self._kept}
        for column in self._kept:
            values = pc.if_else(masks[column.source], given[column.name], rows[column.name])
            rows = rows.set_column(rows.schema.get_field_index(column.name), column.name, values)
        raw = _raw_filled(rows[RAW], given[RAW], masks)
        self._write(rows.set_column(rows.schema.get_field_index(RAW), RAW, raw))


def _raw_filled(
    own: pa.ChunkedArray, given: pa.ChunkedArray, masks: Mapping[str, pa.ChunkedArray]
) -> pa.Array | pa.ChunkedArray:
    """The column ``_pgcdc_raw`` of each row: a map of the texts of values that their types cannot hold. If ``masks`` is
    true for a column of a row, the column's value comes from the target's row, and so does its text (``given``). All
    other texts are taken from ``own``."""
    if own.null_count + given.null_count == 2 * len(own):
        return own
    names = pc.unique(pa.concat_arrays([map_keys(own), map_keys(given)])).to_pylist()
    texts = {name: raw_texts(own, name) for name in names}
    for name in masks.keys() & texts.keys():
        texts[name] = whole(pc.if_else(masks[name], raw_texts(given, name), texts[name]))
    return raw_maps(texts, len(own), own.type)


class _Copies:
    """Selects the rows to delete from a table without a key: for each removed row, the first COUNT rows that are equal
    to it."""

    def __init__(self, removed: pa.Table, columns: Sequence[FeedColumn]) -> None:
        own = [name for name in (HASH, LEAF) if name in removed.column_names]
        self._alike = [*(FeedColumn(name, name, 0, True) for name in own), *(replace(c, key=True) for c in columns)]
        self._names = [*(column.name for column in self._alike), RAW]
        self._removed = removed
        self._left = removed[COUNT].to_numpy().copy()

    def take(self, rows: RowGroups) -> Ints:
        open_ = self._removed.filter(pa.array(self._left > 0))
        hashes = rows.columns[HASH]
        at = np.flatnonzero(_bools(pc.is_in(hashes, pc.unique(open_[HASH]))) & rows.alive)
        taken = [at[mine[self._take(group, places)]] for group, mine, places in rows.apart(at)]
        return np.concatenate(taken) if taken else at

    def _take(self, group: RowGroup, at: Ints) -> Ints:
        """Select the rows to delete among the rows ``at``, which have the hash of a removed row, but may differ from
        it. Returns indexes in ``at``."""
        theirs = group.read(self._names).take(pa.array(at))
        asked = np.flatnonzero(_bools(pc.is_in(self._removed[HASH], pc.unique(theirs[HASH]))))
        both = [self._removed.take(pa.array(asked)), theirs]
        number = key_numbers(
            pa.concat_tables([rows.select(self._names) for rows in both]).combine_chunks(), self._alike
        )
        own, their = number[: len(asked)], number[len(asked) :]
        counts = np.zeros(int(number.max()) + 1, dtype=np.int64)
        counts[own] = self._left[asked]
        taken = np.sort(first_of_groups(their, counts))
        self._left[asked] -= np.bincount(their[taken], minlength=len(counts))[own]
        return taken

    def check(self) -> None:
        if (self._left > 0).any():
            raise MergeMismatch(LACKS)


def _alive(rows: RowGroups, at: Ints, of: Ints) -> tuple[Ints, Ints]:
    there = rows.alive[at]
    return at[there], of[there]


def _bools(values: pa.ChunkedArray | pa.Array) -> Bools:
    found: Bools = values.to_numpy() if isinstance(values, pa.ChunkedArray) else values.to_numpy(zero_copy_only=False)
    return found.astype(bool)
