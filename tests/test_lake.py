"""Lake.at: mirrors as they were, with deletion vectors, mapped columns, odd names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.catalog import Column, Identity, PgType, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import DataFile
from pgcdc_assets.errors import LakeError, UnknownTable
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirrors, create_mirror
from pgcdc_assets.mirror.delta.mirrorschema import MirrorSchema
from pgcdc_assets.points.points import ConsistentPoints
from tests.deltatables import commit, publish_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE = Identity("7", "shop", "pgcdc")


def test_importing_the_package_loads_nothing() -> None:
    code = (
        "import sys, pgcdc_assets; "
        "assert not {'deltalake', 'pyarrow', 'pyspark', 'dagster'} & set(sys.modules); "
        "pgcdc_assets.Lake; assert 'deltalake' in sys.modules; assert 'pyspark' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_lake_without_points(tmp_path: Path) -> None:
    assert Lake(tmp_path).tables == []
    with pytest.raises(LakeError, match="no consistent point"):
        Lake(tmp_path).at()


def test_an_lsn_below_the_first_point_is_refused(tmp_path: Path) -> None:
    ConsistentPoints(Layout.of(tmp_path)).publish(Lsn(100), {}, {})
    with pytest.raises(LakeError, match="0/63"):
        Lake(tmp_path).at(99)
    assert Lake(tmp_path).at("0/FFFF").lsn == 100
    with pytest.raises(UnknownTable):
        Lake(tmp_path).at().arrow("orders")


@pytest.mark.long
@pytest.mark.spark
def test_every_published_version_is_readable(spark: SparkSession, tmp_path: Path) -> None:
    odd = "two words, and = more"
    columns = (
        Column(1, "id", PgType(20, "int8")),
        Column(2, odd, PgType(25, "text")),
        Column(3, "tags", PgType(1009, "_text", element=PgType(25, "text"))),
    )
    table = Table(1, TableName("Odd 100% \"Schema'", "a/b"), columns, key=(1,))
    layout, schema = Layout.of(tmp_path), MirrorSchema.of(table)
    path = layout.mirror(table.name)
    create_mirror(path, schema, {IDENTITY: SOURCE.app_id()}, path)
    mirror, points = Mirrors(layout, SOURCE).open(table.name), ConsistentPoints(layout)
    with DataFile(path, mirror.physical(schema)) as file:
        raw = pa.array([None, [("id", "x")], None], schema.arrow.field("_pgcdc_raw").type)
        file.write([pa.array([1, 2, 3]), pa.array(["a", "b", None]), pa.array([["x", None], [], None]),
                    pa.array([5, 5, 5]), pa.nulls(3, pa.timestamp("us", "UTC")), raw])  # fmt: skip
        report = file.finish()
    assert report is not None
    first = commit(path, [report], "append", {mirror.snapshot_app_id: 100})
    publish_at(points, 100, {table.name: first})
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 2").collect()
    spark.sql(f"UPDATE delta.`{path}` SET `{odd}` = 'new' WHERE id = 3").collect()
    points.publish(Lsn(200), {table.name: Mirrors(layout, SOURCE).open(table.name).version}, {table.name: Lsn(100)})

    lake = Lake(tmp_path)
    assert lake.tables == [table.name]
    before, after = lake.at(Lsn(199)), lake.at()
    assert (before.lsn, after.lsn) == (100, 200)
    rows = before.arrow(str(table.name)).sort_by("id")
    assert rows.column_names == schema.arrow.names
    assert rows.schema.types == schema.arrow.types
    assert rows[odd].to_pylist() == ["a", "b", None]
    assert rows["tags"].to_pylist() == [["x", None], [], None]
    assert rows["_pgcdc_raw"].to_pylist() == [None, [("id", "x")], None]
    assert after.arrow(table.name).sort_by("id")[odd].to_pylist() == ["a", "new"]
    assert sorted(row.id for row in before.spark(spark, table.name).collect()) == [1, 2, 3]
    assert sorted(row.id for row in after.spark(spark, table.name).collect()) == [1, 3]


def test_a_version_that_is_gone_is_told(tmp_path: Path) -> None:
    name = TableName("public", "t")
    publish_at(ConsistentPoints(Layout.of(tmp_path)), 100, {name: 3})
    with pytest.raises(LakeError, match="lacks a commit"):
        Lake(tmp_path).at().arrow(name)
