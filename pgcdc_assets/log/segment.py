"""Segments: the Parquet files of the log. A segment may be written before the end of its batch is known, for example if
an open transaction does not fit in memory. A segment does not change after it was written. The end of its batch, and
the facts of a transaction's commit (:mod:`pgcdc_assets.log.commitfacts`), are stored as tags of the file's Delta add
action. A segment's name ends in the CRC-32 of its bytes, because readers of Parquet do not notice every damaged
byte."""

from __future__ import annotations

import json
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

from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.datafile import FileReport, opened_parquet, statistics
from pgcdc_assets.errors import LogCorrupt
from pgcdc_assets.log.commitfacts import SUBXID, CommitFacts
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
        (SUBXID, pa.int64()),
    ]
)
"""The table's columns, one row per stored message, all nullable. docs/explanation/change_log.md explains them."""
OPTIONAL: Final = frozenset({SUBXID})
"""Columns that only files with :class:`CommitFacts` have."""
FILLED_SCHEMA = pa.schema([entry for entry in LOG_SCHEMA if entry.name not in OPTIONAL])
"""The columns of files without :class:`CommitFacts`, and of the tables that :func:`read_rows` returns."""

SUMMARY = "#"
"""The kind of a row that PostgreSQL did not send: the summary of a batch, as JSON."""
FACTS = "="
"""The kind of a row that PostgreSQL did not send: the catalog facts of a relation, as JSON."""
NOTES: Final = (SUMMARY, FACTS, "R", "Y")
"""The kinds of rows that belong to a batch, but to none of its transactions."""

OWN_FILE_BYTES = 4 << 20
"""Rows of a relation with at least this many payload bytes are written to a separate file, so that readers of other
tables can skip this file. All other relations share a file. Rows are written when they fill 16 MiB, so at most four
relations get a separate file each time."""

FIRST_BATCH_END: Final = "pgcdc.first_batch_end"
LAST_BATCH_END: Final = "pgcdc.batch_end"
"""``FIRST_BATCH_END`` and ``LAST_BATCH_END``: tags with the end LSNs of the first and the last batch in a file."""
_CRC = re.compile(r"-([0-9a-f]{8})\.parquet$")
_CRC_BYTES = 1 << 20
_ROW_SCHEMA = FILLED_SCHEMA.set(FILLED_SCHEMA.get_field_index("payload"), pa.field("payload", pa.binary_view()))
_UNFILLED_SCHEMA = _ROW_SCHEMA.append(LOG_SCHEMA.field(SUBXID))
_REPEATED = ["origin", "kind", "relation_id", "schema_id"]
_GROWING = ["commit_lsn", "tx_ordinal", "xid", "commit_ts", "lsn", SUBXID]
_WRITING: dict[str, Any] = {
    "compression": "ZSTD",
    "compression_level": 1,
    "use_dictionary": _REPEATED,
    # With small transactions, a dictionary of these columns would be larger than the values, and building it would take
    # a third of the writing time.
    "column_encoding": dict.fromkeys(_GROWING, "DELTA_BINARY_PACKED"),
    "write_statistics": ["commit_lsn", "kind", "relation_id", SUBXID],
    # If the file contained the Arrow schema, readers would get the payload as binary_view instead of plain binary.
    "store_schema": False,
}


def clustered(rows: Rows) -> tuple[list[Rows], Rows]:
    """Splits rows by relation: returns the rows of each large relation, and the rows of all other relations, sorted by
    relation. ``OWN_FILE_BYTES`` says which relations are large."""
    if len(rows) == 0:
        return [], rows
    first = rows.relation_id[0]
    if first != ABSENT and (rows.relation_id == first).all() and rows.length.sum() >= OWN_FILE_BYTES:
        # All rows are of one table, as is usual in a large transaction. They need no sorting.
        return [rows], rows.take(np.zeros(0, dtype=np.int64))
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
class SegmentDraft:
    """A segment whose content is durable, but whose file is not in the log's folder yet."""

    draft: DraftFile
    report: FileReport

    def put(self, folder: Location, first_end: int, last_end: int, facts: CommitFacts | None = None) -> FileReport:
        """Put the segment into the log's folder. Returns its report for the Delta commit, with tags. ``first_end`` and
        ``last_end``: the ends of the first and the last batch that have rows in it. ``facts``: the facts of the
        transaction's commit, needed if the rows have ``subxid``."""
        storage.put(self.draft, folder / self.report.path)
        tags = {FIRST_BATCH_END: str(int(first_end)), LAST_BATCH_END: str(int(last_end))}
        if facts is None:
            return replace(self.report, tags=tags)
        stats = json.loads(self.report.stats)
        low, high = stats["minValues"], stats["maxValues"]
        own = facts.within(low[SUBXID], high[SUBXID]) if SUBXID in low else replace(facts, aborted=())
        # Readers choose files by the statistics of ``commit_lsn``, so set these to the transaction's commit LSN. Remove
        # the null count: it says that all rows are NULL, which is true in the file, but not after the facts are filled
        # in.
        low["commit_lsn"] = high["commit_lsn"] = int(facts.commit_lsn)
        stats["nullCount"].pop("commit_lsn", None)
        return replace(self.report, stats=json.dumps(stats), tags=tags | own.to_tags())


def write_segment(draft: DraftFile, groups: Sequence[pa.Table]) -> SegmentDraft:
    """Write one file, with a row group for each table in ``groups`` that has rows. The tables must have the log's
    columns."""
    held = [table for table in groups if table.num_rows]
    schema = held[0].schema if held else _ROW_SCHEMA
    with pq.ParquetWriter(draft.path, schema, **_WRITING) as writer:
        for table in held:
            writer.write_table(table, row_group_size=table.num_rows)
    draft.settle()
    crc, footer = _crc(draft.pieces()), pq.read_metadata(draft.path)
    report = FileReport(f"{uuid4().hex}-{crc:08x}.parquet", draft.size, footer.num_rows, statistics(footer, LOG_SCHEMA))
    return SegmentDraft(draft, report)


def draft_name() -> str:
    """A new name for a segment that is being written. Its final name contains a checksum of the content."""
    return f"{uuid4().hex}.draft"


def check_content(path: Location) -> None:
    """Read all bytes of a segment. Raises LogCorrupt if the file cannot be read, or if its checksum is not the checksum
    in its name. The name of a draft contains no checksum, so a draft only has to be readable."""
    named = _CRC.search(path.name)
    try:
        found = _crc(_pieces(path))
    except (OSError, ValueError) as error:
        # ValueError: a damaged manifest may contain a name that no file can have.
        raise LogCorrupt(f"cannot be read: {type(error).__name__}", thing=str(path)) from None
    if named is not None and found != int(named[1], 16):
        raise LogCorrupt("is damaged: the checksum of its bytes is not the checksum in its name", thing=str(path))


@dataclass(frozen=True)
class SegmentFile:
    """A segment to read. ``commit_facts``: the facts to fill into its rows, or None if the rows are complete."""

    path: Location
    commit_facts: CommitFacts | None = None


def read_rows(
    file: SegmentFile, columns: Sequence[str] | None = None, filters: pc.Expression | None = None
) -> pa.Table:
    """Reads a segment's rows. Fills in the commit facts, and leaves out the rows of aborted subtransactions. Calls
    :func:`check_content` first, because a reader of damaged Parquet may hang. Raises LogCorrupt. Without ``columns``,
    returns all columns of FILLED_SCHEMA. Skips row groups whose statistics cannot match the filter. The filter may name
    any column except the payload."""
    check_content(file.path)
    columns = list(columns or FILLED_SCHEMA.names)
    try:
        if file.commit_facts is not None:
            return _filled(file.path, file.commit_facts, columns, filters)
        return pq.read_table(storage.open_file(file.path), columns=columns, filters=filters, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise LogCorrupt(f"cannot be read: {type(error).__name__}", thing=str(file.path)) from None


def read_slices(file: SegmentFile, columns: Sequence[str], size: int) -> Iterator[pa.Table]:
    """Like :func:`read_rows`, but yields the rows in pieces of about ``size`` bytes, and has no filter."""
    check_content(file.path)
    asked = [*columns, *(OPTIONAL if file.commit_facts is not None else ())]
    with opened_parquet(file.path) as parquet:
        for group in range(parquet.num_row_groups):
            meta = parquet.metadata.row_group(group)
            per_row = max(meta.total_byte_size // max(meta.num_rows, 1), 1)
            for batch in parquet.iter_batches(max(size // per_row, 1), [group], columns=asked):
                rows = pa.Table.from_batches([batch])
                yield rows if file.commit_facts is None else file.commit_facts.fill(rows)


def _filled(path: Location, facts: CommitFacts, columns: list[str], filters: pc.Expression | None) -> pa.Table:
    """Reads the rows, fills in the commit facts, and filters last, because columns in the filter may be NULL in the
    file."""
    import pyarrow.dataset as ds

    wanted = {*columns, *(OPTIONAL if filters is None else set(LOG_SCHEMA.names) - {"payload"})}
    held = [name for name in LOG_SCHEMA.names if name in wanted]
    rows = facts.fill(pq.read_table(storage.open_file(path), columns=held, partitioning=None))
    return ds.dataset(rows).to_table(columns=columns, filter=filters)


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
    """Converts rows to a table with the log's columns, including ``subxid`` if the rows have it."""
    number = len(rows)
    committed = rows.commit_lsn != ABSENT
    in_transaction = committed if rows.subxid is None else rows.xid != ABSENT
    of_relation = rows.relation_id != ABSENT
    kind_ends = pa.py_buffer(np.arange(number + 1, dtype=np.int32))
    arrays = {
        "commit_lsn": _column("commit_lsn", rows.commit_lsn, committed),
        "tx_ordinal": _column("tx_ordinal", rows.ordinal.astype(np.int32), in_transaction),
        "xid": _column("xid", rows.xid, in_transaction),
        "commit_ts": _column("commit_ts", rows.commit_ts, committed),
        "origin": pa.nulls(number, pa.string()) if rows.origin is None else pa.array(rows.origin.tolist(), pa.string()),
        "lsn": _column("lsn", rows.lsn, rows.lsn != ABSENT),
        # One ASCII letter each.
        "kind": pa.Array.from_buffers(pa.string(), number, [None, kind_ends, pa.py_buffer(rows.kind.tobytes())]),
        "relation_id": _column("relation_id", rows.relation_id, of_relation),
        "schema_id": _column("schema_id", rows.schema_id, of_relation),
        "payload": rows.payload(),
    }
    if rows.subxid is None:
        return pa.table(arrays, schema=_ROW_SCHEMA)
    arrays[SUBXID] = _column(SUBXID, rows.subxid, rows.subxid != ABSENT)
    return pa.table(arrays, schema=_UNFILLED_SCHEMA)


def _column(name: str, values: NDArray[Any], valid: NDArray[np.bool_] | None = None) -> pa.Array:
    """Makes an Arrow array of numbers without a copy. ``pa.array`` would import pandas for a type check, which costs
    memory, and a third of a second in the first batch of each receiver process."""
    bits = None if valid is None or valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    held = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(LOG_SCHEMA.field(name).type, len(values), [bits, held])


@dataclass(frozen=True)
class Note:
    """A row that belongs to a batch, but to no transaction. Its kind is R, Y, ``=`` or ``#`` (see NOTES)."""

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
