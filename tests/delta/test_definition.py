"""Tables that pgcdc creates or whose columns it changes. Other engines can read them, and no row changes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, Schema

from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.commit import commit_files
from pgcdc_assets.delta.datafile import DataFile
from pgcdc_assets.delta.definition import commit_columns, commit_properties, create_table
from pgcdc_assets.delta.log import DeltaVersion, open_delta
from pgcdc_assets.errors import CommitLost

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


@pytest.mark.parametrize("first", [NUMBER, MOMENT], ids=["a column comes", "all are there"])
def test_columns_without_a_time_zone_are_declared_as_a_feature(tmp_path: Path, first: pa.Schema) -> None:
    """Readers refuse a table with such columns if the table does not declare the feature."""
    table = _made(tmp_path, first)
    _filled(table, *[pa.array([1], field.type) for field in first], schema=first)
    commit_columns(_now(tmp_path), Schema.from_arrow(MOMENT))
    _filled(_now(tmp_path), pa.array([2]), pa.array([7], pa.timestamp("us")), schema=MOMENT)
    assert DeltaTable(tmp_path / "t").protocol().reader_features == ["timestampNtz"]
    assert [row["a"] for row in _rows(tmp_path)] == [1, 2]
    assert (_rows(tmp_path)[0]["at"] is None) == (first is NUMBER)
    # The checkpoint between the versions declares the same features.
    assert DeltaTable(tmp_path / "t").version() == 3
    assert _now(tmp_path).features >= {"timestampNtz", "appendOnly"}


def test_files_of_the_old_columns_are_removed_in_the_same_commit(tmp_path: Path) -> None:
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
