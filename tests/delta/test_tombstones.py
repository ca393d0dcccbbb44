"""Another program runs VACUUM. Promised versions stay readable, although checkpoints list only some removed files."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.checkpoint import DELETED_FILES, LOG, missing_properties, retention_properties
from pgcdc_assets.delta.commit import commit_rewritten
from pgcdc_assets.errors import LakeError
from pgcdc_assets.lake.lake import Lake
from pgcdc_assets.mirror.delta.compaction import compact_file
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirrors, create_mirror
from pgcdc_assets.mirror.delta.mirrorschema import MirrorSchema
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.delta.rows import OWNER, SCHEMA, Rows
from tests.deltatables import commit, live_files, publish_at
from tests.history.mirror import make

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


def named_as_gone(path: Path) -> set[str]:
    """The files that the newest checkpoint lists as removed."""
    newest = max((path / "_delta_log").glob("*.checkpoint.parquet"))
    return {one["path"] for one in pq.ParquetFile(newest).read()["remove"].to_pylist() if one is not None}


def lived_long_and_short(rows: Rows) -> tuple[str, str]:
    """Removes two files three hours ago: one that existed for ten days, and one that was removed right after it was
    written. Then makes a checkpoint. Returns both paths."""
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


def test_retention_properties_are_only_ever_lengthened() -> None:
    wanted = retention_properties(timedelta(days=7))
    assert wanted == {LOG: "interval 720 hours", DELETED_FILES: "interval 192 hours"}
    assert retention_properties(timedelta(days=99))[DELETED_FILES] == "interval 384 hours"
    assert missing_properties({}, timedelta(days=7)) == wanted
    assert missing_properties({LOG: "interval 30 days", DELETED_FILES: "interval 1 hours"}, 7 * DAY).keys() == {
        DELETED_FILES
    }
    assert missing_properties({LOG: "interval 5 weeks", DELETED_FILES: "8 days"}, 7 * DAY) == {}
    assert missing_properties({LOG: "a while", DELETED_FILES: "interval 2 weeks"}, 7 * DAY) == {LOG: wanted[LOG]}


def test_checkpoints_name_removed_files_that_lived_for_long(tmp_path: Path) -> None:
    mirror = Mirrors(Layout.of(tmp_path), OWNER).open(NAME)
    make(
        mirror,
        MirrorSchema(SCHEMA),
        {IDENTITY: OWNER.app_id(), "delta.checkpointInterval": "5", **retention_properties(7 * DAY)},
    )
    rows = Rows(path_of(mirror.path))
    long, short = lived_long_and_short(rows)
    assert (rows.delta.number % 5, named_as_gone(rows.path)) == (0, {long})
    # The next checkpoint is written from the content of this checkpoint.
    for number in range(5):
        rows.change([1000 + number], set())
    assert named_as_gone(rows.path) == {long}
    assert short not in named_as_gone(rows.path)
    for version, held in enumerate(rows.history, 1):
        assert rows.read(version) == sorted(held)


def test_a_vacuum_by_delta_rs_keeps_promised_versions(tmp_path: Path) -> None:
    mirror = Mirrors(Layout.of(tmp_path), OWNER).open(NAME)
    make(
        mirror,
        MirrorSchema(SCHEMA),
        {IDENTITY: OWNER.app_id(), "delta.checkpointInterval": "5", **retention_properties(7 * DAY)},
    )
    rows = Rows(path_of(mirror.path))
    lived_long_and_short(rows)
    DeltaTable(rows.path).vacuum(dry_run=False)
    _as_promised(rows)


@pytest.mark.long
@pytest.mark.spark
def test_a_vacuum_by_spark_keeps_promised_versions(spark: SparkSession, tmp_path: Path) -> None:
    path = Layout.of(tmp_path).mirror(NAME)
    create_mirror(path, MirrorSchema(SCHEMA), {IDENTITY: OWNER.app_id(), "delta.checkpointInterval": "5"}, path)
    rows = Rows(path_of(path))
    lived_long_and_short(rows)
    for version in range(int(max(path_of(path / "_delta_log").glob("*.checkpoint.parquet")).name[:20])):
        # Hide these commits, so that only the checkpoint lists the removed files.
        log = path / "_delta_log" / f"{version:020}.json"
        path_of(log).rename(path_of(log).with_suffix(".kept"))
    spark.newSession().sql(f"VACUUM delta.`{path}`").collect()
    for kept in path_of(path / "_delta_log").glob("*.kept"):
        kept.rename(kept.with_suffix(".json"))
    _as_promised(rows)


def _as_promised(rows: Rows) -> None:
    for version, held in enumerate(rows.history, 1):
        assert rows.read(version) == sorted(held)


def test_a_mirror_that_lacks_a_file_is_not_read(tmp_path: Path) -> None:
    """A full VACUUM by delta-rs deletes all files that no commit names. It does not see that commits name the files of
    deletion vectors, and deletes them."""
    layout = Layout.of(tmp_path)
    mirror, points = Mirrors(layout, OWNER).open(NAME), ConsistentPoints(layout)
    make(mirror, MirrorSchema(SCHEMA), {IDENTITY: OWNER.app_id(), **retention_properties(7 * DAY)})
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
