"""Converts a block of CSV to the mirror's columns, in the tasks of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import csv

from pgcdc_assets.core.arrays import whole
from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.encoding import UTF8, Encoding
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.feed.events import not_text
from pgcdc_assets.feed.schema import COMMIT_LSN, COMMIT_TS, HASH, LEAF, RAW, ROW
from pgcdc_assets.protocol.text.encoded import NotText, decoded
from pgcdc_assets.protocol.text.typed import row_hash, row_identities, typed


@dataclass(frozen=True)
class BlockReader:
    """``commit_lsn`` of all rows is the copy's consistent point, because the transactions that wrote them are not
    known."""

    table: Table
    own: tuple[str, ...]
    """Names of our columns, in the mirror's order."""
    commit_lsn: int

    def columns(
        self, block: bytes, leaf: TableName | None, encoding: Encoding = UTF8
    ) -> list[pa.Array | pa.ChunkedArray]:  # fmt: skip
        """The rows of a block in the mirror's order of columns. ProtocolError for a value that is not text in its
        encoding."""
        names = [column.name for column in self.table.columns]
        fields, rows = self._fields(block)
        text = [self._text(fields, place, encoding) for place in range(len(fields))]
        done = typed(text, self.table.columns, rows)
        ours: dict[str, Any] = {
            COMMIT_LSN: lambda: pa.repeat(pa.scalar(self.commit_lsn, pa.int64()), rows),
            COMMIT_TS: lambda: pa.nulls(rows, pa.timestamp("us", "UTC")),
            RAW: lambda: done.raw,
            LEAF: lambda: pa.repeat(pa.scalar(None if leaf is None else str(leaf), pa.string()), rows),
            ROW: lambda: row_identities(rows),
            HASH: lambda: row_hash(text, names, rows),
        }
        return [*done.values, *(ours[name]() for name in self.own)]

    def _text(self, fields: Sequence[pa.BinaryArray], place: int, encoding: Encoding) -> pa.StringArray:
        try:
            return decoded(fields[place], encoding)
        except NotText as error:
            columns = self.table.columns
            row = [decoded(field.slice(error.row, 1), encoding, shown=True)[0].as_py() for field in fields]
            key = {column.name: row[at] for at, column in enumerate(columns) if column.attnum in self.table.key}
            raise ProtocolError(not_text(columns[place].name, encoding, key),
                                thing=f"copy of {self.table.name}") from None  # fmt: skip

    def _fields(self, block: bytes) -> tuple[list[pa.BinaryArray], int]:
        """The CSV as columns of bytes: an empty unquoted field is NULL, any quoted field is not."""
        places = [str(place) for place in range(len(self.table.columns))]
        if not places:
            # The rows of a table without columns are empty lines.
            return [], block.count(b"\n")
        try:
            table = csv.read_csv(
                pa.BufferReader(block),
                csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=places),
                csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
                csv.ConvertOptions(
                    column_types=dict.fromkeys(places, pa.binary()),
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid:
            # Arrow's message quotes the row.
            raise ProtocolError("sent rows that are no CSV", thing=f"copy of {self.table.name}") from None
        return [whole(column) for column in table.columns], table.num_rows
