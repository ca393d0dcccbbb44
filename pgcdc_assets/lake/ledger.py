"""A small Delta table that only grows, in the order of its rows' times: states and consistent points.

Written under the lake's lock, a commit of milliseconds per row, durable when it returns; read file by file,
newest first, so that asking for the last row costs the same however long the table is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema

from pgcdc_assets.core.durable import sync_file, sync_folders, up_to
from pgcdc_assets.core.layout import DELTA_LOG, commit_name
from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.deltacommit import commit_compaction, commit_files, replace_files, settle
from pgcdc_assets.lake.deltalog import Added, DeltaLog, DeltaVersion
from pgcdc_assets.lake.files import DataFile, FileReport

AT: Final = pa.field("at", pa.timestamp("us", "UTC"))
"""When the row was written; strictly rising, whatever the clock does: the order of the rows."""

MOST_FILES: Final = 100
"""Then the small ones are merged."""
SMALL_ROWS: Final = 1000
"""A file of this many rows is left alone, so that each row is merged a few times at most."""

_PROPERTIES: dict[str, str | None] = {
    # A commit a turn makes tens of thousands of files a day; nobody asks for an older version.
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}


class Ledger:
    """``schema`` must hold ``AT``. The folder is made with the first row."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self._schema = schema
        self._log = DeltaLog(path)
        self._read: dict[str, pa.Table] = {}

    def newest_first(self) -> Iterator[pa.Table]:
        """The rows by file: within one in order, and no later file has a newer row."""
        for file in self._files():
            yield self._rows(file.path)

    def rows(self) -> pa.Table:
        """All rows, oldest first."""
        return pa.concat_tables([self._schema.empty_table(), *reversed(list(self.newest_first()))])

    def version(self) -> int:
        """-1 before the first row. Looks at the folder, not at what was read before."""
        table = self._log.newest()
        return -1 if table is None else table.number

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Add rows, without their ``at``, in one commit; durable when this returns."""
        self._prepare()
        at = self._now()
        stamped = [{**row, AT.name: at + timedelta(microseconds=place)} for place, row in enumerate(rows)]
        report = self._write(pa.Table.from_pylist(stamped, schema=self._schema))
        commit_files(self._table, [report], "append", {})
        settle([self.path])
        if len(self._files()) > MOST_FILES:
            self._merge()

    def keep(self, ats: Collection[datetime]) -> int:
        """Remove the rows but those of these times, in one commit; how many went."""
        wanted = pa.array(list(ats), AT.type)
        gone: list[Added] = []
        left: list[FileReport] = []
        count = 0
        for file in self._files():
            rows = self._rows(file.path)
            kept = rows.filter(pc.is_in(rows[AT.name], value_set=wanted))
            if len(kept) == len(rows):
                continue
            count += len(rows) - len(kept)
            gone.append(file)
            if len(kept):
                left.append(self._write(kept))
        if gone:
            replace_files(self._table, gone, left, {})
            settle([self.path])
        return count

    def _prepare(self) -> None:
        """Make the table where there is none, and give one of an older version the columns that came since."""
        table = self._log.newest()
        if table is None:
            DeltaTable.create(self.path, self._schema, mode="ignore", configuration=_PROPERTIES)
            self._made(up_to(self.path, self.path.parent))
            return
        have = {field.name for field in table.schema.fields}
        new = [field for field in Schema.from_arrow(self._schema).fields if field.name not in have]
        if new:
            DeltaTable(self.path).alter.add_columns(new)
            self._made([self.path])

    def _made(self, folders: Sequence[Path]) -> None:
        """delta-rs syncs nothing."""
        log = self.path / DELTA_LOG
        sync_file(log / commit_name(self._table.number))
        sync_folders([log, *folders])

    def _now(self) -> datetime:
        last = next((rows[AT.name][-1].as_py() for rows in self.newest_first()), None)
        now = datetime.now(UTC)
        return now if last is None else max(now, last + timedelta(microseconds=1))

    @property
    def _table(self) -> DeltaVersion:
        table = self._log.newest()
        assert table is not None
        return table

    def _files(self) -> list[Added]:
        """The live files, that of the newest rows first."""
        table = self._log.newest()
        files = sorted(table.files, key=_last, reverse=True) if table is not None else []
        live = {file.path for file in files}
        self._read = {name: rows for name, rows in self._read.items() if name in live}
        return files

    def _rows(self, name: str) -> pa.Table:
        if name not in self._read:
            try:
                rows = pq.read_table(self.path / name, partitioning=None)
            except (OSError, pa.ArrowInvalid) as error:
                raise LakeError(f"cannot be read: {type(error).__name__}", thing=str(self.path / name)) from None
            self._read[name] = _widened(rows, self._schema).cast(self._schema)
        return self._read[name]

    def _write(self, rows: pa.Table) -> FileReport:
        with DataFile(self.path, self._schema) as file:
            file.write(rows.columns)
            report = file.finish()
        assert report is not None
        return report

    def _merge(self) -> None:
        """Small files into one, in a commit that changes no data."""
        small = [file for file in self._files() if (file.rows or 0) < SMALL_ROWS]
        report = self._write(pa.concat_tables([self._rows(file.path) for file in reversed(small)]))
        commit_compaction(self._table, small, report)
        settle([self.path])


def _widened(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows of an older version's file, with nothing in the columns that came since."""
    nothing = {field.name: pa.nulls(len(rows), field.type) for field in schema if field.name not in rows.column_names}
    return pa.table({name: nothing[name] if name in nothing else rows[name] for name in schema.names})


def _last(file: Added) -> str:
    """When the newest row of a file was written. Such texts sort as the times do."""
    return str(json.loads(file.action["stats"])["maxValues"][AT.name])
