"""A small Delta table that only grows, in the order of its rows' times: states and consistent points.

Written by delta-rs alone, under the lake's lock, a commit of milliseconds per row; read file by file,
newest first, so that asking for the last row costs the same however long the table is.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.files import DataFile, FileReport, commit

AT: Final = pa.field("at", pa.timestamp("us", "UTC"))
"""When the row was written; strictly rising, whatever the clock does: the order of the rows."""

MOST_FILES: Final = 100
"""Then the small ones are merged."""
SMALL_ROWS: Final = 1000
"""A file of this many rows is left alone, so that each row is merged a few times at most."""

_PROPERTIES: dict[str, str | None] = {
    # A commit a turn makes tens of thousands of files a day; nobody asks for an older version.
    "delta.logRetentionDuration": "interval 1 days",
}


class Ledger:
    """``schema`` must hold ``AT``. The folder is made with the first row."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self._schema = schema
        self._table: DeltaTable | None = None
        self._read: dict[str, pa.Table] = {}

    def newest_first(self) -> Iterator[pa.Table]:
        """The rows by file: within one in order, and no later file has a newer row."""
        for name, _ in self._files():
            yield self._rows(name)

    def rows(self) -> pa.Table:
        """All rows, oldest first."""
        return pa.concat_tables([self._schema.empty_table(), *reversed(list(self.newest_first()))])

    def version(self) -> int:
        """-1 before the first row. Looks at the folder, not at what was read before."""
        table = self._opened()
        return -1 if table is None else int(table.version())

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add rows, without their ``at``, in one commit."""
        if not DeltaTable.is_deltatable(str(self.path)):
            DeltaTable.create(self.path, self._schema, mode="ignore", configuration=_PROPERTIES)
        at = self._now()
        stamped = [{**row, AT.name: at + timedelta(microseconds=place)} for place, row in enumerate(rows)]
        report = self._write(pa.Table.from_pylist(stamped, schema=self._schema))
        commit(self.path, [report], "append", {})
        if len(self._files()) > MOST_FILES:
            self._merge()

    def keep(self, ats: Collection[datetime]) -> int:
        """Remove the rows but those of these times, in one commit; how many went."""
        wanted = pa.array(list(ats), AT.type)
        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = []
        gone = 0
        for name, _ in self._files():
            rows = self._rows(name)
            kept = rows.filter(pc.is_in(rows[AT.name], value_set=wanted))
            if len(kept) == len(rows):
                continue
            gone += len(rows) - len(kept)
            actions.append(RemoveAction(name, True, now))
            if len(kept):
                report = self._write(kept)
                actions.append(AddAction(report.path, report.size, {}, now, True, report.stats))
        if actions:
            self._commit(actions)
        return gone

    def _now(self) -> datetime:
        last = next((rows[AT.name][-1].as_py() for rows in self.newest_first()), None)
        now = datetime.now(UTC)
        return now if last is None else max(now, last + timedelta(microseconds=1))

    def _opened(self) -> DeltaTable | None:
        if self._table is not None:
            self._table.update_incremental()
            return self._table
        try:
            self._table = DeltaTable(self.path)
        except TableNotFoundError:
            return None
        return self._table

    def _files(self) -> list[tuple[str, int]]:
        """Name and number of rows of each live file, the newest first."""
        table = self._opened()
        if table is None:
            return []
        actions = pa.table(table.get_add_actions(flatten=True)).sort_by([(f"max.{AT.name}", "descending")])
        files = list(zip(actions["path"].to_pylist(), actions["num_records"].to_pylist(), strict=True))
        live = {name for name, _ in files}
        self._read = {name: rows for name, rows in self._read.items() if name in live}
        return files

    def _rows(self, name: str) -> pa.Table:
        if name not in self._read:
            try:
                rows = pq.read_table(self.path / name, partitioning=None)
            except (OSError, pa.ArrowInvalid) as error:
                raise LakeError(f"cannot be read: {type(error).__name__}", thing=str(self.path / name)) from None
            self._read[name] = rows.cast(self._schema)
        return self._read[name]

    def _write(self, rows: pa.Table) -> FileReport:
        with DataFile(self.path, self._schema) as file:
            file.write(rows.columns)
            report = file.finish()
        assert report is not None
        return report

    def _merge(self) -> None:
        """Small files into one, in a commit that changes no data."""
        small = [name for name, count in self._files() if count < SMALL_ROWS]
        report = self._write(pa.concat_tables([self._rows(name) for name in reversed(small)]))
        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [AddAction(report.path, report.size, {}, now, False, report.stats)]
        actions += [RemoveAction(name, False, now) for name in small]
        self._commit(actions)

    def _commit(self, actions: list[AddAction | RemoveAction]) -> None:
        table = self._opened()
        assert table is not None
        try:
            table.create_write_transaction(actions, "append", table.schema())
        except CommitFailedError:
            raise LakeError("another writer committed at the same time", thing=str(self.path)) from None
