"""Stores how many rows of the log were applied to no mirror (untaken rows), with one entry per relation and LSN range.

Rows are counted only if their relation belongs to no table that pgcdc knows. So rows of these tables are not counted:
tables that the settings exclude, and tables that wait for a copy or are set aside, whose state ``pgcdc status`` shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.points.ledger import AT, Ledger, entries

SCHEMA = pa.schema(
    [
        ("relation_id", pa.int64()),
        ("schema", pa.string()),
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("start", pa.int64()),
        ("last", pa.int64()),
        ("end", pa.int64()),
        AT,
    ]
)


@dataclass(frozen=True)
class UntakenRows:
    """The number of rows of one relation that were applied to no mirror. The batches with these rows are between
    ``start`` and ``end``. ``last``: the start of the last of these batches."""

    relation_id: int
    name: TableName
    """The relation's newest name in the stream."""
    rows: int
    start: Lsn
    last: Lsn
    end: Lsn

    def and_then(self, later: UntakenRows) -> UntakenRows:
        return replace(later, rows=self.rows + later.rows, start=min(self.start, later.start))


class UntakenLedger:
    """The ledger of untaken rows. Every call reads the ledger."""

    def __init__(self, layout: Layout) -> None:
        self._ledger = Ledger(layout.untaken_rows, SCHEMA)

    def all(self) -> dict[int, UntakenRows]:
        """Returns the untaken rows of each relation, summed over all its entries, by the relation's OID."""
        found: dict[int, UntakenRows] = {}
        for row in entries(self._ledger.rows()):
            one = _read(row)
            found[one.relation_id] = found[one.relation_id].and_then(one) if one.relation_id in found else one
        return found

    def add(self, new: Iterable[UntakenRows]) -> None:
        """Adds entries in one Delta commit, which is durable when this returns."""
        if rows := [{**vars(one), "schema": one.name.schema, "name": one.name.name} for one in new]:
            self._ledger.append(rows)

    def forget(self, log_start: Lsn) -> int:
        """Removes the entries whose rows are no longer in the log, which begins at ``log_start``. Returns the number of
        removed entries."""
        return self._ledger.keep(lambda file: pc.greater(file.rows("end")["end"].combine_chunks(), int(log_start)))


def _read(row: dict[str, Any]) -> UntakenRows:
    name = TableName(row["schema"], row["name"])
    return UntakenRows(row["relation_id"], name, row["rows"], Lsn(row["start"]), Lsn(row["last"]), Lsn(row["end"]))
