"""The stored states of the tables, in a ledger. The last row of a table is its present state. Also repairs the change
log, the ledgers and the feeds after a power cut: which feeds exist is known from the tables in this ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.formats import reading
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.recovery import recover
from pgcdc_assets.log.commit import recover_log
from pgcdc_assets.points.ledger import AT, Ledger, entries
from pgcdc_assets.structure.record import TableRecord, TableState

SCHEMA = pa.schema(
    [
        ("schema", pa.string()),
        ("name", pa.string()),
        ("state", pa.string()),
        ("lsn", pa.int64()),
        ("reason", pa.string()),
        ("shape", pa.string()),
        AT,
    ]
)


@dataclass(frozen=True)
class StateRow:
    """One stored state of a table. ``table``: the table, with the structure that its mirror has. ``lsn``: the LSN at
    which the table was copied or set aside. ``reason``: why the table got this state, if there is something to
    report."""

    name: TableName
    state: TableState
    lsn: Lsn
    reason: str | None
    table: Table | None
    at: datetime


class TableStates:
    """The ledger of table states. Every call reads the ledger. Threads may share one instance."""

    def __init__(self, layout: Layout) -> None:
        self._ledger = Ledger(layout.table_states, SCHEMA)
        self._writing = Lock()

    def all(self) -> dict[TableName, StateRow]:
        """Returns the last row of every table."""
        found: dict[TableName, dict[str, Any]] = {}
        for rows in self._ledger.newest_first():
            for row in reversed(entries(rows)):
                found.setdefault(TableName(row["schema"], row["name"]), row)
        return {name: _row(name, row) for name, row in found.items()}

    def get(self, name: TableName) -> StateRow | None:
        return self.all().get(name)

    def tables(self) -> list[Table]:
        """Returns all tables that ever had a state, each as its last row describes it."""
        return [row.table for row in self.all().values() if row.table is not None]

    def set(self, table: Table, state: TableState, lsn: Lsn, reason: str | None = None) -> None:
        self.set_all([table], state, lsn, reason)

    def set_all(self, tables: Iterable[Table], state: TableState, lsn: Lsn, reason: str | None = None) -> None:
        """Sets the same state of several tables in one Delta commit."""
        self._append([_stored(table, state, lsn, reason) for table in tables])

    def set_records(self, records: Iterable[TableRecord]) -> None:
        """Sets the states of followed tables in one Delta commit, each with its own position."""
        self._append([_stored(one.table, TableState.CATCHING_UP, one.replay_lsn, one.reason) for one in records])

    def _append(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            with self._writing:
                self._ledger.append(rows)
            passed(FaultPoint.STATE_WRITTEN)

    def prune(self) -> int:
        """Removes rows that a later row of the same table has replaced. Returns the number of removed rows."""
        rows = self._ledger.rows()
        last = rows.group_by(["schema", "name"], use_threads=False).aggregate([(AT.name, "last")])
        kept = last[f"{AT.name}_last"].combine_chunks()
        return self._ledger.keep(lambda file: pc.is_in(file.rows(AT.name)[AT.name].combine_chunks(), value_set=kept))


def _stored(table: Table, state: TableState, lsn: Lsn, reason: str | None) -> dict[str, Any]:
    return {
        "schema": table.name.schema,
        "name": table.name.name,
        "state": state.value,
        "lsn": int(lsn),
        "reason": reason,
        "shape": json.dumps(table.to_json()),
    }


def _row(name: TableName, row: dict[str, Any]) -> StateRow:
    with reading(f"state of table {name}"):
        table = Table.from_json(json.loads(row["shape"])) if row["shape"] else None
        return StateRow(name, TableState(row["state"]), Lsn(row["lsn"]), row["reason"], table, row["at"])


def recover_tables(layout: Layout) -> Iterator[tuple[Location, tuple[str, ...]]]:
    """Repairs the change log, the ledgers and the feeds, by renaming incomplete files so that no reader uses them.
    Yields each folder, and the old names of the renamed files. Mirrors are repaired by
    :mod:`pgcdc_assets.mirror.delta`."""
    yield layout.change_log, recover_log(layout.change_log)
    for folder in (*layout.ledgers, layout.messages):
        yield folder, recover(folder).aside
    # The feeds come last: their tables are listed in the ledger of states, which is repaired above.
    for folder in map(layout.changes, TableStates(layout).all()):
        yield folder, recover(folder).aside
