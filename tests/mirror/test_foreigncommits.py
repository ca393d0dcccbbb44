"""Commits by other writers to a mirror: which of them changed rows, and how files with INT96 timestamps are read."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import commit_files
from pgcdc_assets.delta.datafile import DataFile
from pgcdc_assets.errors import CommitLost, LakeError
from pgcdc_assets.failures import ATTEMPTS, again_after_lost_races
from pgcdc_assets.lake.lake import Lake
from pgcdc_assets.mirror.delta.durability import DurableVersions, change_since, seen
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirror, Mirrors
from pgcdc_assets.mirror.delta.mirrorschema import mirror_columns
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.delta.rows import OWNER
from tests.deltatables import live_files, opened
from tests.history.mirror import make

NAME = TableName("public", "t")
TABLE = Table(1, NAME, (Column(1, "id", PgType(20, "int8")), Column(2, "at", PgType(1184, "timestamptz"))), key=(1,))
SCHEMA = mirror_columns(TABLE)
TIMES = [datetime.fromisoformat(f"{text}+00:00") for text in (
    "0001-01-01 00:00:00", "1500-01-01 12:00:00.000001", "1969-12-31 23:59:59.999999", "2300-01-01 00:00:00.500000",
    "9999-12-31 23:59:59.999999",
)]  # fmt: skip


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    """A mirror with a copy at LSN 100 that has the ids 0 to 4."""
    mirror = Mirrors(Layout.of(tmp_path), OWNER).open(NAME)
    make(mirror, SCHEMA, {IDENTITY: OWNER.app_id()})
    with DataFile(mirror.path, mirror.again().physical(SCHEMA)) as file:
        file.write(_rows().columns)
        report = file.finish()
    assert report is not None
    commit_files(opened(mirror.path), [report], "append", {mirror.snapshot_app_id: 100})
    return mirror


def _rows() -> pa.Table:
    none = {field.name: pa.nulls(len(TIMES), field.type) for field in SCHEMA}
    return pa.table({**none, "id": pa.array(range(len(TIMES))), "at": pa.array(TIMES)}).cast(SCHEMA)


def as_spark_writes_it(mirror: Mirror) -> int:
    """Rewrites the mirror's files as a user's OPTIMIZE in Spark would: the same rows, but timestamps as INT96."""
    path = mirror.path / f"part-{uuid.uuid4()}-c000.snappy.parquet"
    pq.write_table(_rows(), path_of(path), use_deprecated_int96_timestamps=True, store_schema=False)
    table = opened(mirror.path)
    actions: list[dict[str, Any]] = [{"commitInfo": {"operation": "OPTIMIZE", "engineInfo": "Apache-Spark/4.2.0"}}]
    actions += [{"remove": {"path": file.path, "dataChange": False, "deletionTimestamp": 1}} for file in table.files]
    actions.append({"add": {
        "path": path.name, "partitionValues": {}, "size": path_of(path).stat().st_size, "modificationTime": 1,
        "dataChange": False, "stats": f'{{"numRecords":{len(TIMES)}}}',
    }})  # fmt: skip
    log = mirror.path / "_delta_log" / f"{table.number + 1:020}.json"
    path_of(log).write_text("".join(f"{json.dumps(action)}\n" for action in actions))
    return table.number + 1


COMMITS: dict[str, tuple[Callable[[DeltaTable], Any], bool]] = {
    "comment": (lambda t: t.alter.set_table_description("mine"), False),
    "property": (lambda t: t.alter.set_table_properties({"delta.appendOnly": "false"}), False),
    "OPTIMIZE": (lambda t: t.optimize.z_order(["id"]), False),
    "DELETE": (lambda t: t.delete("id = 3"), True),
    "UPDATE": (lambda t: t.update({"id": "9"}, predicate="id = 3"), True),
    "nothing": (lambda t: t.delete("id = 77"), False),
}


def _changed(version: int) -> str:
    return f"another writer changed rows of this mirror (version {version})"


@pytest.mark.parametrize("name", COMMITS)
def test_commits_of_another_writer_are_reported_only_if_they_changed_rows(mirror: Mirror, name: str) -> None:
    commit, changes = COMMITS[name]
    before = opened(mirror.path).number
    commit(DeltaTable(path_of(mirror.path)))
    told = change_since(mirror.path, OWNER.app_id(), before)
    assert told == (_changed(before + 1) if changes else None)
    # A later commit by pgcdc must not hide the other writer's change. After a new copy, the change is no longer
    # reported.
    commit_files(opened(mirror.path), [], "append", {OWNER.app_id("64"): 200})
    assert change_since(mirror.path, OWNER.app_id(), before) == told
    commit_files(opened(mirror.path), [], "overwrite", {mirror.snapshot_app_id: 300})
    assert change_since(mirror.path, OWNER.app_id(), before) is None


def test_a_commit_marked_as_no_data_change_is_reported_if_it_changes_the_number_of_rows(mirror: Mirror) -> None:
    version = opened(mirror.path).number
    files = [{"add": file.action | {"dataChange": False}} for file in live_files(mirror.path)]
    removed = [{"remove": {"path": one["add"]["path"], "dataChange": False}} for one in files]
    info = {"commitInfo": {"operation": "OPTIMIZE", "engineInfo": "another"}}
    assert seen(mirror.path, OWNER.app_id(), {version: [info, *removed, *files]})[1] is None
    told = seen(mirror.path, OWNER.app_id(), {version: [info, *removed]})[1]
    assert told == _changed(version)


def test_timestamps_written_by_spark_are_read_correctly(mirror: Mirror, tmp_path: Path) -> None:
    """Readers of points and pgcdc's merges read the INT96 timestamps that Spark writes. A rewrite of files with such
    timestamps is not reported as a change of rows if Spark rewrites them, but is reported if delta-rs does."""
    version = as_spark_writes_it(mirror)
    points, durable = ConsistentPoints(Layout.of(tmp_path)), DurableVersions(Layout.of(tmp_path), OWNER.app_id())
    points.publish(Lsn(100), {NAME: version}, durable.settle({NAME: version}))
    read = Lake(tmp_path).at().arrow(NAME)
    assert sorted(read["at"].to_pylist()) == TIMES
    now = mirror.again()
    groups = now.target(TABLE, live_files(mirror.path)).groups()
    assert [group.read(["at"])["at"].to_pylist() for group in groups] == [TIMES]
    again = as_spark_writes_it(mirror)
    assert change_since(mirror.path, OWNER.app_id(), version) is None
    DeltaTable(path_of(mirror.path)).optimize.z_order(["id"])
    assert change_since(mirror.path, OWNER.app_id(), version) == _changed(again + 1)


def test_readers_refuse_a_mirror_at_points_after_another_writer_changed_its_rows(
    mirror: Mirror, tmp_path: Path
) -> None:
    points, durable = ConsistentPoints(Layout.of(tmp_path)), DurableVersions(Layout.of(tmp_path), OWNER.app_id())
    for lsn in (100, 200):
        version = opened(mirror.path).number
        positions = durable.settle({NAME: version})
        points.publish(Lsn(lsn), {NAME: version}, positions, durable.changed)
        DeltaTable(path_of(mirror.path)).delete("id = 3")
    lake = Lake(tmp_path)
    assert (lake.at(100).tables, lake.at(200).tables, lake.tables) == ([NAME], [], [])
    assert len(lake.at(100).arrow(NAME)) == 5
    for refused in (lake.at(200).arrow, lake.at(200).path):
        with pytest.raises(LakeError, match="does not match the source: another writer changed rows of this mirror"):
            refused(NAME)
    # The next run reads only commits after the version that the last point lists. It takes the change from the point.
    # After a new copy, the change is no longer reported.
    again, after_copy = (DurableVersions(Layout.of(tmp_path), OWNER.app_id()) for _ in range(2))
    again.recover([NAME], points)
    assert again.changed == durable.changed != {}
    commit_files(opened(mirror.path), [], "overwrite", {mirror.snapshot_app_id: 300})
    after_copy.recover([NAME], points)
    for found in (durable, again):
        found.settle({NAME: opened(mirror.path).number})
    assert durable.changed == again.changed == after_copy.changed == {}


def test_a_commit_is_tried_again_only_if_another_writer_committed_first() -> None:
    tries: list[Exception] = []

    def step(*errors: Exception) -> int:
        tries.append(errors[len(tries)] if len(tries) < len(errors) else LookupError())
        if isinstance(tries[-1], LookupError):
            return len(tries)
        raise tries[-1]

    assert again_after_lost_races(lambda: step(*[CommitLost("first")] * (ATTEMPTS - 1))) == ATTEMPTS
    for error, count in ((CommitLost("first"), ATTEMPTS), (LakeError("is damaged"), 1)):
        tries.clear()
        with pytest.raises(LakeError, match=error.what):
            again_after_lost_races(lambda error=error: step(*[error] * 9))  # type: ignore[misc]
        assert len(tries) == count
