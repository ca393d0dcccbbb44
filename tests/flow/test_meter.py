"""Counts of runs: each batch once, over many runs, in one file of the lake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.meter import Meter, RunCounts, read_counts
from pgcdc_assets.log.summary import BatchSummary
from pgcdc_assets.store.local import path_of

NOW = datetime.now(UTC)


@dataclass
class Log:
    """A log whose batches became durable two seconds after their first commit."""

    merged: set[int] = field(default_factory=set)

    def written(self, batches: Sequence[BatchSummary]) -> dict[Lsn, datetime]:
        return {one.end: one.first_commit_ts + timedelta(seconds=2) for one in batches
                if one.first_commit_ts is not None and one.end not in self.merged}  # fmt: skip


class NoPoints:
    def newest(self) -> None:
        return None


def batch(end: int, *, seconds_ago: float = 7, rows: dict[str, int] | None = None) -> BatchSummary:
    at = NOW - timedelta(seconds=seconds_ago)
    counts = {7: rows if rows is not None else {"I": 2, "D": 1}}
    return BatchSummary(Lsn(end - 10), Lsn(end), 1, 3, 5, at, at, counts if rows != {} else {}, {"C": 3}, 100,
                        {7: TableName("public", "t")}, (7,))  # fmt: skip


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout.of(tmp_path / "lake")
    path_of(found.own).mkdir(parents=True)
    return found


def meter_of(layout: Layout, log: Log | None = None) -> Meter:
    return Meter(layout, cast(Any, log or Log()), cast(Any, NoPoints()))


def read(layout: Layout) -> RunCounts:
    found = read_counts(layout)
    assert found is not None
    return found


def test_counts_of_a_run_add_to_the_counts_of_earlier_runs_and_count_each_batch_once(layout: Layout) -> None:
    first = meter_of(layout)
    first.took([batch(20), batch(30)], {"transform": 0.3, "apply": 0.2})
    first.published(0.05)
    first.close()
    second = meter_of(layout)
    # The open range of the run that died is counted again.
    second.took([batch(20), batch(30), batch(40)], {"transform": 20.0, "apply": 0.2})
    second.close()
    found = read(layout)
    assert (found.transactions, found.rows, found.bytes) == (9, {"I": 6, "U": 0, "D": 3, "T": 0}, 300)
    assert found.turns["transform"].sum == pytest.approx(20.3)
    assert sum(found.turns["publish"].counts) == 1
    assert sum(found.durable.counts) == 3
    assert found.durable.sum == pytest.approx(6.0)
    assert found.upto == Lsn(40)


def test_readable_counts_a_batch_when_a_point_has_it(layout: Layout) -> None:
    found = meter_of(layout)
    found.took([batch(20)], {})
    assert sum(found.counts.readable.counts) == 0
    found.published(0.1)
    assert 7 <= found.counts.readable.sum <= 7 + (datetime.now(UTC) - NOW).total_seconds()
    found.took([batch(30)], {})
    found.unpublished()
    found.took([batch(40, rows={})], {})
    found.published(0.1)
    assert sum(found.counts.readable.counts) == 1, "batches that change no mirror need no point"


def test_a_batch_whose_files_were_merged_has_no_durable_time(layout: Layout) -> None:
    found = meter_of(layout, Log(merged={20}))
    found.took([batch(20), batch(30)], {})
    assert sum(found.counts.durable.counts) == 1


def test_file_is_written_every_ten_seconds_and_at_rest_every_minute_with_the_memory_of_the_receiver(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 30.0, 60.0, 60.0, 69.0, 70.0, 70.0, 70.0])
    monkeypatch.setattr("pgcdc_assets.flow.meter.time.monotonic", lambda: next(clock))
    found = meter_of(layout)
    found.write_if_due(lambda: 5000)
    assert read(layout).receiver_bytes == 5000
    for memory in (5000, 6000):
        found.write_if_due(lambda: 6000)
        assert read(layout).receiver_bytes == memory
    found.took([batch(20)], {})
    for transactions in (0, 3):
        found.write_if_due(lambda: 6000)
        assert read(layout).transactions == transactions
    found.close()
    assert read(layout).receiver_bytes is None, "the receiver has ended"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"since": 3}', b"\xff"])
def test_counts_begin_again_if_the_file_is_damaged(layout: Layout, content: bytes) -> None:
    path_of(layout.counts).write_bytes(content)
    assert read_counts(layout) is None
    found = meter_of(layout)
    found.took([batch(20)], {})
    found.close()
    assert read(layout).transactions == 3


def test_a_lake_that_cannot_be_written_stops_no_run(layout: Layout) -> None:
    path_of(layout.counts).mkdir()
    found = meter_of(layout)
    found.took([batch(20)], {})
    found.write_if_due(lambda: 1)
    found.close()
    assert found.counts.transactions == 3
