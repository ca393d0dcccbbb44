"""Finds the rows of a target (a mirror) whose key is in a merge source (the net changes of a turn). Key columns are
compared one after another, so the second column is compared only in rows where the first column matches. Values are
compared exactly, but 0 and -0 are equal, as in PostgreSQL. A key value that does not fit its Arrow type is NULL there,
and is compared by its text in ``_pgcdc_raw``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Ints, list_texts, whole
from pgcdc_assets.feed.schema import RAW, FeedColumn
from pgcdc_assets.mirror.net.neteffect import raw_texts


class KeyIndex:
    """An index of some rows by key. No two of the rows may have the same key."""

    def __init__(self, rows: pa.Table, keys: Sequence[FeedColumn]) -> None:
        """``rows`` has the columns ``keys`` and ``_pgcdc_raw``."""
        self._steps = [_Step(column, text) for column in keys for text in (False, True)
                       if not text or rows[column.name].null_count]  # fmt: skip
        number = np.zeros(rows.num_rows, dtype=np.int64)
        for step in self._steps:
            number = step.number(rows, number)
        self._rows = np.argsort(number, kind="stable")
        distinct = len(np.unique(number)) if self._steps else 0
        if self._steps and distinct != rows.num_rows:
            raise AssertionError(f"{rows.num_rows} rows of a merge source have only {distinct} different keys")

    @property
    def columns(self) -> list[str]:
        """The columns that :meth:`find` reads."""
        texts = [RAW] if any(step.text for step in self._steps) else []
        return [*(step.column.name for step in self._steps if not step.text), *texts]

    def find(self, target: pa.Table) -> tuple[Ints, Ints]:
        """The rows of ``target`` whose key is in the index. Returns two arrays of equal length: the row numbers in
        ``target``, and for each the number of the indexed row with this key. NULL is equal to NULL."""
        at = np.arange(target.num_rows if self._steps else 0, dtype=np.int64)
        number = np.zeros(len(at), dtype=np.int64)
        for step in self._steps:
            fits, number = step.found(target, at, number)
            at = at[fits]
        return at, self._rows[number]


@dataclass
class _Step:
    """One step of the comparison: a key column, or the column's texts in ``_pgcdc_raw``. The steps number the distinct
    keys: each step numbers the distinct pairs of (number from the step before, value), from 0 without gaps."""

    column: FeedColumn
    text: bool

    def number(self, rows: pa.Table, before: Ints) -> Ints:
        """Number the indexed rows. ``before``: their numbers from the step before."""
        values = self._values(rows)
        self._spelling = _Spelling(values) if pa.types.is_list(values.type) else None
        values = self._comparable(values)
        self._distinct = pc.unique(values)
        codes = before * len(self._distinct) + self._codes(values).to_numpy(zero_copy_only=False)
        self._pairs, numbers = np.unique(codes, return_inverse=True)
        return numbers.astype(np.int64)

    def found(self, target: pa.Table, at: Ints, before: Ints) -> tuple[Ints, Ints]:
        """Find the rows, among the rows ``at`` of ``target``, that match an indexed row in this step. Returns their
        indexes in ``at``, and their numbers. ``before``: the numbers of the rows ``at`` from the step before."""
        values = self._values(target)
        if len(at) < target.num_rows:
            values = values.take(pa.array(at))
        codes = self._codes(self._comparable(values))
        known = np.flatnonzero(codes.is_valid().to_numpy(zero_copy_only=False))
        pairs = before[known] * len(self._distinct) + codes.drop_null().to_numpy()
        number = np.searchsorted(self._pairs, pairs)
        number[number == len(self._pairs)] = 0
        fits = self._pairs[number] == pairs if len(known) else known.astype(bool)
        return known[fits], number[fits].astype(np.int64)

    def _values(self, rows: pa.Table) -> pa.Array:
        if self.text:
            return raw_texts(whole(rows[RAW]), self.column.source)
        return _one_zero(whole(rows[self.column.name]))

    def _comparable(self, values: pa.Array) -> pa.Array:
        return values if self._spelling is None else self._spelling.of(values)

    def _codes(self, values: pa.Array) -> pa.Array:
        return pc.index_in(values, value_set=self._distinct)


class _Spelling:
    """Converts lists to texts, because Arrow does not compare lists. Equal lists get equal texts."""

    def __init__(self, lists: pa.ListArray) -> None:
        """``lists``: the key values of the merge source. :meth:`of` writes ``?`` for an element that is in none of
        them."""
        items = lists.flatten()
        self._inner = _Spelling(items) if pa.types.is_list(items.type) else None
        self._letters = pc.unique(self._comparable(items))

    def of(self, lists: pa.ListArray) -> pa.StringArray:
        places = pc.index_in(self._comparable(lists.flatten()), value_set=self._letters)
        letters = pc.fill_null(pc.cast(places, pa.string()), "?")
        return list_texts(lists, letters)

    def _comparable(self, items: pa.Array) -> pa.Array:
        return _one_zero(items) if self._inner is None else self._inner.of(items)


def _one_zero(values: pa.Array) -> pa.Array:
    return pc.add(values, 0.0) if pa.types.is_floating(values.type) else values
