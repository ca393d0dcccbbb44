"""A mirror gets another structure by rewriting its rows. The tests check values, raw texts (the texts of values that do
not fit the type of their column), deleted rows, and columns of other writers."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyroaring import BitMap64
from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Column, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.commit import FileChange, commit_change
from pgcdc_assets.delta.definition import commit_columns
from pgcdc_assets.delta.mapping import stated
from pgcdc_assets.errors import LakeError
from pgcdc_assets.mirror.delta.mirror import Mirror
from pgcdc_assets.mirror.delta.removal import unchanged_since
from pgcdc_assets.mirror.delta.reshape import reshape_mirror
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.successor import successor
from tests.deltatables import commit, live_files
from tests.flow.mirrors import no_spark
from tests.mirror.pipeline import ID, INT, ROWS, TEXT, A, N, T, made, numeric, rows, table

pytestmark = pytest.mark.spark


def reshaped(mirror: Mirror, spark: SparkSession, after: Table, before: Table = T) -> Table:
    follows = successor(before, after, Lsn(50))
    assert isinstance(follows, Table), follows
    reshape_mirror(SparkOnDemand(lambda: spark), mirror.mirrors, before, follows)
    return follows


@pytest.mark.long
def test_a_new_column_has_its_default_in_all_older_rows(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path)
    reshaped(mirror, spark, table(ID, A, N, Column(4, "c", TEXT, True, missing="it's")))
    assert [row["c"] for row in rows(mirror)] == ["it's"] * 4
    assert [row["n"] for row in rows(mirror)] == [Decimal("1.50"), None, None, Decimal("4.00")]
    assert rows(mirror)[1]["_pgcdc_raw"] == {"n": "NaN"}
    assert "c" not in rows(mirror, 1)[0], "the earlier version has the earlier structure"


def test_a_default_that_does_not_fit_its_type_is_kept_as_text_in_all_rows(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path)
    reshaped(mirror, spark, table(ID, A, N, Column(4, "c", numeric(5, 1), missing="NaN")))
    assert [row["c"] for row in rows(mirror)] == [None] * 4
    assert [row["_pgcdc_raw"] for row in rows(mirror)] == [{"c": "NaN"}, {"n": "NaN", "c": "NaN"}, *[{"c": "NaN"}] * 2]


def test_columns_that_swap_names_keep_their_values_and_raw_texts(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path)
    reshaped(mirror, spark, table(ID, replace(A, name="n"), replace(N, name="a")))
    assert [row["n"] for row in rows(mirror)] == ["one", None, "three", "four"]
    assert [row["a"] for row in rows(mirror)] == [Decimal("1.50"), None, None, Decimal("4.00")]
    assert rows(mirror)[1]["_pgcdc_raw"] == {"a": "NaN"}


def test_a_recreated_column_has_none_of_the_old_values(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path)
    reshaped(mirror, spark, table(ID, A, Column(4, "n", numeric(10, 2))))
    assert [row["n"] for row in rows(mirror)] == [None] * 4
    assert [row["_pgcdc_raw"] for row in rows(mirror)] == [{}] * 4


def test_a_dropped_column_is_removed(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path)
    after = reshaped(mirror, spark, table(ID, A))
    assert rows(mirror)[1] == {"id": 2, "a": None, "_pgcdc_raw": {}}
    reshaped(mirror, spark, table(ID, A, Column(4, "n", INT, missing="7")), after)
    assert [row["n"] for row in rows(mirror)] == [7] * 4, "the new column with the old name has its own default"


def test_decimals_keep_their_values_when_their_column_gets_a_higher_precision(
    spark: SparkSession, tmp_path: Path
) -> None:
    mirror = made(tmp_path)
    reshaped(mirror, spark, table(ID, A, Column(3, "n", numeric(20, 2))))
    assert [row["n"] for row in rows(mirror)] == [Decimal("1.50"), None, None, Decimal("4.00")]
    assert rows(mirror)[1]["_pgcdc_raw"] == {"n": "NaN"}


def test_deleted_rows_stay_deleted(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path, T, ROWS, [["5"], ["five"], ["5"]])
    assert mirror.delta is not None
    first = max(mirror.delta.files, key=lambda file: file.rows or 0)
    commit_change(mirror.delta, FileChange([], {first.path: BitMap64([1])}), {}, {})
    reshaped(mirror, spark, table(ID, A, N, Column(4, "c", INT, missing="1")))
    assert [row["id"] for row in rows(mirror)] == [1, 3, 4, 5]


def test_columns_of_other_writers_are_kept(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path)
    assert mirror.delta is not None
    commit_columns(mirror.delta, stated(mirror.delta.metadata).with_more(pa.schema([("theirs", pa.string())])))
    reshaped(mirror, spark, table(ID, replace(A, name="b"), N))
    assert set(rows(mirror)[0]) == {"id", "b", "n", "theirs", "_pgcdc_raw"}


def test_a_column_can_get_a_name_that_delta_refuses(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path)
    after = reshaped(mirror, spark, table(ID, replace(A, name="a (b), c"), N))
    assert [row["a (b), c"] for row in rows(mirror)] == ["one", None, "three", "four"]
    reshaped(mirror, spark, table(ID, replace(A, name="a (b), c"), Column(4, "n", INT, missing="3")), after)
    assert [row["n"] for row in rows(mirror)] == [3] * 4


def test_a_new_column_that_is_null_in_older_rows_rewrites_no_file(tmp_path: Path) -> None:
    mirror = made(tmp_path)
    before = live_files(mirror.path)
    follows = successor(T, table(ID, A, N, Column(4, "c", INT)), Lsn(50))
    assert isinstance(follows, Table)
    reshape_mirror(SparkOnDemand(no_spark), mirror.mirrors, T, follows)
    assert live_files(mirror.path) == before
    assert [row["c"] for row in rows(mirror)] == [None] * 4


def test_a_mirror_stores_the_structure_that_a_reshape_gave_it(spark: SparkSession, tmp_path: Path) -> None:
    mirror = made(tmp_path)
    assert mirror.followed is None
    after = reshaped(mirror, spark, table(ID, A))
    assert mirror.again().followed == after
    assert mirror.again().replay_lsn == mirror.replay_lsn == 10
    # After a new copy, the mirror stores no structure, because it has the structure of the copy's snapshot.
    commit(mirror.path, [], "overwrite", {mirror.snapshot_app_id: 60})
    assert mirror.again().followed is None


def test_a_mirror_counts_as_changed_if_the_older_version_had_another_structure(
    spark: SparkSession, tmp_path: Path
) -> None:
    mirror = made(tmp_path)
    published = mirror.version
    assert unchanged_since(mirror.again(), published)
    reshaped(mirror, spark, table(ID, A))
    assert not unchanged_since(mirror.again(), published)


@pytest.mark.long
def test_spark_and_delta_rs_read_the_same_rows_after_a_structure_change(spark: SparkSession, tmp_path: Path) -> None:
    name, mirror = "an odd name", made(tmp_path)
    after = table(ID, replace(A, name=name), Column(4, "n", INT, missing="7"), Column(5, "a", TEXT, missing="ü"))
    reshaped(mirror, spark, after)
    read = spark.read.format("delta").load(path_of(mirror.path).as_posix()).orderBy("id").collect()
    mine = [{**row.asDict(), "_pgcdc_raw": dict(row["_pgcdc_raw"] or {})} for row in read]
    for row in mine:
        del row["_pgcdc_commit_lsn"], row["_pgcdc_commit_ts"]
    assert mine == rows(mirror)
    assert [(row[name], row["n"], row["a"]) for row in mine][:2] == [("one", 7, "ü"), (None, 7, "ü")]


def test_a_mirror_from_which_another_writer_dropped_a_column_is_not_reshaped(
    spark: SparkSession, tmp_path: Path
) -> None:
    mirror = made(tmp_path, table(ID, N), [["1"], ["1.00"]])
    before = mirror.version
    with pytest.raises(LakeError, match="no longer has column 'a'"):
        reshaped(mirror, spark, table(ID, replace(A, name="b"), N))
    assert mirror.again().version == before
