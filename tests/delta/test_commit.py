"""Commits with deletion vectors, and other changes of Delta tables by pgcdc. In every version, other engines read the
rows that a simple model predicts."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, Schema
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import DELTA_LOG, Layout, Location, checkpoint_name, commit_name
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import FileChange, commit_change, commit_files, commit_rewritten, loosened, replace_files
from pgcdc_assets.delta.datafile import DataFile, FileReport, dataset, opened_parquet
from pgcdc_assets.delta.definition import commit_columns, commit_properties, create_table
from pgcdc_assets.delta.log import DeltaLog, DeltaVersion, open_delta
from pgcdc_assets.delta.sweep import sweep
from pgcdc_assets.delta.vectors import kept, read_vector
from pgcdc_assets.errors import CommitLost, LakeError
from pgcdc_assets.mirror.delta.compaction import Compaction, compact_file
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirrors, create_mirror
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget
from pgcdc_assets.store import storage
from pgcdc_assets.store.local import path_of
from tests.delta.rows import OWNER, SCHEMA, Rows
from tests.deltatables import live_files
from tests.history.mirror import make
from tests.memorystore import lake_in_memory


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    layout = Layout.of(tmp_path)
    mirror = Mirrors(layout, OWNER).open(TableName("public", "t"))
    make(mirror, SCHEMA, {IDENTITY: OWNER.app_id(), "delta.logRetentionDuration": "interval 30 days"})
    return Rows(path_of(mirror.path))


STEPS = st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 60), max_size=20)), min_size=1, max_size=30)


@example([(4, set()), (0, {0}), (0, {1})])
@given(STEPS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_version_holds_the_rows_of_the_model(tmp_path: Path, steps: list[tuple[int, set[int]]]) -> None:
    """delta-rs reads each version, before and after checkpoints."""
    shutil.rmtree(tmp_path / "public", ignore_errors=True)
    mirror = Mirrors(Layout.of(tmp_path), OWNER).open(TableName("public", "t"))
    make(mirror, SCHEMA, {})
    table, fresh = Rows(path_of(mirror.path)), count()
    for new, removed in steps:
        table.change([next(fresh) for _ in range(new)], removed & table.held)
    for version, held in enumerate(table.history, 1):
        assert table.read(version) == sorted(held)
    assert table.delta.positions["app"] == len(steps)
    checkpoints = list(path_of(mirror.path / "_delta_log").glob("*.checkpoint.parquet"))
    assert len(checkpoints) == len(steps) // 10


def test_a_version_number_is_committed_only_once(rows: Rows) -> None:
    table = rows.delta
    rows.change([1], set())
    with pytest.raises(LakeError, match="another writer committed at the same time"):
        commit_change(table, FileChange(rows.written([2]), {}), {"app": 9}, {})
    assert rows.read() == [1]
    assert list((rows.path / "_delta_log").glob("*.tmp")) == []


def test_a_position_of_an_application_is_committed_only_once(rows: Rows) -> None:
    rows.change([1], set())
    with pytest.raises(LakeError, match="already records 1 for app"):
        rows.change([2], set(), transaction=1)


def test_rows_that_are_deleted_cannot_be_deleted_again(rows: Rows) -> None:
    rows.change([1, 2], set())
    rows.change([], {1})
    live = live_files(rows.path)
    with pytest.raises(LakeError, match="a commit would delete rows that are already deleted"):
        commit_change(rows.delta, FileChange([], {live[0].path: BitMap64([0])}), {"app": 9}, {})
    with pytest.raises(LakeError, match="not part of the table"):
        commit_change(rows.delta, FileChange([], {"other.parquet": BitMap64([0])}), {"app": 9}, {})
    assert rows.read() == [2]


def test_a_table_with_an_unsupported_feature_is_refused(rows: Rows) -> None:
    log = rows.path / "_delta_log" / f"{0:020}.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[0]["protocol"]["writerFeatures"].append("rowTracking")
    log.write_text("\n".join(json.dumps(line) for line in lines))
    with pytest.raises(LakeError, match="a table feature that pgcdc cannot write: rowTracking"):
        rows.change([1], set())


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ('{"numRecords":2,"maxValues":{"n":1234567890123456.78}}',
         '{"numRecords":2,"maxValues":{"n":1234567890123456.78},"tightBounds":false}'),
        ('{"numRecords":2,"tightBounds": true}', '{"numRecords":2,"tightBounds":false}'),
        ('{"minValues":{"v":"\\"tightBounds\\":true"}}',
         '{"minValues":{"v":"\\"tightBounds\\":true"},"tightBounds":false}'),
        ("{}", '{"tightBounds":false}'),
    ],
)  # fmt: skip
def test_setting_tight_bounds_to_false_keeps_every_digit_of_the_statistics(stats: str, expected: str) -> None:
    assert loosened(stats) == expected


def test_compaction_merges_small_files_into_one(rows: Rows) -> None:
    """The merged file lacks the rows that deletion vectors removed. Earlier versions and positions do not change."""
    compaction = Compaction(most_small=5)
    for number in range(6):
        assert compaction.small_files(live_files(rows.path)) == ()
        rows.change([10 * number, 10 * number + 1], {10 * number - 10} & rows.held)
    before = rows.delta
    small = compaction.small_files(before.files)
    assert len(small) == 6
    report = compact_file(MergeTarget(Location.of(rows.path), SCHEMA, ("id", "v"), small))
    version = commit_rewritten(before, small, report)
    (file,) = live_files(rows.path)
    assert rows.delta.number == version
    assert (file.rows, file.deleted) == (7, 0)
    assert rows.read() == rows.read(version - 1) == sorted(rows.held)
    assert rows.delta.positions == before.positions
    assert pq.read_metadata(rows.path / file.path).num_row_groups == 1
    rows.change([], set(rows.held))
    assert live_files(rows.path) == ()


def test_old_temporary_commit_files_of_a_killed_writer_are_deleted_at_a_checkpoint(rows: Rows) -> None:
    log = rows.path / "_delta_log"
    old, young = log / "_commit_1.json.tmp", log / "_commit_2.json.tmp"
    for staged in (old, young):
        staged.write_text("{}")
    os.utime(old, (0, 0))
    for number in range(10):
        rows.change([number], set())
    assert (old.exists(), young.exists()) == (False, True)


def test_compaction_first_rewrites_the_file_with_the_most_deleted_rows(rows: Rows) -> None:
    """A turn that deletes rows of a file writes the file's whole deletion vector again. So the file with the largest
    vector is rewritten first, one file at a time."""
    compaction = Compaction(fewest_worn=4)
    rows.change(list(range(100)), set())
    rows.change(list(range(100, 200)), {0, 1, 2})
    assert compaction.worth_rewriting(live_files(rows.path)) == (), "few rows, though a share that counts"
    rows.change([], {3, *range(100, 106)})
    (most,) = worn = compaction.worth_rewriting(rows.delta.files)
    assert most.deleted == 6
    version = commit_rewritten(
        rows.delta, worn, compact_file(MergeTarget(Location.of(rows.path), SCHEMA, ("id", "v"), worn))
    )
    assert rows.read() == rows.read(version - 1) == sorted(rows.held)
    assert [file.deleted for file in compaction.worth_rewriting(rows.delta.files)] == [4]
    assert replace(compaction, worn_share=24).worth_rewriting(rows.delta.files) == ()


def test_compaction_whose_new_files_lack_rows_is_refused(rows: Rows) -> None:
    rows.change([1, 2], set())
    live = live_files(rows.path)
    with pytest.raises(LakeError, match="has 2 rows to write to new files"):
        commit_rewritten(rows.delta, live, rows.written([1]))
    assert rows.read() == [1, 2]


@pytest.mark.long
@pytest.mark.spark
def test_spark_reads_our_commits_and_adds_its_own(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's DELETE adds rows to deletion vectors of pgcdc, and commits of pgcdc add rows to Spark's deletion vectors.
    Spark's OPTIMIZE removes all deletion vectors. Spark's change data feed reports the changed rows."""
    path = tmp_path / "t"
    create_mirror(Location.of(path), SCHEMA, {"delta.enableChangeDataFeed": "true"}, Location.of(path))
    rows, name = Rows(path), f"delta.`{path}`"

    def read(columns: str = "id", source: str = name) -> list[Any]:
        return sorted(tuple(row) for row in spark.sql(f"SELECT {columns} FROM {source}").collect())

    rows.change(list(range(10)), set())
    rows.change([10], {1, 2})
    assert read() == [(0,), *((number,) for number in range(3, 11))]
    changes = read("id, _change_type", f"table_changes_by_path('{path}', 2)")
    assert changes == [(1, "delete"), (2, "delete"), (10, "insert")]
    spark.sql(f"DELETE FROM {name} WHERE id IN (3, 4)").collect()
    rows.held -= {3, 4}
    rows.change([11], {0, 10})
    assert read() == [(number,) for number in (5, 6, 7, 8, 9, 11)]
    assert [row[0] for row in read()] == rows.read() == sorted(rows.held)
    spark.sql(f"OPTIMIZE {name}").collect()
    assert [file.deleted for file in live_files(path)] == [0]
    rows.change([12], {11})
    assert read() == [(number,) for number in (5, 6, 7, 8, 9, 12)]
    history = spark.sql(f"DESCRIBE HISTORY {name} LIMIT 1").collect()[0]
    assert (history["operation"], history["operationMetrics"]) == ("MERGE", {"numTargetRowsInserted": "1"})


# The code for Delta tables works with every kind of store -------------------------------------------

ROWS = pa.schema([("id", pa.int64())])
PROPERTIES = {"delta.checkpointInterval": "4", "delta.logRetentionDuration": "interval 0 seconds"}


@pytest.fixture
def table() -> Iterator[Location]:
    root = lake_in_memory()
    create_table(root / "t", Schema.from_arrow(ROWS), PROPERTIES, {"app": 1}, root)
    yield root / "t"
    storage.delete_folder(root)


def now(table: Location) -> DeltaVersion:
    found = open_delta(table)
    assert found is not None
    return found


def written(table: Location, *ids: int) -> FileReport:
    with DataFile(table, ROWS) as file:
        file.write([pa.array(ids, pa.int64())])
        report = file.finish()
    assert report is not None
    return report


def ids(table: Location, version: int | None = None) -> list[int]:
    at = now(table) if version is None else DeltaLog(table).at(version)
    found: list[int] = []
    for file in at.files:
        vector = file.action.get("deletionVector")
        with opened_parquet(table / file.path) as data:
            rows = data.read()
        live = kept(len(rows), None if vector is None else read_vector(table, vector))
        found += rows["id"].filter(pa.array(live)).to_pylist()
    return sorted(found)


def test_old_log_files_are_deleted_once_a_checkpoint_covers_them(table: Location) -> None:
    log = DeltaLog(table)
    for number in range(9):
        assert commit_files(now(table), [written(table, number)], "append", {"app": number + 2}) == number + 1
    assert ids(table) == list(range(9))
    assert now(table).positions == {"app": 10}
    assert storage.exists(table / DELTA_LOG / checkpoint_name(8))
    # Log files before the newest checkpoint are deleted at once, because the table's logRetentionDuration is zero.
    assert not storage.exists(table / DELTA_LOG / commit_name(3))
    assert ids(table, 9) == list(range(9))
    newest = log.newest()
    assert newest is not None
    assert newest.number == 9


def test_commits_add_columns_and_remove_files_of_a_table_in_memory(table: Location) -> None:
    commit_files(now(table), [written(table, 1)], "append", {})
    commit_columns(now(table), Schema.from_arrow(pa.schema([*ROWS, ("more", pa.string())])))
    wide = pa.schema([*ROWS, ("more", pa.string())])
    rows = dataset([table / file.path for file in now(table).files], wide).to_table()
    assert rows.to_pylist() == [{"id": 1, "more": None}]
    first = now(table).files[0]
    replace_files(now(table), [first], [], {})
    assert storage.exists(table / first.path)
    assert sweep(table, timedelta(hours=1)) == 0
    storage.create(table / "orphan.parquet", b"x")
    assert sweep(table, timedelta(0)) == 2
    assert not storage.exists(table / first.path)


class Clock:
    """A clock that the test sets."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        patch.setattr(time, "time", lambda: self.now)

    def hours_pass(self, hours: float) -> None:
        self.now += hours * 3600


def test_sweep_keeps_a_file_that_a_recent_commit_removed(table: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file itself may be old. It is kept because another process may still read the version that contains it."""
    clock = Clock(monkeypatch)
    commit_files(now(table), [written(table, 1)], "append", {})
    clock.hours_pass(5)
    replace_files(now(table), now(table).files, [written(table, 2)], {})
    clock.hours_pass(0.5)
    assert sweep(table, timedelta(hours=1)) == 0
    assert ids(table, 1) == [1]
    clock.hours_pass(1)
    commit_files(now(table), [written(table, 3)], "append", {})
    clock.hours_pass(2)
    assert sweep(table, timedelta(hours=1)) == 1
    assert ids(table) == [2, 3]


def test_every_version_within_the_log_retention_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    root = lake_in_memory()
    properties = {"delta.checkpointInterval": "3", "delta.logRetentionDuration": "interval 2 hours"}
    create_table(root / "t", Schema.from_arrow(ROWS), properties, {}, root)
    for number in range(1, 13):
        clock.hours_pass(0.5)
        commit_files(now(root / "t"), [written(root / "t", number)], "append", {})
        for version in range(max(0, number - 4), number + 1):
            assert ids(root / "t", version) == list(range(1, version + 1))
    # Log files before this checkpoint are not needed: it is the newest checkpoint that is at least two hours old.
    assert next(entry.name for entry in storage.list_after(root / "t" / DELTA_LOG)) == checkpoint_name(6)
    storage.delete_folder(root)


# Tables that pgcdc creates or whose columns it changes ----------------------------------------------

NUMBER = pa.schema([("a", pa.int64())])
MOMENT = pa.schema([("a", pa.int64()), ("at", pa.timestamp("us"))])


def _made(folder: Path, schema: pa.Schema) -> DeltaVersion:
    create_table(
        Location.of(folder / "t"),
        Schema.from_arrow(schema),
        {"delta.checkpointInterval": "3"},
        {"app": 5},
        Location.of(folder),
    )
    return _now(folder)


def _now(folder: Path) -> DeltaVersion:
    table = open_delta(Location.of(folder / "t"))
    assert table is not None
    return table


def _filled(table: DeltaVersion, *columns: pa.Array, schema: pa.Schema) -> None:
    with DataFile(table.folder, schema) as file:
        file.write(columns)
        report = file.finish()
    assert report is not None
    commit_files(table, [report], "append", {})


def _rows(folder: Path) -> list[dict[str, object]]:
    query = QueryBuilder().register("t", DeltaTable(folder / "t")).execute("SELECT * FROM t ORDER BY a")
    return list(pa.table(query.read_all()).to_pylist())


def test_a_table_is_created_only_once(tmp_path: Path) -> None:
    table = _made(tmp_path, NUMBER)
    assert (table.number, table.files, table.positions) == (0, (), {"app": 5})
    with pytest.raises(CommitLost):
        _made(tmp_path, NUMBER)
    assert DeltaTable(tmp_path / "t").metadata().configuration == {"delta.checkpointInterval": "3"}


@pytest.mark.parametrize("first", [NUMBER, MOMENT], ids=["column added later", "column from the start"])
def test_timestamp_columns_without_a_time_zone_are_declared_as_a_table_feature(
    tmp_path: Path, first: pa.Schema
) -> None:
    """Readers refuse a table with such columns if the table does not declare the feature."""
    table = _made(tmp_path, first)
    _filled(table, *[pa.array([1], field.type) for field in first], schema=first)
    commit_columns(_now(tmp_path), Schema.from_arrow(MOMENT))
    _filled(_now(tmp_path), pa.array([2]), pa.array([7], pa.timestamp("us")), schema=MOMENT)
    assert DeltaTable(tmp_path / "t").protocol().reader_features == ["timestampNtz"]
    assert [row["a"] for row in _rows(tmp_path)] == [1, 2]
    assert (_rows(tmp_path)[0]["at"] is None) == (first is NUMBER)
    # A checkpoint was made at version 3. It declares the same features.
    assert DeltaTable(tmp_path / "t").version() == 3
    assert _now(tmp_path).features >= {"timestampNtz", "appendOnly"}


def test_one_commit_can_change_the_columns_and_remove_the_files_with_the_old_columns(tmp_path: Path) -> None:
    table = _made(tmp_path, NUMBER)
    _filled(table, pa.array([1]), schema=NUMBER)
    table = _now(tmp_path)
    other = pa.schema([("a", pa.string())])
    assert commit_columns(table, Schema.from_arrow(other), gone=table.files, positions={"app": 0}) == 2
    assert (_now(tmp_path).files, _now(tmp_path).positions) == ((), {"app": 0})
    assert _rows(tmp_path) == []


def test_a_change_of_properties_does_not_change_the_columns(tmp_path: Path) -> None:
    table = _made(tmp_path, MOMENT)
    commit_properties(table, {"x": "1"})
    now = _now(tmp_path)
    assert now.metadata["schemaString"] == table.metadata["schemaString"]
    assert now.configuration == {"delta.checkpointInterval": "3", "x": "1"}
