"""Which files of a feed an apply reads, and how it divides its work. The feed's files are written without a source, and
the tasks run in this process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest

from pgcdc_assets.core.catalog import Column
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.delta.datafile import opened_parquet
from pgcdc_assets.feed import file
from pgcdc_assets.feed.file import FeedWriter
from pgcdc_assets.feed.schema import INSERT, TRUNCATE, FeedFile, FeedPart, feed_name, feed_schema
from pgcdc_assets.mirror.delta.applytask import PendingChanges, collapse_units
from pgcdc_assets.mirror.delta.tableplan import TablePlan
from pgcdc_assets.store import storage
from tests.mirror.pipeline import ID, NAME, TEXT, made, rows, table

SPAN = LsnRange(Lsn(10), Lsn(1000))


SPACED = table(ID, Column(2, "a b", TEXT))
"""Delta refuses the name of a column, so the mirror uses column mapping, and no file of the feed can be linked."""


def feed_file(
    layout: Layout, op: str, lsns: Iterable[int], bucket: int | None = None, buckets: int = 1
) -> FeedFile:  # fmt: skip
    """A file of the feed of the table SPACED, with one event per LSN. The ids of the rows are the LSNs."""
    writer = FeedWriter(layout.changes(NAME), bucket, buckets)
    for lsn in lsns:
        row: dict[str, object] = {"_pgcdc_op": op, "_pgcdc_commit_lsn": lsn, "_pgcdc_ordinal": 1}
        if op != TRUNCATE:
            row |= {"id": lsn, feed_name("a b"): f"row {lsn}"}
        writer.write(pa.Table.from_pylist([row], feed_schema(SPACED)))
    return writer.close()


def test_only_files_with_a_truncate_are_read_to_find_the_truncates(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)
    truncate, inserts = feed_file(layout, TRUNCATE, [20], buckets=2), feed_file(layout, INSERT, [30], 0, 2)
    storage.delete([layout.changes(NAME) / inserts.name])
    pending = PendingChanges.of(layout, FeedPart(SPACED, SPAN, (truncate, inserts)), SPAN)
    assert pending is not None
    assert pending.emptied


def test_inserts_that_cannot_be_linked_are_written_one_row_group_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span to apply begins and ends inside the file."""
    monkeypatch.setattr(file, "ROW_GROUP_BYTES", 1)
    mirror = made(tmp_path, SPACED, [[], []])
    assert mirror.mapped
    part = FeedPart(SPACED, SPAN, (feed_file(mirror.mirrors.layout, INSERT, range(5, 15)),))
    work = TablePlan.of(mirror.mirrors, part, Lsn(13))
    assert work is not None
    assert not work.linkable
    (effect,) = collapse_units(work.units())
    assert effect.added is not None
    with opened_parquet(mirror.path / effect.added.path) as written:
        assert written.num_row_groups == 3
    done = work.commit([effect], 0.0)
    assert (done.inserted, done.replay_lsn) == (3, 13)
    assert [(row["id"], row["a b"]) for row in rows(mirror)] == [(n, f"row {n}") for n in (10, 11, 12)]
