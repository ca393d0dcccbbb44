"""Random changes in random transactions, several turns: every mirror equals its source after each."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Layout
from tests.fix_postgres import Database
from tests.mirror.pipeline import Pipeline

TABLES = (
    "CREATE TABLE keyed (id int PRIMARY KEY, v text, big text)",
    "ALTER TABLE keyed ALTER big SET STORAGE EXTERNAL",
    "CREATE TABLE wide_key (a text, b date, v int, big text, PRIMARY KEY (a, b))",
    "ALTER TABLE wide_key ALTER big SET STORAGE EXTERNAL",
    "ALTER TABLE wide_key REPLICA IDENTITY FULL",
    "CREATE TABLE bag (id int, v text, big text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "ALTER TABLE bag ALTER big SET STORAGE EXTERNAL",
    "CREATE TABLE parts (id int, k int, v text, big text, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
    "CREATE TABLE parts_0 PARTITION OF parts FOR VALUES IN (0)",
    "CREATE TABLE parts_1 (big text, v text, k int NOT NULL, id int NOT NULL, PRIMARY KEY (id, k))",
    "ALTER TABLE parts ATTACH PARTITION parts_1 FOR VALUES IN (1)",
)
BIG = "repeat(md5(random()::text), 100)"


class Changes:
    """Statements over small key spaces, so that keys are met again and again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def statement(self) -> str:
        chosen: Callable[[int, int, str], str] = self.random.choice([self._keyed, self._wide, self._bag, self._parts])
        return chosen(self.random.randrange(12), self.random.randrange(12), f"'v{self.random.randrange(1000)}'")

    def _pick(self, *statements: str, rare: str) -> str:
        return rare if self.random.random() < 0.02 else self.random.choice(statements)

    def _keyed(self, a: int, b: int, v: str) -> str:
        return self._pick(
            f"INSERT INTO keyed VALUES ({a}, {v}, {BIG}) ON CONFLICT DO NOTHING",
            f"INSERT INTO keyed VALUES ({a}, {v}, {BIG}) ON CONFLICT (id) DO UPDATE SET v = {v}",
            f"UPDATE keyed SET v = {v} WHERE id = {a}",
            f"UPDATE keyed SET big = {BIG} WHERE id = {a}",
            f"UPDATE keyed SET id = {b} WHERE id = {a} AND NOT EXISTS (SELECT FROM keyed WHERE id = {b})",
            "UPDATE keyed SET id = id + 100 WHERE id < 100 AND NOT EXISTS (SELECT FROM keyed WHERE id >= 100)",
            "UPDATE keyed SET id = id - 100 WHERE id >= 100 AND NOT EXISTS (SELECT FROM keyed WHERE id < 100)",
            f"DELETE FROM keyed WHERE id = {a}",
            rare="TRUNCATE keyed",
        )

    def _wide(self, a: int, b: int, v: str) -> str:
        day = f"date '2024-01-01' + {b % 3}"
        return self._pick(
            f"INSERT INTO wide_key VALUES ('{a}', {day}, {b}, {BIG}) ON CONFLICT DO NOTHING",
            f"UPDATE wide_key SET v = {b} WHERE a = '{a}'",
            f"UPDATE wide_key SET b = b + 5 WHERE a = '{a}' AND b = {day}",
            f"DELETE FROM wide_key WHERE a = '{a}' AND b = {day}",
            rare="TRUNCATE wide_key, bag",
        )

    def _bag(self, a: int, b: int, v: str) -> str:
        one = f"ctid = (SELECT min(ctid) FROM bag WHERE id = {a % 4})"
        return self._pick(
            f"INSERT INTO bag VALUES ({a % 4}, 'v', 'same'), ({b % 4}, 'v', 'same')",
            f"INSERT INTO bag VALUES ({a % 4}, NULL, {BIG})",
            f"UPDATE bag SET v = 'w' WHERE {one}",
            f"DELETE FROM bag WHERE {one}",
            f"DELETE FROM bag WHERE id = {b % 4} AND v = 'w'",
            rare="TRUNCATE bag",
        )

    def _parts(self, a: int, b: int, v: str) -> str:
        return self._pick(
            f"INSERT INTO parts VALUES ({a}, {b % 2}, {v}, {BIG}) ON CONFLICT DO NOTHING",
            f"UPDATE parts SET v = {v} WHERE id = {a}",
            f"UPDATE parts SET k = 1 - k WHERE id = {a} AND (SELECT count(*) FROM parts WHERE id = {a}) = 1",
            f"DELETE FROM parts WHERE id = {a} AND k = {b % 2}",
            f"TRUNCATE parts_{b % 2}",
            rare="TRUNCATE parts",
        )


@pytest.mark.spark
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_mirrors_equal_their_sources(database: Database, spark: SparkSession, tmp_path: Path, seed: int) -> None:
    changes = Changes(seed)
    with database.connect() as conn:
        pipe = Pipeline(database, conn, spark, Layout.of(tmp_path / "lake"))
        pipe.run(*TABLES)
        pipe.follow("keyed, wide_key, bag, parts")
        for _ in range(3):
            for _ in range(25):
                size = changes.random.randrange(1, 8)
                rolled_back = changes.random.random() < 0.1
                with conn.transaction(force_rollback=rolled_back):
                    pipe.run(*(changes.statement() for _ in range(size)))
            pipe.turn()
            assert pipe.set_aside == {}
            for name in pipe.tables:
                pipe.same(name)


def test_the_statements_are_valid(database: Database) -> None:
    """Also those that the seeds above happen not to choose."""
    changes = Changes(3)
    with database.connect() as conn:
        for statement in TABLES:
            conn.execute(statement.encode())
        done = 0
        for _ in range(600):
            try:
                conn.execute(changes.statement().encode())
                done += 1
            except psycopg.errors.UniqueViolation:
                continue
        assert done > 590
