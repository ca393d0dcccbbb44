"""Facts of a transaction that are known only at its commit. If rows were written before the commit, these facts are
stored once per file. In a file that was written while its transaction was in progress, ``commit_lsn`` and ``commit_ts``
are NULL, ``subxid`` is the xid of each row's subtransaction, and ``schema_id`` contains provisional ids (0, 1, 2, ...).
The final ids depend on the catalog after the commit. When the transaction commits, the file is added to the log
unchanged, and the tags of its Delta add action contain the missing facts. Every reader fills in these facts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.log.rows import ABSENT, Rows

SUBXID: Final = "subxid"
"""The column with the xid of a row's subtransaction. Only files with commit facts have this column."""
_COMMIT_LSN: Final = "pgcdc.commit_lsn"
_COMMIT_TS: Final = "pgcdc.commit_ts"
_ABORTED: Final = "pgcdc.aborted"
_SCHEMA_IDS: Final = "pgcdc.schema_ids"


@dataclass(frozen=True)
class CommitFacts:
    """The facts of one transaction's commit, for one file or for all files of the transaction."""

    commit_lsn: int
    commit_ts: int
    """Microseconds since 1970."""
    aborted: tuple[int, ...] = ()
    """The xids of the subtransactions that were rolled back, ascending. Readers skip their rows."""
    schema_ids: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Maps provisional schema ids to final ids. An id that is not in the map is final."""

    @classmethod
    def of_tags(cls, tags: Mapping[str, str]) -> Self | None:
        """Reads the facts from a file's tags. None if the file has no commit facts, because its rows were written after
        the commit. Raises ValueError for unreadable tags."""
        if _COMMIT_LSN not in tags:
            return None
        if _COMMIT_TS not in tags:
            raise ValueError(f"{_COMMIT_TS} is missing")
        pairs = (pair.split(":") for pair in tags.get(_SCHEMA_IDS, "").split(",") if pair)
        return cls(
            commit_lsn=int(tags[_COMMIT_LSN]),
            commit_ts=int(tags[_COMMIT_TS]),
            aborted=tuple(_numbers(tags.get(_ABORTED, ""))),
            schema_ids={int(provisional): int(final) for provisional, final in pairs},
        )

    def to_tags(self) -> dict[str, str]:
        return {
            _COMMIT_LSN: str(int(self.commit_lsn)),
            _COMMIT_TS: str(self.commit_ts),
            **({_ABORTED: _ranges(self.aborted)} if self.aborted else {}),
            **({_SCHEMA_IDS: ",".join(f"{a}:{b}" for a, b in self.schema_ids.items())} if self.schema_ids else {}),
        }

    def within(self, low: int, high: int) -> Self:
        """The facts without aborted xids outside of ``low`` to ``high``, for a file whose subxids are in this range.
        This keeps the file's tags short, because a transaction may have a million rollbacks and hundreds of files."""
        return replace(self, aborted=between(self.aborted, low, high))

    def fill(self, table: pa.Table) -> pa.Table:
        """Returns the file's rows with the facts filled in, without rows of aborted subtransactions and without the
        column ``subxid``. The table must have ``subxid`` if ``aborted`` is not empty."""
        if self.aborted:
            gone = pc.is_in(table[SUBXID], value_set=pa.array(self.aborted, pa.int64()))
            table = table.filter(pc.invert(gone))
        if SUBXID in table.column_names:
            table = table.drop_columns([SUBXID])
        for name, value in (("commit_lsn", int(self.commit_lsn)), ("commit_ts", self.commit_ts)):
            if name in table.column_names:
                type_ = table.schema.field(name).type
                table = _with_column(table, name, pa.repeat(pa.scalar(value, type_), table.num_rows))
        if self.schema_ids and "schema_id" in table.column_names:
            table = _with_column(table, "schema_id", self._final(table["schema_id"]))
        return table

    def fill_rows(self, rows: Rows) -> Rows:
        """Like :meth:`fill`, for rows that are not in a file yet. ``schema_ids`` must contain every provisional id."""
        assert rows.subxid is not None
        kept = rows.take(np.flatnonzero(~np.isin(rows.subxid, np.array(self.aborted, dtype=np.int64))))
        number = len(kept)
        schema_id = kept.schema_id.copy()
        known = np.flatnonzero(kept.relation_id != ABSENT)
        if len(known):
            final = np.array([self.schema_ids[provisional] for provisional in range(len(self.schema_ids))], np.int64)
            schema_id[known] = final[schema_id[known]]
        return replace(
            kept,
            commit_lsn=np.full(number, self.commit_lsn, dtype=np.int64),
            commit_ts=np.full(number, self.commit_ts, dtype=np.int64),
            schema_id=schema_id,
            subxid=None,
        )

    def _final(self, schema_id: pa.ChunkedArray) -> pa.ChunkedArray:
        provisional = pa.array(list(self.schema_ids.keys()), pa.int64())
        final = pa.array(list(self.schema_ids.values()), pa.int64())
        return pc.coalesce(pc.take(final, pc.index_in(schema_id, value_set=provisional)), schema_id)


def between(xids: tuple[int, ...], low: int, high: int) -> tuple[int, ...]:
    """The entries of ``xids`` (ascending) from ``low`` to ``high``, both included."""
    return xids[bisect_left(xids, low) : bisect_right(xids, high)]


def _with_column(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), column)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text, with consecutive numbers as ranges: ``700-900,1000``."""
    values = np.asarray(numbers, dtype=np.int64)
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 2) > 1)
    lows, highs = values[starts].tolist(), values[np.append(starts[1:], len(values)) - 1].tolist()
    pairs = zip(lows, highs, strict=True)
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in pairs)


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(",") if text else ():
        low, dash, high = part.partition("-")
        yield from range(int(low), int(high if dash else low) + 1)
