"""DDL between two turns of a sync: no point lists a table whose mirror the DDL has made wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.points.points import ConsistentPoints, Point
from tests.flow.rig import Rig
from tests.oracle import assert_equal
from tests.traps.following import following_run
from tests.traps.scenario import empty_rig
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

START = """
CREATE TABLE quiet (id int PRIMARY KEY);
CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TABLE labelled (id int PRIMARY KEY, m mood);
INSERT INTO labelled VALUES (1, 'sad');
CREATE TYPE pair AS (a int, b text); CREATE TABLE composed (id int PRIMARY KEY, p pair);
INSERT INTO composed VALUES (1, (1, 'x'));
CREATE TABLE parted (id int, d int, v text, PRIMARY KEY (id, d)) PARTITION BY LIST (d);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1); INSERT INTO parted VALUES (1, 1, 'x');
CREATE TABLE fixed (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE fixed_1 PARTITION OF fixed FOR VALUES FROM (0) TO (100); INSERT INTO fixed VALUES (1);
CREATE TABLE defaulted (id int PRIMARY KEY); INSERT INTO defaulted VALUES (1);
"""

DONE = (
    ("labelled", "ALTER TYPE mood RENAME VALUE 'sad' TO 'down'"),
    ("composed", "ALTER TYPE pair ADD ATTRIBUTE c int CASCADE"),
    ("composed", "ALTER TYPE pair DROP ATTRIBUTE b CASCADE"),
    ("parted", "ALTER TABLE parted DETACH PARTITION parted_1; INSERT INTO parted_1 VALUES (2, 1, 'away'); "
               "ALTER TABLE parted ATTACH PARTITION parted_1 FOR VALUES IN (1)"),
    ("parted", "ALTER TABLE parted_1 SET UNLOGGED; INSERT INTO parted VALUES (3, 1, 'unlogged'); "
               "ALTER TABLE parted_1 SET LOGGED"),
    ("parted", "CREATE TABLE parted_2 (LIKE parted INCLUDING ALL); INSERT INTO parted_2 VALUES (4, 2, 'older'); "
               "ALTER TABLE parted ATTACH PARTITION parted_2 FOR VALUES IN (2)"),
    ("parted", "ALTER TABLE parted DETACH PARTITION parted_1"),
    ("fixed", "ALTER TABLE fixed_1 SET UNLOGGED; INSERT INTO fixed VALUES (2); ALTER TABLE fixed_1 SET LOGGED"),
    ("fixed", "TRUNCATE fixed_1; ALTER TABLE fixed_1 SET UNLOGGED; INSERT INTO fixed VALUES (3); "
              "ALTER TABLE fixed_1 SET LOGGED; INSERT INTO fixed VALUES (4)"),
)  # fmt: skip
"""Pairs of a table, and DDL after which this table is copied again."""


@pytest.fixture
def rig(server: EmbeddedServer, spark: SparkSession, tmp_path: Path) -> Iterator[Rig]:
    # With a long ``range_seconds``, the catalog is checked only before points. The partitions of ``parted`` get no
    # mirrors of their own when they are detached.
    tables = ("public.*", "-public.parted_*")
    with empty_rig(server, spark, tmp_path / "project", range_seconds=3600, tables=tables) as made:
        yield made


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_point_lists_a_table_that_ddl_between_turns_has_made_wrong(rig: Rig) -> None:
    rig.conn.execute(START)
    tables = ("composed", "defaulted", "fixed", "labelled", "parted", "quiet")
    rig.setup()
    points = ConsistentPoints(rig.settings.layout)
    with following_run(rig) as run:
        run.listed(*tables)
        for number, (table, sql) in enumerate(DONE):
            for statement in sql.split("; "):
                rig.conn.execute(statement.encode())
            since = rig.flush()
            rig.conn.execute("INSERT INTO quiet VALUES (%s)", [number])
            wait_for(lambda: any(point.replay_lsn >= since for point in points.all()), what="a point")  # noqa: B023
            rig.conn.execute("INSERT INTO quiet VALUES (%s)", [-1 - number])
            run.listed(*tables)
            for point in points.all():
                if point.replay_lsn >= since and TableName("public", table) in point.tables:
                    _right(rig, point, table)
            assert run.thread.is_alive()

        rig.conn.execute("ALTER TABLE defaulted ADD n int DEFAULT 5")
        since = rig.flush()
        rig.conn.execute("INSERT INTO quiet VALUES (1000)")
        name = TableName("public", "defaulted")
        wait_for(lambda: any(point.replay_lsn >= since and name in point.tables for point in points.all()),
                 what="a point with the new column")  # fmt: skip
    listing = [point for point in points.all() if point.replay_lsn >= since and name in point.tables]
    for point in listing:
        _right(rig, point, "defaulted")


def _right(rig: Rig, point: Point, table: str) -> None:
    name = f"public.{table}"
    assert_equal(rig.conn, rig.lake, name, version={name: point.tables[TableName("public", table)]})
