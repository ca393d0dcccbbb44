"""The two sides of a comparison as batches of text: a table under a snapshot, and the table's mirror at one version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError
from pyarrow import csv

from pgcdc_assets.checks.rendering import Rendering, rendering, with_raw
from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.encoding import Encoding
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.names import TableName, quoted
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.errors import LakeError, ProtocolError
from pgcdc_assets.feed.events import not_text
from pgcdc_assets.feed.schema import LEAF, RAW
from pgcdc_assets.mirror.delta.rowgroups import live_rows
from pgcdc_assets.protocol.text.strings import NotText, decoded
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.snapshot.pieces import Piece, pieces
from pgcdc_assets.source.snapshot.reading import copy_blocks
from pgcdc_assets.store import storage

READ_EXACTLY: Final = {"datafusion.execution.parquet.coerce_int96": "us"}
"""Setting for DataFusion. If a user runs OPTIMIZE in Spark, Spark writes timestamps as INT96. By default, DataFusion
reads INT96 as nanoseconds, so timestamps before 1678 and after 2261 would be wrong."""
_UNKNOWN: Final = frozenset({"typeWidening"})
"""Delta features. delta-rs opens a table with one of these features, but cannot query it."""

_BLOCK_BYTES = 8 << 20
"""Bytes of CSV read at a time: large enough for Arrow's reader, and a small part of the process's memory."""


_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 8192
"""Rows of a mirror that are read at a time. Wide rows are read in smaller batches."""
_UNPACKED = 8
"""An upper estimate: rows take up to this many times more space in memory than in Parquet files."""


_PIECE_BYTES = 64 << 20
"""Size on the source's disk of a piece, the part of a table that is read at a time. If another session waits for a lock
on the table, reading is interrupted, and the piece is read again later."""
_MOST_ENTRIES: Final = 1664
"""The most columns that one SELECT can return (MaxTupleAttributeNumber). A table may have 1,600 columns."""


@dataclass(frozen=True)
class Batch:
    """A batch of rows: one array of comparable text per column. ``shown``: the key's columns in readable form, by their
    index. For a key column without a readable form, the comparable text is shown."""

    rows: int
    texts: list[pa.Array]
    shown: dict[int, pa.Array]


@contextmanager
def readable(name: TableName) -> Iterator[None]:
    """Raises LakeError in place of the query engine's own errors, if the mirror cannot be read."""
    try:
        yield
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise LakeError(
            f"cannot be read ({type(error).__name__})",
            thing=f"mirror {name}",
            do=f"run `pgcdc snapshot {name.shell}`",
        ) from error


Part = Callable[[], Iterator[Batch]]


class Side(Protocol):
    def parts(self, *, shown: bool) -> Iterator[Part]:
        """Functions that each read a part of the rows. Call them one after another, each through
        :func:`pgcdc_assets.source.snapshot.reading.read_whole`."""


@dataclass(frozen=True)
class Comparison:
    """The compared part of a table: its published columns and, if it is partitioned, the name of each row's leaf."""

    table: Table
    renderings: tuple[Rendering, ...]
    leaves: bool
    """Whether the leaf's name is compared. False if the table is not partitioned, or if rows are published via the root
    and so without a leaf's name."""
    called: Mapping[TableName, TableName] = field(default_factory=dict)
    """Each leaf's name at the time of the mirror's copy. The mirror keeps this name if the leaf is renamed later."""

    @classmethod
    def of(
        cls, table: Table, mirror: pa.Schema, *, via_root: bool = False, copied: Table | None = None
    ) -> Comparison:  # fmt: skip
        kinds = {field.name: field.type for field in mirror}
        renderings = tuple(rendering(column, kinds.get(column.name)) for column in table.columns)
        names = {leaf.oid: leaf.name for leaf in (copied.leaves if copied else ())}
        called = {leaf.name: names[leaf.oid] for leaf in table.leaves if leaf.oid in names}
        return cls(table, renderings, table.partitioned and not via_root, called)

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.renderings] + ([LEAF] if self.leaves else [])

    @property
    def key(self) -> list[int]:
        """Indexes of the key's columns, or of all columns if there is no key."""
        key = [place for place, column in enumerate(self.table.columns) if column.attnum in self.table.key]
        return key or list(range(len(self.names)))


@dataclass(frozen=True)
class SourceSide:
    """The published rows of a table under an exported snapshot, as PostgreSQL renders them."""

    conninfo: str
    snapshot: str
    comparison: Comparison

    def parts(self, *, shown: bool) -> Iterator[Part]:
        """See :meth:`Side.parts`. Raises CopyOutdated if the table was changed so that the snapshot no longer shows its
        rows, and CopyBlocked if another session's lock prevents reading."""
        with connect(self.conninfo, application_name=f"{APPLICATION}/verify") as conn:
            cut = pieces(conn, self.comparison.table, _PIECE_BYTES)
        for piece in cut:
            yield partial(self._rows_of, piece, shown)

    def _rows_of(self, piece: Piece, shown: bool) -> Iterator[Batch]:
        renderings = self.comparison.renderings
        expressions = [column.source for column in renderings]
        places = [place for place in self.comparison.key if shown and place < len(renderings)]
        if len(expressions) + len(places) > _MOST_ENTRIES:
            places = []
        expressions += [renderings[place].shown for place in places]
        names = [column.name for column in renderings] + [renderings[place].name for place in places] or [""]
        # Select an empty string for a table without columns: its rows are still counted.
        chosen = replace(piece, columns=", ".join(expressions) or "''")
        for block in copy_blocks(self.conninfo, self.snapshot, chosen, _BLOCK_BYTES):
            fields = _parsed(block, len(names), self.comparison.table.name)
            columns = [self._text(field, name, Encoding.of(piece.encoding))
                       for field, name in zip(fields, names, strict=True)]  # fmt: skip
            texts = columns[: len(renderings)]
            values = dict(zip(places, columns[len(renderings) :], strict=False))
            if self.comparison.leaves:
                leaf = str(self.comparison.called.get(piece.leaf, piece.leaf) if piece.leaf else None)
                texts.append(pa.repeat(pa.scalar(leaf, pa.large_string()), len(columns[0])))
            yield Batch(len(columns[0]), texts, values)

    def _text(self, field: pa.BinaryArray, name: str, encoding: Encoding) -> pa.LargeStringArray:
        try:
            return decoded(field, encoding).cast(pa.large_string())
        except NotText:
            thing = f"table {self.comparison.table.name}"
            raise ProtocolError(not_text(name, encoding, {}), thing=thing) from None


def queryable(table: DeltaVersion) -> bool:
    """Whether delta-rs's query engine can read the table."""
    return not table.features & _UNKNOWN


def opened(folder: Location, version: int) -> DeltaTable:
    """One version of a table. Raises delta-rs's own errors."""
    return DeltaTable(folder.text, version=version, storage_options=storage.options(folder) or None)


@dataclass(frozen=True)
class MirrorSide:
    """A mirror at one version, read by DataFusion, which handles deletion vectors and mapped column names."""

    mirror: DeltaTable
    comparison: Comparison
    by_files: DeltaVersion | None = None
    """Set if DataFusion cannot read ``mirror``: the same version, whose files are then read one by one."""

    def parts(self, *, shown: bool) -> Iterator[Part]:
        """See :meth:`Side.parts`. Raises LakeError if the mirror's files are missing or damaged."""
        for batch in self._batches(shown):
            yield partial(iter, (batch,))

    def _batches(self, shown: bool) -> Iterator[Batch]:
        batches = self._read()
        while True:
            with readable(self.comparison.table.name):
                batch = next(batches, None)
            if batch is None:
                return
            raw = batch.column(0)
            values = [batch.column(1 + place) for place in range(len(self.comparison.renderings))]
            texts = [
                with_raw(column.text(value), value, raw, column.name)
                for column, value in zip(self.comparison.renderings, values, strict=True)
            ]
            leaves = [batch.column(batch.num_columns - 1)] if self.comparison.leaves else []
            places = [place for place in self.comparison.key if shown and place < len(values)]
            yield Batch(batch.num_rows, [*texts, *leaves], {place: values[place] for place in places})

    def _read(self) -> Iterator[pa.RecordBatch]:
        return self._by_engine() if self.by_files is None else self._from_files(self.by_files)

    def _from_files(self, table: DeltaVersion) -> Iterator[pa.RecordBatch]:
        names = [RAW, *(column.name for column in self.comparison.renderings)]
        names += [LEAF] if self.comparison.leaves else []
        for rows in live_rows(table):
            lacking = pa.nulls(rows.num_rows, pa.string())
            columns = [rows[name] if name in rows.column_names else lacking for name in names]
            chosen = pa.table(columns, names=[f"c{place}" for place in range(len(names))])
            yield from chosen.to_batches(self._rows_a_batch())

    def _by_engine(self) -> Iterator[pa.RecordBatch]:
        expressions = [quoted(RAW), *(column.mirror for column in self.comparison.renderings)]
        expressions += [quoted(LEAF)] if self.comparison.leaves else []
        chosen = ", ".join(f"{expression} AS c{place}" for place, expression in enumerate(expressions))
        query = f"SELECT {chosen} FROM mirror"  # noqa: S608 (quoted)
        engine = QueryBuilder({**READ_EXACTLY, "datafusion.execution.batch_size": str(self._rows_a_batch())})
        yield from pa.RecordBatchReader.from_stream(engine.register("mirror", self.mirror).execute(query))

    def _rows_a_batch(self) -> int:
        files = pa.table(self.mirror.get_add_actions(flatten=True))
        size, rows = pc.sum(files["size_bytes"]).as_py() or 0, pc.sum(files["num_records"]).as_py() or 1
        return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, size * _UNPACKED // rows)))


def _parsed(block: bytes, columns: int, table: TableName) -> list[pa.BinaryArray]:
    names = [f"c{place}" for place in range(columns)]
    try:
        parsed = csv.read_csv(
            pa.BufferReader(block),
            read_options=csv.ReadOptions(column_names=names, block_size=len(block) + 1),
            # Keep empty lines: a row whose only column is NULL is an empty line.
            parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.binary()),
                null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False,
            ),
        )  # fmt: skip
    except pa.ArrowInvalid:
        # Arrow's message is left out, because it quotes the row.
        raise ProtocolError(
            "the source sent rows of this table that are not valid CSV", thing=f"table {table}"
        ) from None
    return [parsed.column(name).combine_chunks() for name in names]
