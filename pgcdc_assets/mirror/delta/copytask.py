"""A Spark task of a copy: reads pieces of tables from the source by COPY, converts the CSV, and writes files of the
mirrors. A piece is a range of a table's pages, or a whole table. Imported by Spark's workers, so it must not import
Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv

from pgcdc_assets.core.arrays import whole
from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.encoding import UTF8, Encoding
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.delta.mapping import Columns
from pgcdc_assets.errors import LakeError, MachineError, PgcdcError, ProtocolError
from pgcdc_assets.failures import of_one_table
from pgcdc_assets.feed.events import not_text
from pgcdc_assets.feed.schema import COMMIT_LSN, COMMIT_TS, HASH, LEAF, RAW, ROW
from pgcdc_assets.mirror.delta.mirrorschema import own_fields
from pgcdc_assets.protocol.text.strings import NotText, decoded
from pgcdc_assets.protocol.text.typed import row_hash, row_identities, typed
from pgcdc_assets.source.connect.route import SourceRoute
from pgcdc_assets.source.snapshot.pieces import Piece
from pgcdc_assets.source.snapshot.reading import Interrupted, copy_blocks, read_whole

BLOCK_BYTES: Final = 8 << 20
"""Bytes of CSV that a task converts at a time, and writes as one row group. This limits the task's memory to about
100 MB."""


@dataclass(frozen=True)
class CopyTarget:
    """Where the files of one table are written. ``schema``: the columns, under the names that the files use.
    ``commit_lsn``: the LSN of the snapshot, which all rows get."""

    table: Table
    folder: Location
    schema: pa.Schema
    commit_lsn: int
    columns: Columns | None = None
    """The mirror's new columns, if the copy changes them; otherwise None."""


CopyPart = tuple[Table, tuple[Piece, ...]]
"""A table and some of its pieces. A partitioned table without partitions has no pieces."""


@dataclass(frozen=True)
class CopyTask:
    """Pieces of one or several tables. The task reads them one after another."""

    route: SourceRoute
    snapshot: str
    parts: tuple[CopyPart, ...]
    targets: dict[TableName, CopyTarget] = field(default_factory=dict)

    @property
    def bytes_estimate(self) -> int:
        return sum(piece.bytes_estimate for _, cut in self.parts for piece in cut)


@dataclass(frozen=True)
class WrittenPart:
    """The result of one task for one table."""

    table: TableName
    file: FileReport | None = None
    error: PgcdcError | None = None
    bytes_estimate: int = 0
    """Size of the pieces on the source's disk."""


def rows_written(parts: list[WrittenPart]) -> int:
    return sum(part.file.rows for part in parts if part.file is not None)


def bytes_read(parts: list[WrittenPart]) -> int:
    return sum(part.bytes_estimate for part in parts)


def copy_parts(task: CopyTask) -> list[WrittenPart]:
    with task.route.here() as conninfo:
        return [_copy_part(conninfo, task.snapshot, task.targets[table.name], cut) for table, cut in task.parts]


def _copy_part(conninfo: str, snapshot: str, target: CopyTarget, cut: Sequence[Piece]) -> WrittenPart:
    try:
        report = read_whole(lambda: _file(conninfo, snapshot, target, cut))
        passed(FaultPoint.PIECE_COPIED)
        return WrittenPart(target.table.name, report, bytes_estimate=sum(piece.bytes_estimate for piece in cut))
    except MachineError:
        # This error concerns all tables, but perhaps only on this machine of the cluster. The caller adds the machine's
        # name.
        raise
    except Exception as error:
        if (failure := copy_failure(target.table.name, error)) is None:
            raise
        return WrittenPart(target.table.name, error=failure)


def copy_failure(name: TableName, error: Exception) -> PgcdcError | None:
    """The failure of one table's copy; None if the error concerns all tables."""
    if isinstance(error, PgcdcError):
        return error
    failure = of_one_table(error)
    return None if failure is None else LakeError(failure, thing=f"copy of {name}")


def _file(conninfo: str, snapshot: str, target: CopyTarget, cut: Sequence[Piece]) -> FileReport | None:
    """Read the pieces, and write their rows to one file. If the connection is interrupted, the file is deleted, and the
    caller reads all pieces again."""
    own = tuple(one.name for one in own_fields(target.table))
    reader = BlockReader(target.table, own, target.commit_lsn)
    with DataFile(target.folder, target.schema) as file:
        try:
            for piece in cut:
                encoding = Encoding.of(piece.encoding)
                for block in copy_blocks(conninfo, snapshot, piece, BLOCK_BYTES):
                    file.write(reader.columns(block, piece.leaf, encoding))
        except Interrupted:
            file.discard()
            raise
        return file.finish()


@dataclass(frozen=True)
class BlockReader:
    """Converts blocks of CSV to rows of a mirror. All rows get the snapshot's LSN as ``commit_lsn``, because it is not
    known which transactions wrote them."""

    table: Table
    own: tuple[str, ...]
    """Names of the columns that pgcdc adds, in the mirror's order."""
    commit_lsn: int

    def columns(
        self, block: bytes, leaf: TableName | None, encoding: Encoding = UTF8
    ) -> list[pa.Array | pa.ChunkedArray]:  # fmt: skip
        """A block's rows, as columns in the mirror's order. ProtocolError for a value that is not text in
        ``encoding``."""
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
        """The CSV as columns of bytes, and the number of rows. An empty field without quotes is NULL; with quotes, it
        is an empty string."""
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
            # Arrow's message is left out, because it contains the row.
            raise ProtocolError("received rows that are not valid CSV", thing=f"copy of {self.table.name}") from None
        return [whole(column) for column in table.columns], table.num_rows
