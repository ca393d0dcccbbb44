"""A reader takes the changes between two points, in order, and learns that some are missing."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.errors import FeedGap
from pgcdc_assets.feed.file import FeedWriter
from pgcdc_assets.feed.schema import feed_schema
from pgcdc_assets.lake import changefeed
from tests.lake.onetable import DELETE, INSERT, NAME, OWNER, UPDATE, OneTable, T


def taken(at: OneTable, after: int, upto: int | None = None) -> list[tuple[str, int, int]]:
    """Operation, LSN and key of each change."""
    rows = [row for part in at.lake.at(upto).changes(NAME, after) for row in part.to_pylist()]
    return [(row["_pgcdc_op"], row["_pgcdc_commit_lsn"], row["id"]) for row in rows]


@pytest.fixture
def at(tmp_path: Path) -> OneTable:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}), (INSERT, {"id": "2"}))
    at.turn(300, (INSERT, {"id": "3"}))
    return at


def test_changes_between_two_points_come_once_and_in_order(at: OneTable) -> None:
    assert taken(at, 100, 200) == [("update_postimage", 199, 1), ("insert", 199, 2)]
    assert taken(at, 200) == [("insert", 299, 3)]
    assert taken(at, 100) == taken(at, 100, 200) + taken(at, 200)
    assert taken(at, 300) == []


def test_changes_that_no_point_lists_yet_are_left_out(at: OneTable) -> None:
    at.turn(400, (DELETE, {"id": "3"}), publish=False)
    assert taken(at, 200) == [("insert", 299, 3)]
    at.publish(400)
    assert taken(at, 300) == [("delete", 399, 3)]


def test_columns_that_were_not_sent_are_named(at: OneTable) -> None:
    at.turn(400, (UPDATE, {"id": "1", "_pgcdc_unchanged": [2, 5]}), (UPDATE, {"id": "2"}), (DELETE, {"id": "3"}))
    (part,) = at.lake.at().changes(NAME, 300)
    assert part["_pgcdc_unchanged"].to_pylist() == [["v", "tags"], None, None]


def test_a_table_without_changes_since_its_copy_has_none(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.publish(200)
    assert taken(at, 100) == []
    with pytest.raises(FeedGap):
        taken(at, 99)


def test_changes_that_retention_removed_are_a_gap(at: OneTable) -> None:
    assert at.feeds.open(T).forget(Lsn(250)) == 1
    assert taken(at, 250) == [("insert", 299, 3)]
    with pytest.raises(FeedGap, match=r"begins at 0/FA, so it lacks changes since 0/C8.*read the mirror"):
        taken(at, 200)


def test_a_new_copy_that_the_feed_does_not_reach_is_a_gap(at: OneTable) -> None:
    """The feed has no changes between its end and the copy."""
    mirror = at.lake.at().table_at(NAME).mirror
    positions = {**mirror.positions, f"{OWNER.app_id()}/snapshot/public/t": 350}
    object.__setattr__(mirror, "positions", positions)
    feed = changefeed.ChangeFeed.at(at.layout, NAME, mirror, OWNER.app_id(), Lsn(400))
    assert feed.covered == LsnRange(Lsn(350), Lsn(400))
    with pytest.raises(FeedGap):
        feed.require(Lsn(300))
    feed.require(Lsn(350))


def test_a_feed_that_is_derived_again_is_a_gap(at: OneTable) -> None:
    """A run died between the two commits that begin a feed for another structure of the table."""
    feed = at.feeds.open(T)
    feed._write(feed._delta.files if feed._delta else (), [], LsnRange(Lsn(0), Lsn(0)))
    with pytest.raises(FeedGap):
        taken(at, 200)
    assert taken(at, 300) == []


def test_maintenance_of_the_feed_changes_nothing(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "0"}])
    for number in range(1, 10):
        at.turn(100 + 10 * number, (INSERT, {"id": str(number)}))
    before = taken(at, 120)
    assert len(before) == 7
    feed = at.feeds.open(T)
    assert feed.compact(Lsn(200)) > 0
    feed.sweep(timedelta(0))
    assert taken(at, 120) == before


def test_a_large_transaction_comes_in_parts_of_bounded_size(at: OneTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files hold one transaction, and no file is sorted."""
    schema, files = feed_schema(T), []
    for first in (1, 0):
        writer = FeedWriter(at.layout.changes(NAME), first, 2)
        rows: list[dict[str, Any]] = [
            {"_pgcdc_op": "insert", "_pgcdc_commit_lsn": 350, "_pgcdc_ordinal": number, "id": number, "v": "x" * 50}
            for number in reversed(range(first, 2000, 2))
        ]
        writer.write(pa.Table.from_pylist(rows, schema))
        files.append(writer.close())
    at.feeds.open(T).commit(files, LsnRange(Lsn(300), Lsn(400)))
    at.turn(410, (DELETE, {"id": "1"}))
    monkeypatch.setattr(changefeed, "BATCH_BYTES", sum(file.size for file in files) // 10)
    parts = list(at.lake.at().changes(NAME, 300))
    assert max(part.num_rows for part in parts) <= 201
    assert [key for part in parts for key in part["id"].to_pylist()] == [*range(2000), 1]
