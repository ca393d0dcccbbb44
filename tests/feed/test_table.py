"""Maintenance of a feed: merged files have the same rows as before, and a file is deleted when the log no longer has
any of its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.core.catalog import Column, Identity, Lineage, PgType, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.feed.file import FeedWriter
from pgcdc_assets.feed.schema import FeedFile, feed_schema
from pgcdc_assets.feed.table import FEWEST_MERGED, Feeds
from pgcdc_assets.store.local import path_of
from tests.deltatables import reads_of_commits

WHO = Identity("7", "shop", "pgcdc")
NARROW = Table(16384, TableName("public", "t"), (Column(1, "id", PgType(23, "int4")),), key=(1,))
WIDE = replace(NARROW, columns=(*NARROW.columns, Column(2, "v", PgType(25, "text"))))
FILES = 12


def _file(layout: Layout, table: Table, *numbers: int, **row: Any) -> FeedFile:
    """Writes a file of the feed, with one change per number, at the LSN 10 × number."""
    writer = FeedWriter(layout.changes(table.name), 0, 2)
    rows = [{"_pgcdc_op": "insert", "_pgcdc_commit_lsn": 10 * number, "_pgcdc_ordinal": 1, "id": number, **row}
            for number in numbers]  # fmt: skip
    writer.write(pa.Table.from_pylist(rows, feed_schema(table)), odd_keys=3 in numbers)
    return writer.close()


def _derive(
    layout: Layout, table: Table, number: int, unchanged_from: Lsn | None = None, replay_lsn: Lsn = ZERO, **row: Any
) -> None:
    """Writes the feed rows of one turn. The turn covers the LSNs from 10 × number to 10 × number + 10, and has one
    change, at the lower LSN."""
    at, file = 10 * number, _file(layout, table, number, **row)
    Feeds(layout, WHO).open(table).commit([file], LsnRange(Lsn(at), Lsn(at + 10)), (), unchanged_from, replay_lsn)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout.of(tmp_path)
    for number in range(FILES - 1):
        _derive(layout, NARROW, number, _pgcdc_unchanged=[5] if number == 4 else None)
    _derive(layout, WIDE, FILES - 1, v="new column")
    return layout


def _rows(layout: Layout) -> list[dict[str, Any]]:
    query = "SELECT _pgcdc_op, _pgcdc_commit_lsn, _pgcdc_unchanged, id, v FROM feed ORDER BY _pgcdc_commit_lsn"
    feed = DeltaTable(path_of(layout.changes(WIDE.name)))
    rows: list[dict[str, Any]] = pa.table(QueryBuilder().register("feed", feed).execute(query).read_all()).to_pylist()
    return rows


def test_merging_files_of_a_feed_does_not_change_its_rows(layout: Layout) -> None:
    before, feed = _rows(layout), Feeds(layout, WHO).open(WIDE)
    covered, everything = feed.covered, LsnRange(Lsn(0), Lsn(10 * FILES))
    assert covered == everything
    assert feed.compact(Lsn(10 * (FILES - 2))) == FILES - 3
    assert _rows(layout) == before
    feed = Feeds(layout, WHO).open(WIDE)
    assert feed.covered == covered
    merged, *rest = sorted(feed.files(everything), key=lambda file: file.facts.commit_min)
    assert [file.facts.commit_min for file in rest] == [10 * (FILES - 2), 10 * (FILES - 1)]
    facts = merged.facts
    assert (facts.commit_min, facts.commit_max, facts.counts) == (0, 10 * (FILES - 3), {"insert": FILES - 2})
    assert (facts.masked, facts.odd_keys, facts.bucket) == ((5,), True, None)
    assert feed.replaced(LsnRange(Lsn(50), Lsn(60)))[0] == LsnRange(Lsn(0), Lsn(10 * (FILES - 3) + 1))
    assert feed.compact(Lsn(10 * FILES)) == 0


def test_files_of_a_feed_are_not_merged_while_there_are_only_a_few(layout: Layout) -> None:
    assert Feeds(layout, WHO).open(WIDE).compact(Lsn(10 * (FEWEST_MERGED - 1))) == 0


def test_only_whole_files_are_deleted_and_the_feed_then_begins_at_a_later_lsn(layout: Layout) -> None:
    feed = Feeds(layout, WHO).open(WIDE)
    assert feed.forget(Lsn(0)) == 0
    assert feed.forget(Lsn(35)) == 4
    assert feed.covered == LsnRange(Lsn(35), Lsn(10 * FILES))
    assert [row["id"] for row in _rows(layout)] == list(range(4, FILES))
    assert feed.compact(Lsn(10 * FILES)) == FILES - 5
    assert feed.forget(Lsn(10 * FILES - 10)) == 0
    assert Feeds(layout, WHO).open(WIDE).forget(Lsn(500)) == 1
    assert Feeds(layout, WHO).open(WIDE).covered == LsnRange(Lsn(500), Lsn(500))
    assert _rows(layout) == []


def test_a_feed_that_was_never_written_is_empty(tmp_path: Path) -> None:
    feed = Feeds(Layout.of(tmp_path), WHO).open(NARROW)
    assert (feed.compact(Lsn(9)), feed.forget(Lsn(9))) == (0, 0)
    assert not path_of(Layout.of(tmp_path).changes(NARROW.name)).exists()


def test_feed_rows_that_were_derived_for_an_earlier_structure_are_not_used(tmp_path: Path) -> None:
    """The columns of the earlier structure may have the same names as the new columns, so names do not show to which
    structure a row belongs."""
    layout = Layout.of(tmp_path)
    _derive(layout, NARROW, 0)
    next_ = replace(NARROW, lineage=Lineage(1, 1, 50))
    assert Feeds(layout, WHO).open(NARROW).covered == LsnRange(Lsn(0), Lsn(10))
    assert Feeds(layout, WHO).open(next_).covered == LsnRange(Lsn(0), Lsn(0))
    _derive(layout, next_, 0)
    assert Feeds(layout, WHO).open(next_).covered == LsnRange(Lsn(0), Lsn(10))
    assert len(Feeds(layout, WHO).open(next_).files(LsnRange(Lsn(0), Lsn(10)))) == 1
    assert Feeds(layout, WHO).open(replace(NARROW, lineage=Lineage(1, 1, 60))).covered == LsnRange(Lsn(0), Lsn(0))


def test_opening_a_feed_again_reads_only_delta_commits_that_are_new(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = Feeds(layout, WHO)
    before = feeds.open(WIDE).covered
    _derive(layout, WIDE, FILES, v="later")
    with reads_of_commits(monkeypatch) as read:
        assert feeds.open(WIDE).covered.end > before.end
    with reads_of_commits(monkeypatch) as all_of_them:
        Feeds(layout, WHO).open(WIDE)
    assert len(read) == 2 < len(all_of_them)


def test_a_feed_also_covers_the_lsns_at_which_its_table_did_not_change(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)

    def covered(number: int, unchanged_from: int, table: Table = NARROW) -> tuple[int, int]:
        _derive(layout, table, number, Lsn(unchanged_from))
        found = Feeds(layout, WHO).open(table).covered
        return found.start, found.end

    assert covered(2, 5) == (5, 30), "after a copy at LSN 5, the first change"
    assert covered(6, 25) == (5, 70)
    assert covered(12, 100) == (100, 130), "after a new copy at LSN 100"
    changed = replace(NARROW, lineage=Lineage(1, 1, 150))
    assert covered(20, 150, changed) == (200, 210), "the feed was emptied, and changes below may be lost"


def test_rows_of_a_replaced_file_that_the_log_no_longer_has_leave_the_covered_range(layout: Layout) -> None:
    feed = Feeds(layout, WHO).open(WIDE)
    assert feed.compact(Lsn(100)) == 9
    assert feed.forget(Lsn(35)) == 0
    assert feed.covered == LsnRange(Lsn(0), Lsn(10 * FILES))
    wider, gone = feed.replaced(LsnRange(Lsn(40), Lsn(60)), log_start=Lsn(35))
    assert (wider, len(gone)) == (LsnRange(Lsn(35), Lsn(91)), 1)
    feed.commit([_file(layout, WIDE, *range(4, 10))], wider, gone)
    assert [row["id"] for row in _rows(layout)] == list(range(4, FILES))
    assert Feeds(layout, WHO).open(WIDE).covered == LsnRange(Lsn(35), Lsn(10 * FILES))


def test_rows_that_the_log_can_give_again_stay_in_the_covered_range(layout: Layout) -> None:
    feed = Feeds(layout, WHO).open(WIDE)
    assert feed.compact(Lsn(100)) == 9
    wider, gone = feed.replaced(LsnRange(Lsn(40), Lsn(60)), log_start=Lsn(0))
    assert (wider, len(gone)) == (LsnRange(Lsn(0), Lsn(91)), 1)
    feed.commit([_file(layout, WIDE, *range(10))], wider, gone)
    assert Feeds(layout, WHO).open(WIDE).covered == LsnRange(Lsn(0), Lsn(10 * FILES))


def test_a_range_below_the_mirrors_lsn_extends_the_covered_range_only_if_the_two_adjoin(tmp_path: Path) -> None:
    layout = Layout.of(tmp_path)

    def covered(number: int, replay_lsn: int, table: Table = NARROW) -> tuple[int, int]:
        _derive(layout, table, number, replay_lsn=Lsn(replay_lsn))
        found = Feeds(layout, WHO).open(table).covered
        return found.start, found.end

    assert covered(20, 210) == (200, 210)
    assert covered(5, 210) == (200, 210), "the changes between 60 and 200 are missing"
    assert covered(19, 210) == (190, 210)
    changed = replace(NARROW, lineage=Lineage(1, 1, 205))
    assert covered(15, 215, changed) == (210, 210), "the feed was emptied, and lacks the changes between 160 and 210"
    assert covered(14, 215, changed) == (210, 210)
    assert Feeds(layout, WHO).open(changed).forget(Lsn(180)) == 2
    assert covered(20, 215, changed) == (200, 210)


def test_an_emptied_feed_does_not_cover_lsns_below_its_end_at_which_only_the_mirror_stayed_unchanged(
    tmp_path: Path,
) -> None:
    layout = Layout.of(tmp_path)
    _derive(layout, NARROW, 20)
    changed = replace(NARROW, lineage=Lineage(1, 1, 215))
    _derive(layout, changed, 15, replay_lsn=Lsn(220))
    _derive(layout, changed, 22, unchanged_from=Lsn(180), replay_lsn=Lsn(220))
    assert Feeds(layout, WHO).open(changed).covered == LsnRange(Lsn(210), Lsn(230))
