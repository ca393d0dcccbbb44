"""A sweep deletes the files that no kept version of a table needs. The tests compare the files that a sweep must keep
with a model. The last tests run VACUUM with other engines."""

from __future__ import annotations

import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.checkpoint import DELETED_FILES, LOG, missing_properties, retention_properties
from pgcdc_assets.delta.commit import commit_rewritten
from pgcdc_assets.delta.log import Added
from pgcdc_assets.delta.sweep import LogListing, needed_files
from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.lake import Lake
from pgcdc_assets.mirror.delta import compaction
from pgcdc_assets.mirror.delta.compaction import compact_file
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirrors, create_mirror
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.delta.rows import OWNER, SCHEMA, Rows
from tests.deltatables import commit, live_files, publish_at
from tests.history.mirror import make

VECTORS = {
    # How a log names a file of deletion vectors, and the file's path: the example in Delta's protocol, and the same
    # file without a subfolder.
    "ab^-aqEH.-t@S}K{vb[*k^": "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin",
    "^-aqEH.-t@S}K{vb[*k^": "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin",
}
_VECTOR = pa.struct([("storageType", pa.string()), ("pathOrInlineDv", pa.string()), ("offset", pa.int32()),
                     ("cardinality", pa.int64())])  # fmt: skip
_ADD = pa.struct([("path", pa.string()), ("size", pa.int64()), ("stats", pa.string()), ("deletionVector", _VECTOR)])

File = tuple[str, str | None]
files = st.tuples(st.sampled_from(["a.parquet", "b%20c.parquet", "x/d.parquet"]), st.sampled_from([None, *VECTORS]))
# A commit adds each path at most once, because the protocol forbids more.
commits = st.lists(st.lists(files, max_size=3, unique_by=lambda file: file[0]), min_size=1, max_size=8)


def _action(file: File) -> dict[str, Any]:
    vector = None if file[1] is None else {"storageType": "u", "pathOrInlineDv": file[1], "offset": 1, "cardinality": 2}
    return {"path": file[0], "size": 9, "stats": '{"numRecords": 5}', "deletionVector": vector}


def _names(held: set[File]) -> set[str]:
    names = {path.replace("%20", " ") for path, _ in held}
    return names | {VECTORS[vector] for _, vector in held if vector is not None}


def _write(log: Path, versions: list[list[File]], checkpoints: set[int]) -> list[set[File]]:
    """Writes the commits. A commit's file replaces a file of the same path. Returns the files after each commit."""
    held: set[File] = set()
    states = []
    for number, added in enumerate(versions):
        lines = ['{"commitInfo":{}}']
        for file in added:
            lines += [json.dumps({"remove": _action(old)}, separators=(",", ":")) for old in held if old[0] == file[0]]
            lines.append(json.dumps({"add": _action(file)}, separators=(",", ":")))
            held = {old for old in held if old[0] != file[0]} | {file}
        (log / f"{number:020}.json").write_text("\n".join(lines))
        states.append(set(held))
        if number in checkpoints:
            column = pa.array([None, *(_action(file) for file in held)], _ADD)
            pq.write_table(pa.table({"add": column}), log / f"{number:020}.checkpoint.parquet")
    return states


@given(commits, st.sets(st.integers(0, 7)), st.data())
@settings(max_examples=60, deadline=None)
def test_needed_files_are_exactly_the_files_of_the_kept_versions(
    versions: list[list[File]], checkpoints: set[int], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "_delta_log").mkdir()
        states = _write(folder / "_delta_log", versions, checkpoints)
        newest = len(states) - 1
        wanted = data.draw(st.sets(st.integers(0, newest))) | {newest}
        # The commits between two wanted versions may be missing if the second version has a checkpoint.
        for version in sorted(checkpoints & wanted):
            for gone in range(max({-1, *(one for one in wanted if one < version)}) + 1, version):
                if not data.draw(st.booleans()):
                    continue
                (folder / "_delta_log" / f"{gone:020}.json").unlink()
        found = needed_files(LogListing.of(Location.of(folder)), wanted, newest)
        assert found == set().union(*(_names(states[version]) for version in wanted))


def test_a_delta_log_with_a_missing_commit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    _write(tmp_path / "_delta_log", [[("a.parquet", None)], [], []], set())
    (tmp_path / "_delta_log" / f"{1:020}.json").unlink()
    with pytest.raises(LakeError, match="need this commit"):
        needed_files(LogListing.of(Location.of(tmp_path)), {0}, 2)


@pytest.mark.parametrize("odd", [
    {"path": "file:///elsewhere/a.parquet"},
    {"path": "a.parquet", "deletionVector": {"storageType": "p", "pathOrInlineDv": "s3://b/x.bin", "cardinality": 1}},
])  # fmt: skip
def test_log_that_names_a_file_outside_of_the_table_folder_is_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    (tmp_path / "_delta_log").mkdir()
    line = json.dumps({"add": {"size": 1, **odd}}, separators=(",", ":"))
    (tmp_path / "_delta_log" / f"{0:020}.json").write_text(line)
    with pytest.raises(LakeError):
        needed_files(LogListing.of(Location.of(tmp_path)), {0}, 0)


def test_compaction_is_worthwhile_for_many_small_files_or_for_many_deleted_rows() -> None:
    small, large = Added("a", 1000, 10, None, 0), Added("b", compaction.FILE_BYTES, 1_000_000, None, 0)
    emptied = Added("c", compaction.FILE_BYTES, 1_000_000, "v", 500_000)
    assert not compaction.worth_optimizing([])
    assert not compaction.worth_optimizing([small] * compaction.MOST_SMALL + [large] * 100)
    assert compaction.worth_optimizing([small] * (compaction.MOST_SMALL + 1))
    assert compaction.worth_optimizing([emptied, large])
    assert not compaction.worth_optimizing([emptied, large, large])
    assert not compaction.worth_optimizing([Added("d", 1000, 10, "v", 9)])


# Another program runs VACUUM ------------------------------------------------------------------------

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = TableName("public", "t")
DAY = timedelta(days=1)


def older(path: Path, by: timedelta) -> None:
    """Moves the times of a table's files, and all times in its commits, into the past."""
    for file in path.rglob("*"):
        if file.suffix == ".json":
            file.write_text("".join(f"{_older(line, by)}\n" for line in file.read_text().splitlines()))
        if file.is_file():
            at = file.stat().st_mtime - by.total_seconds()
            os.utime(file, (at, at))


def _older(line: str, by: timedelta) -> str:
    action = json.loads(line)
    for body in action.values():
        for name in ("timestamp", "deletionTimestamp", "modificationTime"):
            if name in body:
                body[name] -= int(by.total_seconds() * 1000)
    return json.dumps(action)


def removed_in_checkpoint(path: Path) -> set[str]:
    """The files that the newest checkpoint lists as removed."""
    newest = max((path / "_delta_log").glob("*.checkpoint.parquet"))
    return {one["path"] for one in pq.ParquetFile(newest).read()["remove"].to_pylist() if one is not None}


def remove_an_old_and_a_young_file(rows: Rows) -> tuple[str, str]:
    """Commits the removal of two files, and dates it back by three hours. At that time, one file is ten days old, and
    the other has just been written. Then makes a checkpoint. Returns both paths."""
    rows.change([1, 2, 3], set())
    (long,) = live_files(rows.path)
    older(rows.path, timedelta(days=10))
    rows.change([4], {1})
    short = next(file for file in live_files(rows.path) if file.path != long.path)
    _compacted(rows)
    older(rows.path, timedelta(hours=3))
    while rows.delta.number % 5:
        rows.change([rows.delta.number + 100], set())
    return long.path, short.path


def _compacted(rows: Rows) -> None:
    delta = rows.delta
    commit_rewritten(
        delta, delta.files, compact_file(MergeTarget(Location.of(rows.path), SCHEMA, ("id", "v"), delta.files))
    )
    rows.history.append(frozenset(rows.held))


def test_retention_properties_of_a_table_are_never_shortened() -> None:
    wanted = retention_properties(timedelta(days=7))
    assert wanted == {LOG: "interval 720 hours", DELETED_FILES: "interval 192 hours"}
    assert retention_properties(timedelta(days=99))[DELETED_FILES] == "interval 384 hours"
    assert missing_properties({}, timedelta(days=7)) == wanted
    assert missing_properties({LOG: "interval 30 days", DELETED_FILES: "interval 1 hours"}, 7 * DAY).keys() == {
        DELETED_FILES
    }
    assert missing_properties({LOG: "interval 5 weeks", DELETED_FILES: "8 days"}, 7 * DAY) == {}
    assert missing_properties({LOG: "a while", DELETED_FILES: "interval 2 weeks"}, 7 * DAY) == {LOG: wanted[LOG]}


def _checkpointed_rows(folder: Path) -> Rows:
    """A new mirror with a checkpoint after every five commits."""
    mirror = Mirrors(Layout.of(folder), OWNER).open(NAME)
    properties = {IDENTITY: OWNER.app_id(), "delta.checkpointInterval": "5", **retention_properties(7 * DAY)}
    make(mirror, SCHEMA, properties)
    return Rows(path_of(mirror.path))


def test_checkpoints_list_removed_files_only_if_they_were_in_the_table_for_days(tmp_path: Path) -> None:
    rows = _checkpointed_rows(tmp_path)
    long, short = remove_an_old_and_a_young_file(rows)
    assert (rows.delta.number % 5, removed_in_checkpoint(rows.path)) == (0, {long})
    # The next checkpoint is written from the content of this checkpoint.
    for number in range(5):
        rows.change([1000 + number], set())
    assert removed_in_checkpoint(rows.path) == {long}
    assert short not in removed_in_checkpoint(rows.path)
    for version, held in enumerate(rows.history, 1):
        assert rows.read(version) == sorted(held)


def test_every_version_can_be_read_after_a_vacuum_by_delta_rs(tmp_path: Path) -> None:
    rows = _checkpointed_rows(tmp_path)
    remove_an_old_and_a_young_file(rows)
    DeltaTable(rows.path).vacuum(dry_run=False)
    _assert_every_version_has_its_rows(rows)


@pytest.mark.long
@pytest.mark.spark
def test_every_version_can_be_read_after_a_vacuum_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    path = Layout.of(tmp_path).mirror(NAME)
    create_mirror(path, SCHEMA, {IDENTITY: OWNER.app_id(), "delta.checkpointInterval": "5"}, path)
    rows = Rows(path_of(path))
    remove_an_old_and_a_young_file(rows)
    for version in range(int(max(path_of(path / "_delta_log").glob("*.checkpoint.parquet")).name[:20])):
        # Hide these commits, so that only the checkpoint lists the removed files.
        log = path / "_delta_log" / f"{version:020}.json"
        path_of(log).rename(path_of(log).with_suffix(".kept"))
    spark.newSession().sql(f"VACUUM delta.`{path}`").collect()
    for kept in path_of(path / "_delta_log").glob("*.kept"):
        kept.rename(kept.with_suffix(".json"))
    _assert_every_version_has_its_rows(rows)


def _assert_every_version_has_its_rows(rows: Rows) -> None:
    for version, held in enumerate(rows.history, 1):
        assert rows.read(version) == sorted(held)


def test_mirror_that_lacks_a_file_after_a_full_vacuum_is_refused(tmp_path: Path) -> None:
    """A full VACUUM by delta-rs deletes all files that no commit names. It does not see that commits name the files of
    deletion vectors, and deletes them."""
    layout = Layout.of(tmp_path)
    mirror, points = Mirrors(layout, OWNER).open(NAME), ConsistentPoints(layout)
    make(mirror, SCHEMA, {IDENTITY: OWNER.app_id(), **retention_properties(7 * DAY)})
    rows = Rows(path_of(mirror.path))
    rows.change([1, 2, 3], set())
    commit(rows.path, [], "append", {mirror.snapshot_app_id: 100})
    version = rows.change([4], {1})
    publish_at(points, 100, {NAME: version})
    older(rows.path, timedelta(days=9))
    DeltaTable(rows.path).vacuum(dry_run=False)
    assert len(Lake(tmp_path).at().arrow(NAME)) == 3
    DeltaTable(rows.path).vacuum(dry_run=False, full=True)
    with pytest.raises(LakeError, match="version 3 cannot be read"):
        Lake(tmp_path).at().arrow(NAME)
