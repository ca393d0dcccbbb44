"""Mirrors as Spark writes them: deletion vectors, and mapped column names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from pgcdc_assets.checks.report import Example
from tests.checks.lakes import Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.long
def test_mirrors_with_deletion_vectors_and_mapped_columns_are_compared(lake: Lake, spark: SparkSession) -> None:
    lake.script(
        'CREATE TABLE t (id int PRIMARY KEY, "a b" text, "c=(d)" int[]);'
        "INSERT INTO t SELECT i, 'text ' || i, ARRAY[i, NULL] FROM generate_series(1, 100) i WHERE i <> 7;"
        "UPDATE t SET \"a b\" = 'new' WHERE id = 8"
    )
    path = f"delta.`{lake.path('t')}`"
    spark.sql(
        f"CREATE TABLE {path} (id INT, `a b` STRING, `c=(d)` ARRAY<INT>, _pgcdc_commit_lsn BIGINT,"
        " _pgcdc_commit_ts TIMESTAMP, _pgcdc_raw MAP<STRING, STRING>) USING delta"
        " TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'delta.columnMapping.mode' = 'name')"
    )
    spark.sql(
        f"INSERT INTO {path} SELECT CAST(id AS INT), concat('text ', id), array(CAST(id AS INT), NULL),"
        " 1, NULL, NULL FROM range(1, 101)"
    )
    spark.sql(f"DELETE FROM {path} WHERE id = 7")
    spark.sql(f"UPDATE {path} SET `a b` = 'new' WHERE id = 8")
    assert DeltaTable(str(lake.path("t"))).deletion_vectors().read_all().num_rows > 0
    report = lake.only()
    assert (report.equal, report.source_rows, report.mirror_rows) == (True, 99, 99)
    spark.sql(f"UPDATE {path} SET `c=(d)` = array(9) WHERE id = 9")
    assert lake.only().examples == (Example("different", {"id": "9"}, ("c=(d)",)),)
