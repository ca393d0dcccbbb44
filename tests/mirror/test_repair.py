"""A repair derives the changes of a range again, and applies them to a mirror that has already applied the range."""

from __future__ import annotations

import pytest

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.errors import NotRepairable
from pgcdc_assets.mirror.delta.apply import repair_table
from pgcdc_assets.mirror.target import Applied
from tests.mirror.pipeline import Pipeline

pytestmark = pytest.mark.spark


def repaired(pipe: Pipeline, start: Lsn, end: Lsn) -> Applied:
    table, position = pipe.tables["t"], pipe.replayed["t"]
    return repair_table(pipe.spark, pipe.log, pipe.mirrors, table, LsnRange(start, end), position)


def spoiled(pipe: Pipeline, *statements: str) -> None:
    for statement in statements:
        pipe.spark.sql(statement.format(f"delta.`{pipe.mirror('t').path}`")).collect()


@pytest.mark.long
def test_a_repair_is_refused_if_the_log_lacks_a_value(pipe: Pipeline) -> None:
    pipe.run("CREATE TABLE t (id int PRIMARY KEY, n int, v text)", "ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    pipe.follow("t")
    pipe.run("INSERT INTO t SELECT 1, 1, string_agg(md5(i::text), '') FROM generate_series(1, 400) i")
    pipe.turn()
    start = pipe.replayed["t"]
    pipe.run("UPDATE t SET n = 2")
    pipe.turn()
    spoiled(pipe, "DELETE FROM {} WHERE id = 1")
    with pytest.raises(NotRepairable, match="copy it again"):
        repaired(pipe, start, pipe.replayed["t"])
