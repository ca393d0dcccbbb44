"""The Parquet file that a task writes for one table's feed, or for one bucket of the table's keys."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.datafile import dataset, opened_parquet, parquet_writer, statistics
from pgcdc_assets.delta.log import Added
from pgcdc_assets.errors import LakeError
from pgcdc_assets.feed.schema import COMMIT_LSN, OP, UNCHANGED, FeedFacts, FeedFile
from pgcdc_assets.store import storage
from pgcdc_assets.store.scratch import DraftFile

FACTS = b"pgcdc.facts"
ROW_GROUP_BYTES = 32 << 20
"""A row group is written as soon as the rows in memory have this many bytes. This limits the memory per file."""


class FeedWriter:
    """Collects the rows of one file. No reader sees the file until a Delta commit adds it to the feed."""

    def __init__(self, folder: Location, bucket: int | None, buckets: int, *, arrivals: bool = False) -> None:
        self._draft: DraftFile | None = None
        self._path = folder / f"{uuid.uuid4().hex}.parquet"
        self._writer: pq.ParquetWriter | None = None
        self._held: list[pa.Table] = []
        self.held_bytes = 0
        self._bucket, self._buckets, self._arrivals = bucket, buckets, arrivals
        self._bounds: list[int] = []
        self._counts: Counter[str] = Counter()
        self._masked: set[int] = set()
        self._odd_keys = False

    def write(self, rows: pa.Table, *, odd_keys: bool = False) -> None:
        """Adds rows, which must have the feed's schema."""
        self._odd_keys |= odd_keys
        for entry in pc.value_counts(rows[OP]).to_pylist():
            self._counts[entry["values"]] += entry["counts"]
        bounds = pc.min_max(rows[COMMIT_LSN]).as_py()
        self._bounds += [bounds["min"], bounds["max"]]
        if rows[UNCHANGED].null_count < rows.num_rows:
            self._masked |= set(pc.unique(pc.list_flatten(rows[UNCHANGED])).to_pylist())
        self._held.append(rows)
        self.held_bytes += rows.nbytes
        if self.held_bytes >= ROW_GROUP_BYTES:
            self.flush()

    def close(self) -> FeedFile:
        self.flush()
        if self._writer is None or self._draft is None:
            raise LakeError("contains no rows, so it cannot be added to the feed", thing=str(self._path))
        facts = FeedFacts(
            commit_min=min(self._bounds),
            commit_max=max(self._bounds),
            counts=dict(self._counts),
            masked=tuple(sorted(self._masked)),
            odd_keys=self._odd_keys,
            bucket=self._bucket,
            buckets=self._buckets,
            arrivals=self._arrivals,
        )
        self._writer.add_key_value_metadata({FACTS: facts.to_json()})
        self._writer.close()
        footer, size = pq.read_metadata(self._draft.path), self._draft.size
        storage.put(self._draft, self._path)
        return FeedFile(self._path.name, size, _statistics(footer), facts)

    def abandon(self) -> None:
        """Deletes the unfinished file after a failure."""
        if self._writer is not None:
            self._writer.close()
        if self._draft is not None:
            self._draft.discard()

    def flush(self) -> None:
        """Writes the rows in memory as a row group."""
        if self._held:
            table = pa.concat_tables(self._held)
            if self._writer is None:
                self._draft = storage.draft(self._path)
                self._writer = parquet_writer(self._draft, table)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
            self._held, self.held_bytes = [], 0


def feed_file(path: Location, size: int) -> FeedFile:
    """Reads the facts and statistics of a feed file from its footer. Raises LakeError if it is not a feed file."""
    try:
        with opened_parquet(path) as file:
            footer = file.metadata
        return FeedFile(path.name, size, _statistics(footer), FeedFacts.from_json((footer.metadata or {})[FACTS]))
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise LakeError(f"a file of the feed cannot be read: {type(error).__name__}", thing=str(path)) from None


def trimmed(folder: Location, file: FeedFile, end: Lsn) -> FeedFile | None:
    """Removes transactions at or above ``end`` from a file that no Delta commit names yet. Rewrites the file only if
    needed. Returns None if no transaction is left."""
    if file.facts.commit_max < end:
        return file
    path, below = folder / file.name, pc.field(COMMIT_LSN) < int(end)
    rows = pq.read_table(storage.open_file(path), filters=below, partitioning=None)
    storage.delete([path])
    if not rows.num_rows:
        return None
    writer = FeedWriter(folder, file.facts.bucket, file.facts.buckets, arrivals=file.facts.arrivals)
    writer.write(rows, odd_keys=file.facts.odd_keys)
    return writer.close()


def merged_file(folder: Location, files: Sequence[Added], schema: pa.Schema) -> FeedFile:
    """Writes the rows of several feed files to one new file. Columns that an older file lacks become NULL."""
    writer = FeedWriter(folder, None, 1)
    for file in files:
        path = folder / file.path
        facts = feed_file(path, file.size).facts
        writer.write(dataset([path], schema).to_table(), odd_keys=facts.odd_keys)
    return writer.close()


def _statistics(footer: pq.FileMetaData) -> str:
    return statistics(footer, footer.schema.to_arrow_schema())
