"""Data files: which statistics they contain, and which files a commit refuses."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from pgcdc_assets.core.layout import Location
from pgcdc_assets.delta.datafile import DataFile, FileReport
from pgcdc_assets.delta.vectors import kept, read_vector, vector_file, write_vectors, z85_decoded, z85_encoded
from pgcdc_assets.errors import LakeError
from tests.deltatables import commit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def file_of(folder: Path, columns: dict[str, pa.Array], *more: dict[str, pa.Array]) -> FileReport:
    schema = pa.schema([(name, array.type) for name, array in columns.items()])
    with DataFile(Location.of(folder), schema) as file:
        for one in (columns, *more):
            file.write(list(one.values()))
        report = file.finish()
    assert report is not None
    return report


def stats_of(folder: Path, columns: dict[str, pa.Array], *more: dict[str, pa.Array]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file_of(folder, columns, *more).stats)
    return found


@pytest.fixture
def table(tmp_path: Path) -> Path:
    DeltaTable.create(tmp_path / "t", SCHEMA)
    return tmp_path / "t"


def sound(table: Path) -> FileReport:
    return file_of(table, {"id": pa.array([1, 2]), "name": pa.array(["a", None])})


def test_data_file_without_rows_is_not_written(tmp_path: Path) -> None:
    with DataFile(Location.of(tmp_path), SCHEMA) as file:
        file.write([pa.array([], pa.int64()), pa.array([], pa.string())])
        assert file.finish() is None
    assert list(tmp_path.iterdir()) == []


def test_minimum_and_maximum_of_a_column_are_exact_or_absent(tmp_path: Path) -> None:
    stats = stats_of(
        tmp_path,
        {
            "i": pa.array([3, None, -7], pa.int16()),
            "n": pa.array([Decimal("0E-20"), Decimal("1.5"), None], pa.decimal128(38, 20)),
            "small": pa.array([Decimal("-1.50"), None, Decimal("2.00")], pa.decimal128(6, 2)),
            "d": pa.array([date(1, 1, 1), date(9999, 12, 31), None]),
            "t": pa.array([datetime(1, 1, 1, tzinfo=UTC), None, datetime(2024, 5, 6, 7, 8, 9, 123456, UTC)],
                          pa.timestamp("us", "UTC")),
            "z": pa.array([datetime(2024, 5, 6), None, None], pa.timestamp("us")),
            "f": pa.array([1.0, float("nan"), None]),
            "s": pa.array(["b", "a\0", None]),
            "long": pa.array(["b" * 65, "a", None]),
            "high": pa.array(["a", "b\U0010ffff", None]),
            "none": pa.nulls(3, pa.int32()),
            "l": pa.array([[1], None, []], pa.list_(pa.int32())),
            "b": pa.array([True, False, None]),
            "raw": pa.array([b"\0", b"", None]),
        },
    )  # fmt: skip
    assert stats["numRecords"] == 3
    assert stats["minValues"] == {
        "i": -7, "n": "0.00000000000000000000", "small": "-1.50", "d": "0001-01-01",
        "t": "0001-01-01T00:00:00.000000Z", "z": "2024-05-06T00:00:00.000000", "s": "a\0",
    }  # fmt: skip
    assert stats["maxValues"] == {
        "i": 3, "n": "1.50000000000000000000", "small": "2.00", "d": "9999-12-31",
        "t": "2024-05-06T07:08:09.123456Z", "z": "2024-05-06T00:00:00.000000", "s": "b",
    }  # fmt: skip
    assert stats["nullCount"]["none"] == 3
    assert stats["nullCount"]["i"] == 1
    assert "l" not in stats["nullCount"]


def test_minimum_and_maximum_of_a_column_cover_all_row_groups(tmp_path: Path) -> None:
    stats = stats_of(
        tmp_path,
        {"i": pa.array([5, 6]), "j": pa.array([1, 1])},
        {"i": pa.nulls(2, pa.int64()), "j": pa.array([0, 0])},
        {"i": pa.array([1, 2]), "j": pa.array([9, None])},
    )
    assert stats["minValues"] == {"i": 1, "j": 0}
    assert stats["maxValues"] == {"i": 6, "j": 9}
    assert stats["nullCount"] == {"i": 2, "j": 1}
    assert stats["numRecords"] == 6


def test_statistics_cover_the_first_32_columns_and_the_columns_of_pgcdc(tmp_path: Path) -> None:
    columns = {f"c{at}": pa.array([at]) for at in range(40)} | {"_pgcdc_commit_lsn": pa.array([77])}
    stats = stats_of(tmp_path, columns)
    assert set(stats["maxValues"]) == {*(f"c{at}" for at in range(32)), "_pgcdc_commit_lsn"}


@pytest.mark.long
@pytest.mark.spark
def test_statistics_hide_no_rows_from_spark(spark: SparkSession, tmp_path: Path) -> None:
    columns = {
        "f": pa.array([1.0, float("nan")]),
        "n": pa.array([Decimal("12345678901234567890.123456"), Decimal("-1")], pa.decimal128(38, 6)),
        "t": pa.array([datetime(2024, 5, 6, 7, 8, 9, 123456, UTC), datetime(1, 1, 1, tzinfo=UTC)],
                      pa.timestamp("us", "UTC")),
        "z": pa.array([datetime(2024, 5, 6, 7, 8, 9, 999999), datetime(1582, 10, 10)], pa.timestamp("us")),
        "d": pa.array([date(1582, 10, 10), date(9999, 12, 31)]),
        "s": pa.array(["z" * 65, "größe"]),
    }  # fmt: skip
    folder = tmp_path / "t"
    DeltaTable.create(folder, pa.schema([(name, array.type) for name, array in columns.items()]))
    commit(folder, [file_of(folder, columns)], "append", {})
    conditions = (
        "f > 5", "f = double('NaN')", "n = 12345678901234567890.123456", "n < 0",
        "t = timestamp'2024-05-06 07:08:09.123456'", "t < timestamp'0001-01-02 00:00:00'",
        "z = timestamp_ntz'2024-05-06 07:08:09.999999'", "z < timestamp_ntz'1582-10-11 00:00:00'",
        "d = date'1582-10-10'", "d = date'9999-12-31'", f"s = '{'z' * 65}'", "s = 'größe'",
    )  # fmt: skip
    counts = ", ".join(f"(SELECT count(*) FROM delta.`{folder}` WHERE {condition})" for condition in conditions)
    found = spark.sql(f"SELECT {counts}").collect()[0]
    assert [condition for condition, count in zip(conditions, found, strict=True) if count != 1] == []


def test_one_commit_changes_both_data_and_position(table: Path) -> None:
    version = commit(table, [sound(table)], "append", {"app": 10})
    now = DeltaTable(table)
    assert (now.version(), now.transaction_version("app"), now.count()) == (version, 10, 2)
    commit(table, [sound(table)], "overwrite", {"app": 10, "other": 3})
    now = DeltaTable(table)
    assert (now.transaction_version("other"), now.count()) == (3, 2)


@pytest.mark.parametrize("version", [10, 9])
def test_commit_with_a_position_at_or_below_the_current_position_is_refused(table: Path, version: int) -> None:
    commit(table, [sound(table)], "append", {"app": 10})
    with pytest.raises(LakeError, match="already records 10 for app"):
        commit(table, [sound(table)], "append", {"app": version})
    assert DeltaTable(table).count() == 2


def _missing(table: Path) -> FileReport:
    report = sound(table)
    (table / report.path).unlink()
    return report


def _narrower(table: Path) -> FileReport:
    return file_of(table, {"id": pa.array([1], pa.int32()), "name": pa.array(["a"])})


def _lacking(table: Path) -> FileReport:
    return file_of(table, {"id": pa.array([1])})


def _renamed(table: Path) -> FileReport:
    return file_of(table, {"id": pa.array([1]), "name": pa.array(["a"]), "more": pa.array(["a"])})


def _torn(table: Path) -> FileReport:
    report = sound(table)
    data = table / report.path
    data.write_bytes(data.read_bytes()[:-20])
    return replace(report, size=data.stat().st_size)


def _other_rows(table: Path) -> FileReport:
    return replace(sound(table), rows=3)


@pytest.mark.parametrize("make", [_missing, _narrower, _lacking, _renamed, _torn, _other_rows])
def test_files_that_differ_from_the_table_or_from_their_file_report_are_refused(table: Path, make: Any) -> None:
    with pytest.raises(LakeError):
        commit(table, [make(table)], "append", {"app": 1})
    assert DeltaTable(table).version() == 0


def test_data_file_may_have_columns_of_pgcdc_that_the_table_lacks(table: Path) -> None:
    columns = {"id": pa.array([1]), "name": pa.array(["a"]), "_pgcdc_op": pa.array(["insert"])}
    commit(table, [file_of(table, columns)], "append", {"app": 1})
    assert DeltaTable(table).count() == 1


def test_no_timestamp_is_written_as_int96(tmp_path: Path) -> None:
    report = file_of(tmp_path, {"t": pa.array([0], pa.timestamp("us", "UTC"))})
    assert pq.read_metadata(tmp_path / report.path).schema.column(0).physical_type == "INT64"


# Deletion vectors -----------------------------------------------------------------------------------


def test_stored_deletion_vector_has_the_bytes_of_the_delta_protocol(tmp_path: Path) -> None:
    """The stored bytes of a deletion vector are a version, the size (big endian), the magic number, Roaring's portable
    64-bit form, and a checksum."""
    rows = BitMap64([3, 4, 7, 11, 18, 29, 1 << 33])
    (descriptor,) = write_vectors(Location.of(tmp_path), [rows])
    stored = (tmp_path / (vector_file(descriptor) or "")).read_bytes()
    size = int.from_bytes(stored[1:5], "big")
    assert stored[0] == 1
    assert len(stored) == 1 + 4 + size + 4
    assert int.from_bytes(stored[5:9], "little") == 1681511377
    assert int.from_bytes(stored[9:17], "little") == 2, "32-bit bitmaps, by the upper halves of the positions"
    assert int.from_bytes(stored[-4:], "big") == zlib.crc32(stored[5:-4])
    assert (descriptor["offset"], descriptor["sizeInBytes"], descriptor["cardinality"]) == (1, size, 7)


def test_deletion_vector_stored_in_the_log_is_read(tmp_path: Path) -> None:
    rows = BitMap64([3, 4, 7])
    (descriptor,) = write_vectors(Location.of(tmp_path), [rows])
    data = (tmp_path / (vector_file(descriptor) or "")).read_bytes()[5:-4]
    padded = data + bytes(-len(data) % 4)
    inline = {"storageType": "i", "pathOrInlineDv": z85_encoded(padded), "sizeInBytes": len(data), "cardinality": 3}
    assert vector_file(inline) is None
    assert read_vector(Location.of(tmp_path), inline) == rows


@pytest.mark.long
@given(st.lists(st.sets(st.integers(0, 1 << 33)), min_size=1, max_size=4))
def test_several_deletion_vectors_in_one_file_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, sets: list[set[int]]
) -> None:
    folder = tmp_path_factory.mktemp("vectors")
    descriptors = write_vectors(Location.of(folder), [BitMap64(rows) for rows in sets])
    assert len({vector_file(descriptor) for descriptor in descriptors}) == 1
    assert [set(read_vector(Location.of(folder), descriptor)) for descriptor in descriptors] == sets


@given(st.binary(max_size=40).map(lambda data: data[: len(data) // 4 * 4]))
def test_z85_text_is_decoded_to_the_encoded_bytes(data: bytes) -> None:
    assert z85_decoded(z85_encoded(data)) == data


@pytest.mark.parametrize("place", [1, 5, 9, 20, -1])
def test_damaged_deletion_vector_is_an_error(tmp_path: Path, place: int) -> None:
    (descriptor,) = write_vectors(Location.of(tmp_path), [BitMap64(range(0, 1000, 3))])
    file = tmp_path / (vector_file(descriptor) or "")
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(LakeError, match="damaged"):
        read_vector(Location.of(tmp_path), descriptor)


def test_missing_file_of_a_deletion_vector_is_an_error(tmp_path: Path) -> None:
    (descriptor,) = write_vectors(Location.of(tmp_path), [BitMap64([1])])
    (tmp_path / (vector_file(descriptor) or "")).unlink()
    with pytest.raises(LakeError, match=r"deletion_vector_.*\.bin: does not exist"):
        read_vector(Location.of(tmp_path), descriptor)


def test_the_mask_of_kept_rows_excludes_the_rows_of_the_deletion_vector() -> None:
    assert kept(4, None).tolist() == [True] * 4
    assert kept(4, BitMap64([0, 2])).tolist() == [False, True, False, True]
