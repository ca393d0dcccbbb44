"""Which files of a feed an apply reads, and how it divides its work. The feed's files are written without a source, and
the tasks run in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.feed.file import FeedWriter
from pgcdc_assets.feed.schema import INSERT, TRUNCATE, FeedFile, FeedPart, feed_schema
from pgcdc_assets.mirror.delta.applytask import PendingChanges
from pgcdc_assets.store import storage
from tests.mirror.pipeline import NAME, T

SPAN = LsnRange(Lsn(10), Lsn(1000))


def feed_file(layout: Layout, op: str, lsns: Sequence[int], bucket: int | None = None, buckets: int = 1) -> FeedFile:
    """A file of the feed of the table T, with one event per LSN. The ids of the rows are the LSNs."""
    writer = FeedWriter(layout.changes(NAME), bucket, buckets)
    for lsn in lsns:
        row = {"_pgcdc_op": op, "_pgcdc_commit_lsn": lsn, "_pgcdc_ordinal": 1, "id": None if op == TRUNCATE else lsn}
        writer.write(pa.Table.from_pylist([row], feed_schema(T)))
    return writer.close()


def test_only_files_with_a_truncate_are_read_to_find_the_truncates(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    truncate, rows = feed_file(layout, TRUNCATE, [20], buckets=2), feed_file(layout, INSERT, [30], 0, 2)
    storage.delete([layout.changes(NAME) / rows.name])
    pending = PendingChanges.of(layout, FeedPart(T, SPAN, (truncate, rows)), SPAN)
    assert pending is not None
    assert pending.emptied
