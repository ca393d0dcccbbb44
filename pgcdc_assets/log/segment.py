"""Segments: the Parquet files of the log.

A segment is written before the end of its batch is known (an open transaction spills; the batch goes on), and never
rewritten: what is known only at the end stands once for each file, as tags of its add action. Format 1 had it in each
row, as a column ``batch_end`` that was patched when the batch was cut; such files are read as they are.

A segment's name ends in the CRC-32 of its bytes: without a checksum a flipped bit in a value reads as another value.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pgcdc_assets.core.location import Location
from pgcdc_assets.delta.datafile import FileReport, statistics
from pgcdc_assets.errors import LogCorrupt
from pgcdc_assets.log.rows import ABSENT, Rows
from pgcdc_assets.store import storage
from pgcdc_assets.store.scratch import DraftFile

LOG_SCHEMA = pa.schema(
    [
        ("commit_lsn", pa.int64()),
        ("tx_ordinal", pa.int32()),
        ("xid", pa.int64()),
        ("commit_ts", pa.timestamp("us", tz="UTC")),
        ("origin", pa.string()),
        ("lsn", pa.int64()),
        ("kind", pa.string()),
        ("relation_id", pa.int64()),
        ("schema_id", pa.int64()),
        ("payload", pa.binary()),
    ]
)
"""One row per stored message; what each column means stands in docs/concepts.md. All are nullable."""

SUMMARY = "#"
"""Kind of our own: the summary of a batch, JSON."""
FACTS = "="
"""Kind of our own: the catalog facts of a relation in force, JSON."""

OWN_FILE_BYTES = 4 << 20
"""A relation with this much of a segment gets a file of its own; the others share one. With 16 MiB
segments that is at most four files, and a reader of one table skips at least what a row group costs."""

FORMER_COLUMNS: Final = frozenset({"batch_end"})
"""Columns that files of format 1 have besides."""
FIRST_BATCH_END: Final = "pgcdc.first_batch_end"
LAST_BATCH_END: Final = "pgcdc.batch_end"
"""Tags of a file's add action: where the first and the last batch end that have rows in it."""
_CRC = re.compile(r"-([0-9a-f]{8})\.parquet$")
_CRC_BYTES = 1 << 20
_ROW_SCHEMA = LOG_SCHEMA.set(LOG_SCHEMA.get_field_index("payload"), pa.field("payload", pa.binary_view()))
_REPEATED = ["origin", "kind", "relation_id", "schema_id"]
_GROWING = ["commit_lsn", "tx_ordinal", "xid", "commit_ts", "lsn"]
_WRITING: dict[str, Any] = {
    "compression": "ZSTD",
    "compression_level": 1,
    "use_dictionary": _REPEATED,
    # Where transactions are small a dictionary of these is larger than they are, and costs a third of all writing.
    "column_encoding": dict.fromkeys(_GROWING, "DELTA_BINARY_PACKED"),
    "write_statistics": ["commit_lsn", "kind", "relation_id"],
    # Without the Arrow schema the payload's view type stays ours, and readers see plain binary.
    "store_schema": False,
}


def bounded(file: FileReport, first: int, last: int) -> FileReport:
    """With the ends of the first and the last batch that have rows in it."""
    return replace(file, tags={FIRST_BATCH_END: str(int(first)), LAST_BATCH_END: str(int(last))})


def clustered(rows: Rows) -> tuple[list[Rows], Rows]:
    """Rows split by relation: those with a large share each alone, and the others, sorted by relation."""
    if len(rows) == 0:
        return [], rows
    order = np.argsort(rows.relation_id, kind="stable")
    relation_id = rows.relation_id[order]
    starts = np.concatenate(([0], np.flatnonzero(np.diff(relation_id)) + 1))
    sizes = np.add.reduceat(rows.length[order], starts)
    ends = np.concatenate((starts[1:], [len(order)]))
    large = (sizes >= OWN_FILE_BYTES) & (relation_id[starts] != ABSENT)
    alone = [rows.take(order[starts[i] : ends[i]]) for i in np.flatnonzero(large)]
    shared = np.repeat(~large, ends - starts)
    return alone, rows.take(order[shared])


@dataclass(frozen=True)
class StagedSegment:
    """A segment whose content is durable, and which is not in the log's folder yet."""

    draft: DraftFile
    report: FileReport

    def put(self, folder: Location, first_end: int, last_end: int) -> FileReport:
        """Put it into the log's folder; it has rows of the batches from the one that ends at ``first_end`` on."""
        storage.put(self.draft, folder / self.report.path)
        return bounded(self.report, first_end, last_end)


def write_segment(draft: DraftFile, groups: Sequence[pa.Table]) -> StagedSegment:
    """Write one file, a row group per table of LOG_SCHEMA's columns (empty ones left out)."""
    held = [table for table in groups if table.num_rows]
    schema = held[0].schema if held else _ROW_SCHEMA
    with pq.ParquetWriter(draft.path, schema, **_WRITING) as writer:
        for table in held:
            writer.write_table(table, row_group_size=table.num_rows)
    draft.settle()
    crc, footer = _crc(draft.pieces()), pq.read_metadata(draft.path)
    report = FileReport(f"{uuid4().hex}-{crc:08x}.parquet", draft.size, footer.num_rows, statistics(footer, LOG_SCHEMA))
    return StagedSegment(draft, report)


def draft_name() -> str:
    """A name for a segment under way: its own has the checksum of its content."""
    return f"{uuid4().hex}.draft"


def check_content(path: Location) -> None:
    """Check that a segment holds the bytes that were written. LogCorrupt otherwise.

    The whole file is read. Where the name of a segment carries no checksum (an earlier version wrote it), only its
    readability is checked.
    """
    told = _CRC.search(path.name)
    try:
        found = _crc(_pieces(path))
    except OSError as error:
        raise LogCorrupt(f"cannot be read: {type(error).__name__}", thing=str(path)) from None
    if told is not None and found != int(told[1], 16):
        raise LogCorrupt("does not hold the bytes that were written: its checksum differs", thing=str(path))


def read_rows(path: Location, columns: Sequence[str] | None = None, filters: pc.Expression | None = None) -> pa.Table:
    """Rows of a segment, after :func:`check_content`: a reader of damaged Parquet may wait for ever.

    Without ``columns`` those of LOG_SCHEMA, in its order. A filter on the statistics of row groups leaves the others
    unread. Raises LogCorrupt.
    """
    check_content(path)
    try:
        columns = columns or LOG_SCHEMA.names
        return pq.read_table(storage.open_file(path), columns=columns, filters=filters, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise LogCorrupt(f"cannot be read: {type(error).__name__}", thing=str(path)) from None


def _crc(pieces: Iterable[bytes]) -> int:
    found = 0
    for piece in pieces:
        found = zlib.crc32(piece, found)
    return found


def _pieces(path: Location) -> Iterator[bytes]:
    with storage.open_file(path) as file:
        while piece := file.read(_CRC_BYTES):
            yield piece


def table_of(rows: Rows) -> pa.Table:
    """Rows as a table of the log's columns."""
    number = len(rows)
    in_transaction = rows.commit_lsn != ABSENT
    of_relation = rows.relation_id != ABSENT
    kind_ends = pa.py_buffer(np.arange(number + 1, dtype=np.int32))
    arrays = {
        "commit_lsn": _column("commit_lsn", rows.commit_lsn, in_transaction),
        "tx_ordinal": _column("tx_ordinal", rows.ordinal.astype(np.int32), in_transaction),
        "xid": _column("xid", rows.xid, in_transaction),
        "commit_ts": _column("commit_ts", rows.commit_ts, in_transaction),
        "origin": pa.nulls(number, pa.string()) if rows.origin is None else pa.array(rows.origin.tolist(), pa.string()),
        "lsn": _column("lsn", rows.lsn, rows.lsn != ABSENT),
        # One ASCII letter each.
        "kind": pa.Array.from_buffers(pa.string(), number, [None, kind_ends, pa.py_buffer(rows.kind.tobytes())]),
        "relation_id": _column("relation_id", rows.relation_id, of_relation),
        "schema_id": _column("schema_id", rows.schema_id, of_relation),
        "payload": rows.payload(),
    }
    return pa.table(arrays, schema=_ROW_SCHEMA)


def _column(name: str, values: NDArray[Any], valid: NDArray[np.bool_] | None = None) -> pa.Array:
    """Numbers as they lie in memory. ``pa.array`` of anything would import pandas, to ask whether it is one of its
    own: a third of a second of every receiver's first batch, and memory."""
    bits = None if valid is None or valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    held = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(_ROW_SCHEMA.field(name).type, len(values), [bits, held])


@dataclass(frozen=True)
class Note:
    """A row that belongs to a batch as a whole: R, Y, ``=`` or ``#``."""

    kind: str
    payload: bytes
    relation_id: int | None = None
    schema_id: int | None = None


def table_of_notes(notes: Sequence[Note]) -> pa.Table:
    absent = np.full(len(notes), ABSENT, dtype=np.int64)
    length = np.array([len(note.payload) for note in notes], dtype=np.int64)
    return table_of(Rows(
        raw=b"".join(note.payload for note in notes),
        offset=np.cumsum(length) - length,
        length=length,
        kind=np.array([ord(note.kind) for note in notes], dtype=np.uint8),
        commit_lsn=absent, ordinal=absent, xid=absent, commit_ts=absent, lsn=absent,
        relation_id=np.array([ABSENT if n.relation_id is None else n.relation_id for n in notes], dtype=np.int64),
        schema_id=np.array([ABSENT if n.schema_id is None else n.schema_id for n in notes], dtype=np.int64),
        origin=None,
    ))  # fmt: skip
