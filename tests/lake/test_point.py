"""All ways to read one point give the same rows: Arrow, batches, Polars, DuckDB, SQL, Spark.

The lake of most tests has two points, A and B, see tests/lake/lakes.py.
"""

from __future__ import annotations

import importlib
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import commit_files
from pgcdc_assets.errors import LakeError, MachineError, UnknownTable, UsageError
from pgcdc_assets.lake.point import LakeAt
from pgcdc_assets.lake.scan import compared_columns
from pgcdc_assets.mirror.delta.rowgroups import RowGroup
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of
from tests.deltatables import by_delta_rs, opened
from tests.lake.lakes import LARGE, LAST, ORDERS, ROWS_A, ROWS_B, A, B, made, written, written_tables

READERS: Mapping[str, Callable[[LakeAt], pa.Table]] = {
    "arrow": lambda at: at.arrow("public.orders"),
    "batches": lambda at: pa.Table.from_batches(at.batches(ORDERS)),
    "polars": lambda at: at.polars("orders").collect().to_arrow(),
    "polars by batches": lambda at: at.polars("orders").collect(engine="streaming").to_arrow(),
    "duckdb": lambda at: at.duckdb().sql("FROM public.orders").to_arrow_table(),
    "sql": lambda at: at.sql("SELECT * FROM orders"),
}


def rows(found: pa.Table) -> list[dict[str, Any]]:
    return sorted(found.to_pylist(), key=lambda row: row["id"])


def same(found: Iterable[Mapping[str, Any]], expected: Iterable[Mapping[str, Any]]) -> bool:
    """Compares rows. NaN is equal to NaN, and a map may come as pairs or as structs."""
    return [_comparable(row) for row in found] == [_comparable(row) for row in expected]


def _comparable(row: Mapping[str, Any]) -> dict[str, Any]:
    raw = [tuple(pair.values()) if isinstance(pair, dict) else pair for pair in row["_pgcdc_raw"] or ()]
    return {**row, "x": "NaN" if row["x"] is not None and math.isnan(row["x"]) else row["x"], "_pgcdc_raw": raw}


@pytest.mark.parametrize("reader", READERS)
def test_each_reader_gives_all_values_at_points_a_and_b(lake: Lake, reader: str) -> None:
    assert same(rows(READERS[reader](lake.at(A))), ROWS_A)
    assert same(rows(READERS[reader](lake.at())), ROWS_B)


def test_delta_rs_reads_the_expected_rows_at_point_a(lake: Lake) -> None:
    """delta-rs is an independent reader. It can read only point A, because at B a column has a widened type."""
    assert same(rows(by_delta_rs(lake.at(A), ORDERS)), ROWS_A)


def test_each_reader_works_with_a_lake_in_an_object_store(lake_in_bucket: Lake) -> None:
    at = lake_in_bucket.at(B)
    for read in READERS.values():
        assert same(rows(read(at)), ROWS_B)
    assert rows(at.arrow(ORDERS, ["id"], pc.field("id") >= 4)) == [{"id": 4}, {"id": 6}]


def test_arrow_returns_the_requested_columns_in_their_order(lake: Lake) -> None:
    found = lake.at().arrow(ORDERS, ["full name", "id"])
    assert found.column_names == ["full name", "id"]
    assert found.schema.field("id").metadata is None
    assert lake.at().arrow(ORDERS, []).num_rows == len(ROWS_B)
    with pytest.raises(UsageError, match=r"public\.orders at this point: has no column 'name'; its columns are id,"):
        lake.at().batches("orders", ["name"])


@pytest.mark.parametrize(
    ("filter", "ids"),
    [
        (pc.field("id") == 3, [3]),
        (pc.field("id") > 6, []),
        (pc.field("amount") >= LARGE, [6]),
        (pc.field("amount") == Decimal("1.50"), [2, 3]),
        (pc.field("at") == pa.scalar(LAST, pa.timestamp("us", "UTC")), [3, 6]),
        (pc.field("full name").is_null(), [4, 6]),
        (pc.field("x").is_nan(), [2]),
        (pc.field("x") > 1, [4, 6]),
        (pc.field("tags").is_valid() | (pc.field("id") < 3), [2, 6]),
        (~pc.field("id").isin([2, 3, 4]), [6]),
    ],
    ids=str,
)
def test_filter_returns_exactly_the_rows_for_which_it_is_true(
    lake: Lake, filter: pc.Expression, ids: list[int]
) -> None:
    assert [row["id"] for row in rows(lake.at().arrow(ORDERS, ["id"], filter))] == ids


def test_a_row_group_without_matching_rows_is_not_read(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []
    real = RowGroup.read

    def counted(group: RowGroup, names: list[str]) -> pa.Table:
        read.append(list(names))
        return real(group, names)

    monkeypatch.setattr(RowGroup, "read", counted)
    queries: list[Callable[[], pa.Table]] = [
        lambda: lake.at().arrow(ORDERS, ["full name"], pc.field("id") == 3),
        lambda: lake.at().sql('SELECT "full name" FROM orders WHERE id = 3'),
    ]
    for query in queries:
        read.clear()
        assert query().to_pylist() == [{"full name": "name 3"}]
        assert read == [["full name", "id"]], "one of three row groups"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT count(*) FROM public.orders", [4]),
        ("SELECT id FROM orders WHERE x > 100 ORDER BY id", [2, 6]),
        ("SELECT id FROM orders WHERE x = 'nan'::double", [2]),
        ("SELECT id FROM orders WHERE amount > 100", [6]),
        ("SELECT id FROM orders WHERE \"at\" < '1600-01-01'::timestamptz ORDER BY id", [2, 4]),
        ("SELECT id FROM orders WHERE id IN (3, 6, 9) ORDER BY id", [3, 6]),
        ("SELECT id FROM orders WHERE \"full name\" = 'name 3'", [3]),
        ("SELECT o.id FROM orders o JOIN \"Odd Schema\".\"Order \"\"Lines\"\"\" l ON o.id = l.id + 1", [2]),
        ("SELECT max(id) FROM orders o WHERE EXISTS (SELECT 1 FROM orders p WHERE p.id = o.id - 1)", [4]),
        ("SELECT name FROM (SHOW ALL TABLES) ORDER BY name", ['Order "Lines"', "orders"]),
    ],
)  # fmt: skip
def test_sql_reads_all_tables_at_one_lsn(lake: Lake, query: str, expected: list[Any]) -> None:
    assert lake.at().sql(query).columns[0].to_pylist() == expected


def test_sql_reads_schemas_whose_names_duckdb_uses_itself(tmp_path: Path) -> None:
    schemas = "memory", "temp", "main", "system", "order"
    written_tables(Location.of(tmp_path), {TableName(schema, "t"): pa.table({"name": [schema]}) for schema in schemas})
    at = Lake(tmp_path).at()
    assert [at.sql(f'FROM memory."{schema}".t')["name"][0].as_py() for schema in schemas] == [*schemas]


def test_table_name_without_a_schema_in_sql_means_schema_public(tmp_path: Path) -> None:
    """This is true even if another schema has a name that DuckDB uses itself, like ``main``."""
    schemas = "main", "public"
    written_tables(Location.of(tmp_path), {TableName(schema, "t"): pa.table({"name": [schema]}) for schema in schemas})
    assert Lake(tmp_path).at().sql("FROM t")["name"].to_pylist() == ["public"]


def test_sql_that_returns_no_result_is_refused(lake: Lake) -> None:
    with pytest.raises(UsageError, match="query: has no result"):
        lake.at().sql("")


def test_sql_does_not_read_python_variables_of_the_caller(lake: Lake) -> None:
    import duckdb

    mirrors = pa.table({"id": [1]})
    with pytest.raises(duckdb.CatalogException, match="mirrors does not exist"):
        lake.at().sql("FROM mirrors")
    assert lake.at().duckdb().sql("FROM mirrors JOIN orders USING (id)").fetchall() == [], mirrors


def test_sql_query_may_have_parameters(lake: Lake) -> None:
    assert lake.at().sql("SELECT id FROM orders WHERE id < ?", [3]).to_pylist() == [{"id": 2}]
    assert lake.at().sql("SELECT id FROM orders WHERE id < $most", {"most": 3}).to_pylist() == [{"id": 2}]


def test_polars_reads_only_the_columns_and_rows_that_it_needs(lake: Lake) -> None:
    import polars as pl

    orders = lake.at().polars("orders")
    assert orders.select(pl.len()).collect().item() == 4
    # NaN is above all numbers in Polars.
    assert orders.filter(pl.col("x") > 100).select("id").collect().to_series().to_list() == [2, 6]
    assert orders.head(2).filter(pl.col("id") > 2).select("full name").collect().to_series().to_list() == ["name 3"]


def test_error_of_each_reader_names_the_mirror_that_cannot_be_read(tmp_path: Path) -> None:
    made(Location.of(tmp_path))
    at = Lake(tmp_path).at()
    for file in path_of(at._layout.mirror(ORDERS)).glob("part-*"):
        file.unlink()
    for read in (at.arrow, lambda name: at.sql(f"FROM {name}")):
        with pytest.raises(
            LakeError, match=r"public\.orders: version 4 cannot be read: .*; its files may have been deleted"
        ):
            read("orders")
    for read in (at.polars("orders").collect, at.duckdb().sql("FROM orders").to_arrow_table):
        with pytest.raises(Exception, match=r"mirror public\.orders: version 4 cannot be read"):
            read()
    assert at.sql('FROM "Odd Schema"."Order ""Lines"""').num_rows == 1, "a query opens only the tables that it names"


@pytest.mark.parametrize("read", [LakeAt.arrow, LakeAt.batches, LakeAt.polars, LakeAt.path])
def test_error_for_an_unknown_table_names_the_table(lake: Lake, read: Callable[[LakeAt, str], Any]) -> None:
    with pytest.raises(UnknownTable, match=r"table public\.ordrs: is not in the consistent point 0/200"):
        read(lake.at(), "ordrs")


@pytest.mark.parametrize(("read", "package"), [(LakeAt.polars, "polars"), (LakeAt.sql, "duckdb")])
def test_error_for_a_missing_package_names_the_package(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, read: Callable[[LakeAt, str], Any], package: str
) -> None:
    real = importlib.import_module
    monkeypatch.setattr("pgcdc_assets.lake.views.import_module", lambda name: real(f"no_{name}"))
    with pytest.raises(MachineError, match=f"package {package}: is not installed; run `pip install {package}`"):
        read(lake.at(), "orders")


def test_tables_whose_names_differ_only_by_case_cannot_be_read_together(tmp_path: Path) -> None:
    tables = {TableName("public", name): pa.table({"id": [number]}) for number, name in enumerate(("Orders", "orders"))}
    written_tables(Location.of(tmp_path), tables)
    at = Lake(tmp_path).at()
    refused = r'public\.orders: cannot be a view together with public\."Orders", .*; read only one of these tables'
    with pytest.raises(LakeError, match=refused):
        at.duckdb()
    with pytest.raises(LakeError, match=refused):
        at.sql("FROM orders")
    assert at.duckdb(["orders"]).sql("FROM orders").fetchall()[0][0] == 1
    assert at.duckdb(['"Orders"']).sql("FROM orders").fetchall()[0][0] == 0


@pytest.mark.long
@pytest.mark.spark
def test_spark_reads_all_tables_as_views(lake: Lake, spark: SparkSession) -> None:
    for at, expected in ((lake.at(A), ROWS_A), (lake.at(B), ROWS_B)):
        at.spark(spark)
        assert same(rows(spark.sql("SELECT * FROM orders").toArrow()), expected)
        assert same(rows(at.spark(spark, "orders").toArrow()), expected)
    assert spark.sql('SELECT `select` FROM `Odd Schema.Order "Lines"`').collect()[0][0] == "only"


@pytest.mark.long
@pytest.mark.process
def test_a_session_made_by_delta_session_reads_mirrors(tmp_path: Path) -> None:
    made(Location.of(tmp_path))
    code = (
        "import sys; from pgcdc_assets import Lake, delta_session; "
        "session = delta_session({'spark.master': 'local[1]', 'spark.sql.warehouse.dir': sys.argv[1] + '/warehouse'}); "
        "Lake(sys.argv[1]).at().spark(session); print(session.sql('SELECT min(at) FROM orders').toArrow().to_pylist())"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=tmp_path, check=True, capture_output=True)
    assert b"datetime.datetime(1, 1, 1, 0, 0, tzinfo=" in done.stdout


def test_columns_of_a_filter_are_all_columns_that_it_compares() -> None:
    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(100)])
    assert compared_columns((pc.field("c3") > 5) & ~(pc.field("c99") < pc.field("c7")), schema) == ["c3", "c7", "c99"]
    with pytest.raises(pa.ArrowInvalid, match="No match for FieldRef"):
        compared_columns(pc.field("d") > 5, schema)


# Reading a large table needs the memory of one part of a file, and not of the whole table -----------

NAME = TableName("public", "big")
ROWS_A_GROUP, GROUPS = 100_000, 5
READ = """
import resource, sys
from pgcdc_assets import Lake
at = Lake(sys.argv[1]).at()
if sys.argv[2] == "batches":
    assert sum(batch.num_rows for batch in at.batches("big")) % 500_000 == 1
if sys.argv[2] == "duckdb":
    assert at.sql("SELECT max(note), sum(length(note)), count(DISTINCT id) FROM big").num_rows == 1
if sys.argv[2] == "polars":
    import polars as pl
    assert at.polars("big").filter(pl.col("note") != "").select(pl.len()).collect(engine="streaming").item() > 500_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Tables of 1 and of 5 million rows, with texts of 100 characters."""
    return [_made(tmp_path_factory.mktemp("lake"), files) for files in (2, 10)]


def _made(root: Path, files: int) -> Path:
    ids = pa.array(range(ROWS_A_GROUP))
    notes = pc.binary_repeat(pc.utf8_lpad(ids.cast(pa.string()), 10, "0"), 10)
    rows = pa.table({"id": ids, "note": notes})
    layout = written_tables(Location.of(root), {NAME: rows.slice(0, 1)})
    folder = layout.mirror(NAME)
    first = written(folder, opened(folder).columns, *([rows.to_pylist()] * GROUPS))
    reports = [first]
    for _ in range(files - 1):
        reports.append(replace(first, path=f"part-{uuid4().hex}.parquet"))
        shutil.copy(path_of(folder / first.path), path_of(folder / reports[-1].path))
    commit_files(opened(folder), reports, "append", {})
    ConsistentPoints(layout).publish(A, {NAME: opened(folder).number}, {NAME: A})
    return root


@pytest.mark.long
@pytest.mark.parametrize("reader", ["batches", "duckdb", "polars"])
def test_memory_of_a_reader_does_not_grow_with_the_table(lakes: list[Path], reader: str) -> None:
    """If the whole table were read into Arrow, the larger table would need some 500 MB more."""
    small, large = (
        int(subprocess.run([sys.executable, "-c", READ, root, reader], check=True, capture_output=True).stdout)
        for root in lakes
    )
    print(f"{reader}: {small} MB for 1 million rows, {large} MB for 5 million")
    assert large - small < 100
