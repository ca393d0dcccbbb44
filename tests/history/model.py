"""A mirror as a plain model: the net effects of a turn merged row by row, with every expectation checked.

It stands in for Spark's MERGE alone: log, decode, feeds and collapse are the project's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.lake.collapsing import Effect
from pgcdc_assets.lake.feed import feed_columns
from pgcdc_assets.protocol.types import arrow_type
from tests.oracle import RAW, Rows, written

Texts = dict[str, str | None]
"""A row: the text of each column, by name."""
Key = tuple[str | None, ...]


@dataclass
class Model:
    """The rows of one mirror, by key or, where it has none, counted."""

    table: Table
    keyed: dict[Key, tuple[Texts, str | None]] = field(default_factory=dict)
    """Row, and the leaf that holds it."""
    counted: Counter[tuple[tuple[str | None, ...], str | None]] = field(default_factory=Counter)
    homes: dict[Key, str | None] = field(default_factory=dict)
    """The leaf that each key was last seen in: its columns choose it."""

    def rows(self, columns: Sequence[str]) -> Rows:
        if self.table.key:
            return Counter(tuple(row[name] for name in columns) for row, _ in self.keyed.values())
        own = [column.name for column in self.table.columns]
        places = [own.index(name) for name in columns]
        found: Rows = Counter()
        for (values, _), count in self.counted.items():
            found[tuple(values[place] for place in places)] += count
        return found

    def empty(self, leaves: Sequence[str] | None = None) -> None:
        """Truncate: the whole table, or these leaves."""
        gone = [key for key, (_, leaf) in self.keyed.items() if leaves is None or leaf in leaves]
        for key in gone:
            del self.keyed[key]
        for entry in [entry for entry in self.counted if leaves is None or entry[1] in leaves]:
            del self.counted[entry]

    def damage(self, columns: Sequence[str], lost: Rows, revived: Rows) -> None:
        """Take rows away by their keys, and put others back where they were."""
        for values in lost:
            self.keyed.pop(self._key(dict(zip(columns, values, strict=True))), None)
        for values in revived:
            row = dict(zip(columns, values, strict=True))
            key = self._key(row)
            self.keyed[key] = row, self.homes.get(key)

    def merge(self, folder: Path, effects: Sequence[Effect], leaves: Sequence[str], *, repair: bool = False) -> None:
        for effect in effects:
            assert effect.mismatch is None, effect.mismatch
        upserts = [pq.read_table(folder / effect.upserts.path) for effect in effects if effect.upserts is not None]
        if self.table.key:
            self._merge_keyed(upserts, leaves, repair)
            return
        self.empty(leaves)
        for effect in effects:
            if effect.removed is not None:
                self._remove(pq.read_table(folder / effect.removed.path))
        for added in upserts:
            for row, leaf in self._texts(added):
                self.counted[tuple(row.values()), leaf] += 1

    # Rows with a key ----------------------------------------------------------------------------

    def _merge_keyed(self, upserts: Sequence[pa.Table], leaves: Sequence[str], repair: bool) -> None:
        before = dict(self.keyed)
        arriving: set[Key] = set()
        for source in upserts:
            for (row, leaf), facts in zip(self._texts(source), source.to_pylist(), strict=True):
                key = self._key(row)
                assert key not in arriving, f"{key} stands twice in the merge source"
                arriving.add(key)
                self._expect(facts["_pgcdc_present"], before.get(key), leaves)
                if facts["_pgcdc_op"] == "D":
                    self.keyed.pop(key, None)
                    continue
                self.keyed[key] = (self._unmasked(row, facts, before, key), leaf)
                self.homes[key] = leaf
        for key in [key for key, (_, leaf) in before.items() if leaf in leaves and key not in arriving]:
            del self.keyed[key]

    def _expect(self, present: bool | None, found: tuple[Texts, str | None] | None, leaves: Sequence[str]) -> None:
        if present is True:
            assert found is not None, "the mirror lacks a row that the source changed"
        if present is False:
            assert found is None or found[1] in leaves, "the mirror holds a row that the source inserted"

    def _unmasked(self, row: Texts, facts: dict[str, Any], before: dict[Key, Any], key: Key) -> Texts:
        """Values that were not sent, from the mirror's row: its own, or the one that the key was before."""
        masked = [c for c in self.table.columns if facts.get(f"_pgcdc_masked_{c.attnum}")]
        if not masked:
            return row
        origin = facts["_pgcdc_origin"]
        kept, _ = before[key if origin is None else self._origin(origin)]
        return row | {column.name: kept[column.name] for column in masked}

    def _origin(self, origin: dict[str, Any]) -> Key:
        names = {column.source: column.name for column in feed_columns(self.table)}
        misfits = [dict(origin.get(RAW) or ())]
        texts = {
            column.name: next(iter(written(column.name, pa.array([origin[names[column.name]]], type_), misfits)))
            for column, type_ in zip(self.table.key_columns, self._key_types, strict=True)
        }
        return self._key(texts)

    @property
    def _key_types(self) -> list[pa.DataType]:
        return [arrow_type(column.type) for column in self.table.key_columns]

    def _key(self, row: Texts) -> Key:
        # As Spark compares: there is one zero.
        return tuple("0.0" if row[c.name] == "-0.0" else row[c.name] for c in self.table.key_columns)

    # Rows without -------------------------------------------------------------------------------

    def _remove(self, removed: pa.Table) -> None:
        for (row, leaf), count in zip(self._texts(removed), removed["_pgcdc_count"].to_pylist(), strict=True):
            entry = tuple(row.values()), leaf
            assert self.counted[entry] >= count, "the mirror lacks a copy that the source took away"
            self.counted[entry] -= count
            if not self.counted[entry]:
                del self.counted[entry]

    def _texts(self, rows: pa.Table) -> list[tuple[Texts, str | None]]:
        misfits = [dict(entry or ()) for entry in rows[RAW].to_pylist()]
        names = [column.source for column in feed_columns(self.table)]
        data = [list(written(c.source, rows[c.name], misfits)) for c in feed_columns(self.table)]
        leaves = rows["_pgcdc_leaf"].to_pylist() if "_pgcdc_leaf" in rows.column_names else [None] * rows.num_rows
        return [(dict(zip(names, values, strict=True)), leaf) for *values, leaf in zip(*data, leaves, strict=True)]
