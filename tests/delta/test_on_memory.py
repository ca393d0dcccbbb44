"""The code for Delta tables needs only what the store interface promises. In these tests the store is in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pyarrow as pa
import pytest
from deltalake import Schema

from pgcdc_assets.core.layout import DELTA_LOG, Location, checkpoint_name, commit_name
from pgcdc_assets.delta.commit import commit_files, replace_files
from pgcdc_assets.delta.datafile import DataFile, FileReport, dataset, opened_parquet
from pgcdc_assets.delta.definition import commit_columns, create_table
from pgcdc_assets.delta.log import DeltaLog, DeltaVersion, open_delta
from pgcdc_assets.delta.sweep import sweep
from pgcdc_assets.delta.vectors import kept, read_vector
from pgcdc_assets.store import storage
from tests.memorystore import lake_in_memory

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
    # The commits are all made now, so all log files before the newest checkpoint are deleted.
    assert not storage.exists(table / DELTA_LOG / commit_name(3))
    assert ids(table, 9) == list(range(9))
    newest = log.newest()
    assert newest is not None
    assert newest.number == 9


def test_columns_are_added_and_files_are_removed(table: Location) -> None:
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


def test_a_file_removed_recently_is_not_swept(table: Location, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_version_within_the_retention_of_the_log_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    root = lake_in_memory()
    properties = {"delta.checkpointInterval": "3", "delta.logRetentionDuration": "interval 2 hours"}
    create_table(root / "t", Schema.from_arrow(ROWS), properties, {}, root)
    for number in range(1, 13):
        clock.hours_pass(0.5)
        commit_files(now(root / "t"), [written(root / "t", number)], "append", {})
        for version in range(max(0, number - 4), number + 1):
            assert ids(root / "t", version) == list(range(1, version + 1))
    # Files before the newest checkpoint that is two hours old are not needed.
    assert next(entry.name for entry in storage.list_after(root / "t" / DELTA_LOG)) == checkpoint_name(6)
    storage.delete_folder(root)
