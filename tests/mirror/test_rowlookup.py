"""How a merge finds the changed rows in the mirror (its target), and the errors that it raises if the rows of the
target contradict the changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyroaring import BitMap64

from pgcdc_assets.core.arrays import Ints
from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.datafile import DataFile
from pgcdc_assets.delta.log import Added
from pgcdc_assets.delta.vectors import write_vectors
from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.feed.schema import FeedColumn
from pgcdc_assets.mirror.delta import rowgroups, rowlookup
from pgcdc_assets.mirror.delta.keyindex import KeyIndex
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget, RowGroup, wanted
from pgcdc_assets.mirror.delta.rowlookup import HOLDS, LACKS, TWICE, Effect, merge_keyed, merge_multiset
from pgcdc_assets.mirror.net.neteffect import collapse, net_rows
from tests.feed.feed_rows import COLUMNS, SCHEMA, feed_rows

OWN = pa.schema([SCHEMA.field(name) for name in ("_pgcdc_commit_lsn", "_pgcdc_commit_ts", "_pgcdc_raw")])
VALUES = pa.schema([SCHEMA.field(name) for name in ("id", "b", "c")])
LEAF, HASH, ROW = (
    pa.field("_pgcdc_leaf", pa.string()),
    pa.field("_pgcdc_hash", pa.int64()),
    pa.field("_pgcdc_row", pa.string()),
)


@dataclass
class Stored:
    """Files of a target, in a folder. Each row is a dict. Columns that a row lacks are NULL."""

    folder: Path
    more: Sequence[pa.Field] = ()
    files: list[Added] = field(default_factory=list)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*VALUES, *OWN, *self.more])

    def file(self, *rows: dict[str, Any], gone: Sequence[int] = (), group: int = 2) -> None:
        with DataFile(Location.of(self.folder), self.schema) as file:
            for start in range(0, len(rows), group):
                part = pa.Table.from_pylist(list(rows[start : start + group]), self.schema)
                file.write(part.columns)
            report = file.finish()
        assert report is not None
        action: dict[str, Any] = {"path": report.path, "stats": report.stats}
        if gone:
            (action["deletionVector"],) = write_vectors(Location.of(self.folder), [BitMap64(gone)])
        self.files.append(Added(report.path, report.size, report.rows, None, len(gone), action))

    @property
    def target(self) -> MergeTarget:
        return MergeTarget(Location.of(self.folder), self.schema, tuple(self.schema.names), tuple(self.files))

    def gone(self, merged: Effect) -> list[list[int]]:
        """The positions of the deleted rows, as one list per file."""
        return [sorted(merged.gone.get(file.path, BitMap64())) for file in self.files]


def row(key: Any, b: str = "b", c: str = "c", **more: Any) -> dict[str, Any]:
    return {"id": key, "b": b, "c": c, **more}


@dataclass(frozen=True)
class Done(Effect):
    """The result of a merge, and the rows that the merge wrote."""

    written: list[pa.Table] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for table in self.written for row in table.to_pylist()]

    @classmethod
    def of(cls, merged: Effect, written: list[pa.Table]) -> Done:
        return cls(None, merged.gone, merged.inserted, merged.updated, merged.deleted, written=written)


def merge(stored: Stored, *events: tuple[Any, ...], leaves: Sequence[str] = (), masked: Sequence[int] = (3,)) -> Done:
    written: list[pa.Table] = []
    source = feed_rows(events)
    if stored.more:
        source = source.append_column("_pgcdc_leaf", pa.array(["a"] * source.num_rows))
    source = collapse(source, COLUMNS, masked)
    return Done.of(merge_keyed(stored.target, source, COLUMNS, masked, leaves, written.append), written)


def essence(done: Done) -> list[tuple[Any, ...]]:
    return sorted((found["id"], found["b"], found["c"]) for found in done.rows)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def test_a_merge_removes_changed_rows_and_writes_them_again(stored: Stored) -> None:
    stored.file(row(1), row(2), row(3))
    stored.file(row(4), row(5))
    merged = merge(stored, ("U", 2, "x", "y"), ("D", 5), ("I", 9, "p", "q"))
    assert essence(merged) == [(2, "x", "y"), (9, "p", "q")]
    assert stored.gone(merged) == [[1], [1]]
    assert (merged.inserted, merged.updated, merged.deleted) == (1, 1, 1)


def test_a_changed_row_missing_from_the_target_is_an_error(stored: Stored) -> None:
    stored.file(row(1), row(2), gone=[1])
    for event in (("U", 2, "x", "y"), ("D", 3), ("M", 2, 7, "x", "y")):
        with pytest.raises(MergeMismatch, match=LACKS):
            merge(stored, event)


def test_an_inserted_row_that_the_target_has_is_an_error(stored: Stored) -> None:
    stored.file(row(1), row(2), gone=[1])
    with pytest.raises(MergeMismatch, match=HOLDS):
        merge(stored, ("I", 1, "x", "y"))
    assert essence(merge(stored, ("I", 2, "x", "y"))) == [(2, "x", "y")], "the target's row 2 is already deleted"


def test_a_row_that_the_target_has_twice_is_an_error(stored: Stored) -> None:
    stored.file(row(1))
    stored.file(row(1))
    with pytest.raises(MergeMismatch, match=TWICE):
        merge(stored, ("U", 1, "x", "y"))


def test_a_value_that_was_not_sent_is_kept(stored: Stored) -> None:
    stored.file(row(1, c="old 1"), row(2, c="old 2"), row(3, c="old 3"))
    merged = merge(stored, ("U", 3, "x", None, True), ("U", 1, "y", "sent"))
    assert essence(merged) == [(1, "y", "sent"), (3, "x", "old 3")]


def test_a_value_that_was_not_sent_is_looked_up_under_the_old_key(stored: Stored) -> None:
    stored.file(row(1, c="old 1"), row(2, c="old 2"))
    merged = merge(stored, ("M", 1, 9, "x", None, True), ("M", 2, 1, "y", None, True))
    assert essence(merged) == [(1, "y", "old 2"), (9, "x", "old 1")]
    assert stored.gone(merged) == [[0, 1]]
    assert (merged.inserted, merged.updated, merged.deleted) == (1, 1, 1)


def test_a_raw_text_is_kept_or_dropped_with_its_value(stored: Stored) -> None:
    """The text of a value that does not fit is stored in ``_pgcdc_raw``. The text is kept if the value is kept, and
    dropped if the value is replaced."""
    stored.file(row(1, _pgcdc_raw=[("c", "odd c"), ("b", "odd b")]), row(2, _pgcdc_raw=[("c", "odd 2")]))
    merged = merge(stored, ("U", 1, "x", None, True, {"id": "new"}), ("U", 2, "y", "sent"))
    assert {found["id"]: found["_pgcdc_raw"] and dict(found["_pgcdc_raw"]) for found in merged.rows} == {
        1: {"c": "odd c", "id": "new"},
        2: None,
    }


def test_rows_that_keep_many_values_of_the_mirror_are_written_in_several_parts(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowlookup, "FETCHED_BYTES", 1)
    stored.file(*(row(key, c=f"old {key}") for key in range(6)))
    merged = merge(
        stored, ("U", 4, "x", None, True), ("U", 0, "y", None, True), ("U", 2, "z", "sent"), ("I", 9, "n", "n")
    )
    assert [table.num_rows for table in merged.written] == [1, 1, 2]
    assert essence(merged) == [(0, "y", "old 0"), (2, "z", "sent"), (4, "x", "old 4"), (9, "n", "n")]


def test_all_rows_of_a_truncated_leaf_are_removed(stored: Stored) -> None:
    """A key of a truncated leaf may be inserted again. Rows of other leaves are checked as usual."""
    stored = Stored(stored.folder, (LEAF,))
    stored.file(row(1, _pgcdc_leaf="a"), row(2, _pgcdc_leaf="b"), row(3, _pgcdc_leaf="a"))
    merged = merge(stored, ("I", 1, "x", "y"), leaves=["a"])
    assert essence(merged) == [(1, "x", "y")]
    assert stored.gone(merged) == [[0, 2]]
    assert (merged.inserted, merged.updated, merged.deleted) == (0, 1, 1)
    with pytest.raises(MergeMismatch, match=HOLDS):
        merge(stored, ("I", 2, "x", "y"), leaves=["a"])
    assert stored.gone(merge(stored, leaves=["a"])) == [[0, 2]], "no row is inserted"


def test_a_column_that_a_file_lacks_is_null(stored: Stored) -> None:
    narrow = pa.schema([field for field in stored.schema if field.name != "c"])
    with DataFile(Location.of(stored.folder), narrow) as file:
        file.write(pa.Table.from_pylist([{"id": 1, "b": "b"}], narrow).columns)
        report = file.finish()
    assert report is not None
    stored.files.append(Added(report.path, report.size, 1, None, 0, {"stats": report.stats}))
    assert essence(merge(stored, ("U", 1, "x", None, True))) == [(1, "x", None)]


def test_only_row_groups_that_may_contain_a_changed_key_are_read(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.file(*(row(key) for key in range(10)))
    stored.file(*(row(key) for key in range(10, 20)))
    read: list[tuple[str, int]] = []
    original = RowGroup.read

    def noted(self: RowGroup, names: Sequence[str]) -> pa.Table:
        read.append((self.path, self.start))
        return original(self, names)

    monkeypatch.setattr(RowGroup, "read", noted)
    merge(stored, ("U", 13, "x", "y"), ("I", 77, "p", "q"))
    assert read == [(stored.files[1].path, 2)]


def test_several_row_groups_of_a_file_are_searched_together(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search hashes all wanted keys. So several row groups are searched together, up to a limit in bytes."""
    stored.file(*(row(key, c=f"old {key}") for key in range(10)), gone=[7])
    stored.file(row(20), row(21, c="old 21"))
    searched: list[int] = []
    original = KeyIndex.find

    def noted(self: KeyIndex, target: pa.Table) -> tuple[Ints, Ints]:
        searched.append(target.num_rows)
        return original(self, target)

    monkeypatch.setattr(KeyIndex, "find", noted)
    events = [("U", 1, "x", None, True), ("D", 2), ("M", 9, 30, "y", None, True), ("M", 21, 31, "z", None, True)]
    merged = merge(stored, *events)
    # The row groups with the ids 4 to 7 cannot have a wanted key. The other row groups of a file (6 rows and 2 rows)
    # are searched twice: for the keys, and for the earlier keys of rows whose key changed.
    assert searched == [6, 6, 2, 2]
    assert essence(merged) == [(1, "x", "old 1"), (30, "y", "old 9"), (31, "z", "old 21")]
    assert stored.gone(merged) == [[1, 2, 9], [1]]
    searched.clear()
    monkeypatch.setattr(rowgroups, "MATCHED_BYTES", 1)
    apart = merge(stored, *events)
    assert searched == [2] * 8
    assert (essence(apart), stored.gone(apart)) == (essence(merged), stored.gone(merged))


def test_texts_are_compared_by_code_point_to_decide_which_row_groups_are_skipped(stored: Stored) -> None:
    stored.file(row(1, b="Z"), row(2, b="a\x00"), row(3, b="a"), row(4, b="é"), group=2)
    stored.file(row(5, b="x" * 100), row(6, b="\U0001f600"), row(7, b="\uffee"), group=1)
    for number, text in ((1, "Z"), (2, "a\x00"), (3, "a"), (4, "é"), (6, "\U0001f600"), (7, "\uffee")):
        assert number in looked_at(stored, text)
    assert looked_at(stored, "A", "M") == []
    assert looked_at(stored, "\U0001f600") == [6]


def looked_at(stored: Stored, *texts: str) -> list[int]:
    """The ids in the row groups that may contain one of these texts."""
    files = stored.target.files_groups(wanted({"b": pa.array(texts)}))
    return [number for groups in files for group in groups for number in group.read(["id"])["id"].to_pylist()]


def test_no_row_groups_are_skipped_if_a_wanted_key_is_null_or_a_float() -> None:
    assert wanted({"id": pa.array([1, None])}) == {}
    assert wanted({"id": pa.array([1.5])}) == {}
    assert wanted({"id": pa.array(["b", "a", "b"])})["id"].tolist() == ["a", "b"]
    assert wanted({"id": pa.array([3, 1, 3], pa.int16())})["id"].tolist() == [1, 3]


# Rows without a key -----------------------------------------------------------------------------

BAG = (FeedColumn("id", "id", 1, False), FeedColumn("b", "b", 2, False), FeedColumn("c", "c", 3, False))


def bag_row(b: str | None, number: int, hash_: int = 5, c: str | None = "c") -> dict[str, Any]:
    return {"id": 1, "b": b, "c": c, "_pgcdc_hash": hash_, "_pgcdc_row": f"r{number}"}


def take(stored: Stored, *rows: tuple[str | None, int]) -> Done:
    """Deletes one copy of each of these rows, given as (b, hash)."""
    written: list[pa.Table] = []
    events = feed_rows([("D", 1) for _ in rows])
    for name, values, kind in (("b", [b for b, _ in rows], pa.string()), ("c", ["c"] * len(rows), pa.string())):
        events = events.set_column(events.schema.get_field_index(name), name, pa.array(values, kind))
    events = events.append_column(HASH, pa.array([hash_ for _, hash_ in rows], pa.int64()))
    events = events.append_column(ROW, pa.array([None] * len(rows), pa.string()))
    return Done.of(merge_multiset(stored.target, net_rows(events, BAG), BAG, (), written.append), written)


def test_as_many_equal_rows_are_removed_as_were_deleted_on_the_source(tmp_path: Path) -> None:
    stored = Stored(tmp_path, (HASH, ROW))
    stored.file(bag_row("x", 3), bag_row("y", 1, 6), bag_row("x", 2), gone=[])
    stored.file(bag_row("x", 1), bag_row("x", 0), gone=[1])
    merged = take(stored, ("x", 5), ("x", 5))
    assert stored.gone(merged) == [[0, 2], []], "any two of the equal rows"
    assert merged.deleted == 2
    with pytest.raises(MergeMismatch, match=LACKS):
        take(stored, *[("x", 5)] * 4)


def test_equal_rows_are_removed_from_row_groups_that_are_searched_together(tmp_path: Path) -> None:
    stored = Stored(tmp_path, (HASH, ROW))
    stored.file(bag_row("y", 0, 6), *(bag_row("x", number) for number in range(1, 6)), gone=[1])
    assert stored.gone(take(stored, ("x", 5), ("y", 6), ("x", 5), ("x", 5))) == [[0, 2, 3, 4]]


def test_different_rows_with_the_same_hash_are_distinguished(tmp_path: Path) -> None:
    stored = Stored(tmp_path, (HASH, ROW))
    stored.file(bag_row("x", 0), bag_row(None, 1), bag_row("z", 2))
    assert stored.gone(take(stored, (None, 5))) == [[1]]
    with pytest.raises(MergeMismatch, match=LACKS):
        take(stored, ("w", 5))
