"""Repairs: what a range did, derived again into a mirror that has applied it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import NotRepairable
from pgcdc_assets.mirror.delta.repair import repair_table
from pgcdc_assets.mirror.target import Applied
from tests.fix_postgres import Database
from tests.mirror.pipeline import Pipeline

pytestmark = pytest.mark.spark


@pytest.fixture
def pipe(database: Database, spark: SparkSession, tmp_path: Path) -> Iterator[Pipeline]:
    with database.connect() as conn:
        yield Pipeline(database, conn, spark, Layout.of(tmp_path / "lake"))


def repaired(pipe: Pipeline, start: Lsn, end: Lsn) -> Applied:
    table, position = pipe.tables["t"], pipe.replayed["t"]
    return repair_table(pipe.spark, pipe.log, pipe.layout, pipe.identity, table, LsnRange(start, end), position)


def spoiled(pipe: Pipeline, *statements: str) -> None:
    for statement in statements:
        pipe.spark.sql(statement.format(f"delta.`{pipe.mirror('t').path}`")).collect()


@pytest.mark.long
def test_keys_of_the_range_are_derived_up_to_where_the_mirror_stands(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 10) g")
    pipe.turn()
    start = pipe.replayed["t"]
    pipe.run("UPDATE t SET v = 'one' WHERE id <= 3", "DELETE FROM t WHERE id = 4", "INSERT INTO t VALUES (50, 'new')",
             "UPDATE t SET id = 60 WHERE id = 5")  # fmt: skip
    pipe.turn()
    end = pipe.replayed["t"]
    pipe.run("UPDATE t SET v = 'two' WHERE id = 2", "UPDATE t SET id = 70 WHERE id = 60")
    pipe.turn()
    spoiled(
        pipe,
        "UPDATE {} SET v = 'bad' WHERE id IN (1, 2, 70)",
        "DELETE FROM {} WHERE id = 50",
        "INSERT INTO {} (id, v) VALUES (4, 'back'), (60, 'back')",
        "UPDATE {} SET v = 'not touched' WHERE id = 10",
    )
    version, position = pipe.mirror("t").version, pipe.mirror("t").replay_lsn
    done = repaired(pipe, start, end)
    assert (done.inserted, done.updated, done.deleted) == (1, 4, 2)
    assert done.version == version + 1
    assert pipe.mirror("t").replay_lsn == position
    spoiled(pipe, "UPDATE {} SET v = 'v10' WHERE id = 10")
    pipe.same("t")
    pipe.run("UPDATE t SET v = 'three' WHERE id = 50")
    pipe.turn()
    pipe.same("t")


@pytest.mark.long
def test_a_truncate_since_gives_the_whole_table(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (v text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    pipe.follow("t")
    start = pipe.replayed["t"]
    pipe.run("INSERT INTO t VALUES ('a'), ('a')", "TRUNCATE t", "INSERT INTO t VALUES ('b'), ('b')")
    pipe.turn()
    pipe.run("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t)")
    pipe.turn()
    spoiled(pipe, "UPDATE {} SET v = 'bad'")
    repaired(pipe, start, pipe.replayed["t"])
    pipe.same("t")


def test_what_the_log_cannot_tell_is_refused(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, n int, v text)", "ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT 1, 1, string_agg(md5(i::text), '') FROM generate_series(1, 400) i")
    pipe.turn()
    start = pipe.replayed["t"]
    pipe.run("UPDATE t SET n = 2")
    pipe.turn()
    spoiled(pipe, "UPDATE {} SET n = 9")
    repaired(pipe, start, pipe.replayed["t"])
    pipe.same("t")
    spoiled(pipe, "DELETE FROM {} WHERE id = 1")
    with pytest.raises(NotRepairable, match="copy it anew"):
        repaired(pipe, start, pipe.replayed["t"])
