"""A ledger: a small Delta table to which rows are added, in the order of their times. Only maintenance removes rows.

A ledger is written under the lake's lock. Appending rows is one Delta commit, which takes milliseconds and is durable
when the call returns. Files are read newest first, so to read the last row takes the same time for a table of any
length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby, takewhile
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import Schema

from pgcdc_assets.core.formats import EPOCH, FORMAT, FORMAT_PROPERTY, MALFORMED, check_format, reading
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.delta.commit import commit_files, commit_rewritten, replace_files, settle
from pgcdc_assets.delta.datafile import DataFile, FileReport, opened_parquet
from pgcdc_assets.delta.definition import create_table
from pgcdc_assets.delta.log import Added, DeltaLog, DeltaVersion
from pgcdc_assets.delta.sweep import sweep
from pgcdc_assets.errors import CommitLost, LakeError

AT: Final = pa.field("at", pa.timestamp("us", "UTC"))
"""When the row was written. Times strictly increase, even if the clock is set back."""


@dataclass(frozen=True)
class Merging:
    """When the files of a ledger are merged."""

    most_files: int = 100
    """If there are more small files than this, the small files are merged into one file. Large files are not merged."""
    small_rows: int = 1000
    """A file with at least this many rows is large. Large files are not merged again, so each row is merged only a few
    times."""


_PROPERTIES: Final = {
    FORMAT_PROPERTY: FORMAT,
    # One commit per turn makes tens of thousands of log files a day. Nobody reads older versions.
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}


Staying = Callable[["LedgerFile"], pa.BooleanArray]
"""Returns, for each row of a file, whether the row stays. Called for each file, from the newest to the oldest."""


@dataclass(frozen=True)
class LedgerFile:
    """One file of a ledger."""

    added: Added
    _folder: Location
    _schema: pa.Schema

    def rows(self, *names: str) -> pa.Table:
        """Reads the file's rows in order, with these columns (default: all). Raises LakeError on failure."""
        wanted = pa.schema([self._schema.field(name) for name in names]) if names else self._schema
        path = self._folder / self.added.path
        try:
            with opened_parquet(path) as file:
                return file.read(columns=wanted.names).cast(wanted)
        except (OSError, *MALFORMED) as error:
            raise LakeError(f"cannot be read: {type(error).__name__}", thing=str(path)) from None

    @property
    def count(self) -> int:
        return self.added.rows or 0

    def lowest(self, name: str) -> int:
        """Returns the lowest value of an integer column, from the statistics of the file."""
        with reading(f"ledger file {self._folder / self.added.path}"):
            return int(json.loads(self.added.action["stats"])["minValues"][name])


class Ledger:
    """The ledger in the folder ``path``. The table is created with its first row. ``schema`` must contain ``AT``."""

    def __init__(self, path: Location, schema: pa.Schema, merging: Merging | None = None) -> None:
        self.path = path
        self._merging = merging or Merging()
        self._schema = schema
        self._log = DeltaLog(path)
        self._read: dict[str, pa.Table] = {}

    def newest_first(self) -> Iterator[pa.Table]:
        """Yields the rows of each file, newest file first. Within a file, the oldest row comes first. Keeps the rows in
        memory for later calls."""
        for file in self.files():
            yield self._rows(file)

    def files(self) -> list[LedgerFile]:
        """Returns the live files, newest first."""
        table = self._newest()
        with reading(f"ledger {self.path}"):
            live = sorted(table.files, key=_last, reverse=True) if table is not None else []
        names = {file.path for file in live}
        self._read = {name: rows for name, rows in self._read.items() if name in names}
        return [LedgerFile(file, self.path, self._schema) for file in live]

    def rows(self) -> pa.Table:
        """Returns all rows, oldest first. Reads all files at once, so it is only for a ledger that is known to be
        short."""
        nothing = pa.Table.from_batches([], self._schema)
        return pa.concat_tables([nothing, *(file.rows() for file in reversed(self.files()))])

    def version(self) -> int:
        """Returns the table's newest version, read from its folder at each call; -1 before the first row."""
        table = self._newest()
        return -1 if table is None else table.number

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Adds rows in one Delta commit, which is durable when this returns. Sets the ``at`` of each row."""
        if self._newest() is None:
            with suppress(CommitLost):
                create_table(self.path, Schema.from_arrow(self._schema), _PROPERTIES, {}, self.path.parent)
        at = self._now()
        stamped = [{**row, AT.name: at + timedelta(microseconds=place)} for place, row in enumerate(rows)]
        report = self._write(pa.Table.from_pylist(stamped, schema=self._schema))
        commit_files(self._table, [report], "append", {})
        settle([self.path])
        small = self._small()
        if len(small) > self._merging.most_files:
            self._merge(small)

    def keep(self, staying: Staying) -> int:
        """Removes the rows for which ``staying`` is false, in one Delta commit. Returns the number of removed rows. A
        file that loses rows is merged with its neighbours that are small or also lose rows. Files that are not
        neighbours are not merged, because the times of two files must not overlap."""
        gone: list[Added] = []
        left: list[FileReport] = []
        count = 0
        masks = ((file, staying(file)) for file in self.files())
        large = self._merging.small_rows
        for alone, neighbours in groupby(masks, key=lambda one: one[0].count >= large and pc.all(one[1]).as_py()):
            held = [] if alone else list(neighbours)
            going = sum(len(mask) - (pc.sum(mask).as_py() or 0) for _, mask in held)
            if not going:
                continue
            count += going
            gone += [file.added for file, _ in held]
            rows = pa.concat_tables([file.rows().filter(mask) for file, mask in reversed(held)])
            if len(rows):
                left.append(self._write(rows))
        if gone:
            replace_files(self._table, gone, left, {})
            settle([self.path])
        return count

    def _newest(self) -> DeltaVersion | None:
        """Returns the table's newest version; None before the first row. Raises UnknownFormat for another format."""
        table = self._log.newest()
        if table is not None:
            check_format(table.configuration.get(FORMAT_PROPERTY), f"ledger {self.path}")
        return table

    def _now(self) -> datetime:
        last = next((rows[AT.name][-1].as_py() for rows in self.newest_first()), None)
        now = datetime.now(UTC)
        return now if last is None else max(now, last + timedelta(microseconds=1))

    @property
    def _table(self) -> DeltaVersion:
        table = self._newest()
        assert table is not None
        return table

    def _small(self) -> list[LedgerFile]:
        """Returns the small files that are newer than the newest large file. Only these are merged, because a merged
        file must not contain both rows that are older and rows that are newer than a large file."""
        return list(takewhile(lambda file: file.count < self._merging.small_rows, self.files()))

    def _rows(self, file: LedgerFile) -> pa.Table:
        name = file.added.path
        if name not in self._read:
            self._read[name] = file.rows()
        return self._read[name]

    def _write(self, rows: pa.Table) -> FileReport:
        with DataFile(self.path, self._schema) as file:
            file.write(rows.columns)
            report = file.finish()
        assert report is not None
        return report

    def _merge(self, small: Sequence[LedgerFile]) -> None:
        report = self._write(pa.concat_tables([self._rows(file) for file in reversed(small)]))
        commit_rewritten(self._table, [file.added for file in small], [report])
        settle([self.path])


def sweep_ledgers(layout: Layout, grace: timedelta) -> None:
    """Deletes the files that no recent version of the ledgers needs (:func:`pgcdc_assets.delta.sweep.sweep`)."""
    for folder in layout.ledgers:
        sweep(folder, grace)


def entries(rows: pa.Table) -> list[dict[str, Any]]:
    """Returns rows as Python objects.

    Reads times as numbers: to make a Python object of a time with a time zone, pyarrow imports pandas, which takes 0.2
    s in a new process. ``pa.array``, ``pa.scalar``, ``to_numpy`` and computing with a Python value import pandas too.
    Code that ``pgcdc status`` and ``Lake.at`` call avoids all of these functions.
    """
    place = rows.schema.get_field_index(AT.name)
    found = rows.set_column(place, AT.name, rows[AT.name].cast(pa.int64())).to_pylist()
    return [{**row, AT.name: EPOCH + timedelta(microseconds=row[AT.name])} for row in found]


def _last(file: Added) -> str:
    """Returns the time of the newest row of a file, as text. These texts sort in the order of the times."""
    return str(json.loads(file.action["stats"])["maxValues"][AT.name])
