"""Migrations of tables whose rows change at the same time. Each published point has every table with the structure and
the rows that the table had at the point's LSN. No migration needs the operator. Every installed query engine reads each
mirror correctly, or refuses its table features.

``following``: a sync in follow mode runs during the migrations. ``late``: no sync runs during the migrations, so the
catalog is read only after many changes. ``rewrite`` and ``metadata`` are the values of ``schema_changes``.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup
from tests.conftest import SEED
from tests.fix_postgres import fresh_database
from tests.history.structure.chronicle import Chronicle
from tests.history.structure.comparison import Comparison
from tests.history.structure.group import Run
from tests.migrations.steps import Migration, Result, migrations, on_other_bases
from tests.projectfiles import CATALOG_FILE
from tests.readers import Tally, at_hand, lacking, tallied
from tests.servers import VERSIONS

pytestmark = [pytest.mark.spark, pytest.mark.takes(300)]

FEW = 6
"""Number of migrations in ``test_mirrors_follow_some_migrations_in_follow_mode``, without those of partitioned
tables."""
FEW_ELSEWHERE = 1
"""Number of migrations of partitioned tables in the same test."""
SOME_ELSEWHERE = 60
"""Number of migrations in each run of ``test_mirrors_follow_migrations_of_partitioned_tables``."""
READ, MOST_READ = 4, 30
"""Numbers of tables whose mirrors all query engines read: with an older PostgreSQL version, and with the newest
version."""
Way = Literal["rewrite", "metadata"]


@dataclass
class Played:
    differences: list[str]
    aside: dict[str, str]
    """Why tables were set aside, by schema."""
    copies: Counter[str]
    """Number of copies after the first copy, by schema."""
    listed: set[str]
    """Names of the schemas that have tables in the newest point."""
    schemas: dict[str, Migration]
    reasons: dict[str, list[str]]
    tally: Tally


@dataclass
class _Stage:
    """One database and one lake, with a table for each migration."""

    settings: Settings
    conn: psycopg.Connection[Any]
    spark: SparkSession
    chronicle: Chronicle
    observer: _Notes
    chance: random.Random

    def engine(self) -> Engine:
        assert self.settings.source is not None
        return Engine(self.settings, self.settings.source, self.observer, lambda: self.spark, "test")

    def setup(self) -> None:
        assert self.settings.source is not None
        save_catalog(setup(self.settings, self.settings.source).catalog, CATALOG_FILE)

    def play(self, schema: str, migration: Migration) -> None:
        """Runs the migration, and writes rows before, during and after the transaction of each statement."""
        self.conn.execute(f"SET search_path = {schema}".encode())
        for _ in range(2):
            self._transaction(schema, partial(self._write, schema))
        for statement in migration.sql:
            if "CONCURRENTLY" in statement or "VACUUM" in statement:
                before = self.chronicle.announced
                self.conn.execute(statement.encode())
                self.chronicle.announce(self.conn)
                self.chronicle.committed([schema], since=before)
            else:
                self._transaction(schema, partial(self._within, schema, statement))
            if self.chance.random() < 0.7:
                self._transaction(schema, partial(self._write, schema))

    def _within(self, schema: str, statement: str) -> None:
        body = statement.removeprefix("BEGIN; ").removesuffix("; COMMIT").removesuffix("; ROLLBACK")
        ways = self.chance.randrange(4)
        if ways & 1:
            self._write(schema)
        if statement.endswith("ROLLBACK"):
            self.conn.execute("SAVEPOINT s")
        self.conn.execute(body.encode())
        if ways & 2:
            self._write(schema)
        if statement.endswith("ROLLBACK"):
            self.conn.execute("ROLLBACK TO s")

    def _transaction(self, schema: str, do: Callable[[], None]) -> None:
        with self.conn.transaction():
            do()
            self.chronicle.announce(self.conn)
        self.chronicle.committed([schema])

    def _write(self, schema: str) -> None:
        key, *columns = self._columns(schema)
        act = self.chance.choice(("insert", "insert", "update", "update", "delete", "rekey"))
        number = self.chance.randrange(1, 9)
        next_ = f'(SELECT coalesce(max("{key}"), 0) + 1 FROM t)'
        if act == "insert" and number % 2:
            # The insert fails if the migration has added a column that is NOT NULL without a default.
            with contextlib.suppress(psycopg.errors.NotNullViolation), self.conn.transaction():
                self.conn.execute(f'INSERT INTO t ("{key}") SELECT {next_}'.encode())
        elif act == "insert":
            names = ", ".join(f'"{column}"' for column in columns)
            self.conn.execute(f'INSERT INTO t ("{key}", {names}) SELECT {next_}, {names} FROM t LIMIT 1'.encode())
        elif act == "delete":
            self.conn.execute(f'DELETE FROM t WHERE "{key}" = {number}'.encode())
        elif act == "rekey":
            self.conn.execute(f'UPDATE t SET "{key}" = {next_} WHERE "{key}" = {number}'.encode())
        else:
            column = self.chance.choice(columns)
            self.conn.execute(f'UPDATE t SET "{column}" = "{column}" WHERE "{key}" >= {number}'.encode())

    def _columns(self, schema: str) -> list[str]:
        """The name of the key column, and the names of all other columns except generated columns."""
        query = """SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped
                   AND attgenerated = '' AND attidentity <> 'a' ORDER BY attnum"""
        return [name for (name,) in self.conn.execute(query, [f"{schema}.t"])]


class _Notes(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        self.messages.append(f"{stage}: {message}")


@contextlib.contextmanager
def _stage(
    server: EmbeddedServer, spark: SparkSession, folder: Path, schemas: Mapping[str, Migration], way: Way
) -> Iterator[_Stage]:  # fmt: skip
    with contextlib.chdir(folder), fresh_database(server) as database, contextlib.ExitStack() as closing:
        conn, watching = (closing.enter_context(database.connect()) for _ in range(2))
        for schema, migration in schemas.items():
            conn.execute(f"CREATE SCHEMA {schema}; SET search_path = {schema}".encode())
            conn.execute(migration.table.encode())
        settings = Settings(source=database.conninfo, slot=f"s_{database.name}"[:60], batch_seconds=0.05,
                            range_seconds=0.5, tables=("m*.t",), schema_changes=way)  # fmt: skip
        chronicle = Chronicle.begin(watching, list(schemas))
        yield _Stage(settings, conn, spark, chronicle, _Notes(), random.Random(f"migrations {SEED}"))


def _played(
    server: EmbeddedServer, spark: SparkSession, folder: Path, chosen: Sequence[Migration], way: Way = "rewrite", *,
    following: bool, read: int = 0,
) -> Played:  # fmt: skip
    schemas = {f"m{number}": migration for number, migration in enumerate(chosen)}
    with _stage(server, spark, folder, schemas, way) as stage:
        stage.setup()
        Run(stage.engine()).join()
        first = len(stage.observer.copies)
        run = Run(stage.engine(), follow=True) if following else None
        for schema, migration in schemas.items():
            stage.play(schema, migration)
            if run is not None:
                # Sometimes leave time for a turn between two migrations. Otherwise several migrations are part of one
                # turn.
                run.ended(stage.chance.choice((0, 0, 0.5)))
        if run is not None:
            run.stop()
        for _ in range(2):
            # The first sync does not see migrations that were made after its last catalog check. The second sync checks
            # the catalog again, so its points have the structure after these migrations.
            Run(stage.engine()).join()
        assert stage.settings.source is not None
        comparison = Comparison(stage.settings, stage.chronicle, everything=False)
        differences = [failure.what for failure in comparison.compare()]
        newest = ConsistentPoints(stage.settings.layout).newest()
        assert newest is not None
        rows = TableStates(stage.settings.layout).all()
        return Played(
            differences,
            {name.schema: row.reason or "" for name, row in rows.items() if row.state == "set_aside"},
            Counter(copy.table.schema for copy in stage.observer.copies[first:]),
            {name.schema for name in newest.tables},
            schemas,
            {schema: [one for one in stage.observer.messages if f"{schema}.t" in one] for schema in schemas},
            tallied(stage.settings, list(schemas)[:read], at_hand(spark)),
        )


def _assert_followed(played: Played, *, late: bool) -> None:
    assert not played.differences, "\n".join(played.differences)
    assert not played.aside
    lacking = {schema: played.schemas[schema].name for schema in played.schemas.keys() - played.listed}
    assert not lacking, {name: played.reasons[schema] for schema, name in lacking.items()}
    expected = {
        schema: (migration.late or migration.result) if late else migration.result
        for schema, migration in played.schemas.items()
    }
    copied = {schema for schema in played.schemas if played.copies[schema]}
    wrong = {played.schemas[schema].name: played.reasons[schema]
             for schema in copied if expected[schema] is Result.FOLLOWED}  # fmt: skip
    assert not wrong, "\n".join(f"{name}: {reasons}" for name, reasons in wrong.items())
    assert not played.tally.wrong, "\n".join(played.tally.wrong)
    print(f"read {dict(played.tally.read)}, refused {dict(played.tally.refused)}, copied {len(copied)}")


def _chosen(version: int) -> list[Migration]:
    """Some migrations of ordinary tables, and some of partitioned tables, selected by the seed."""
    chance = random.Random(f"chosen {SEED}")
    few = chance.sample(migrations(version), FEW)
    return [*few, *chance.sample(on_other_bases(version), FEW_ELSEWHERE)]


@pytest.mark.long
@pytest.mark.takes(50)
def test_mirrors_follow_some_migrations_in_follow_mode(
    server: EmbeddedServer, spark: SparkSession, tmp_path: Path
) -> None:
    played = _played(server, spark, tmp_path, _chosen(server.version), following=True, read=READ)
    _assert_followed(played, late=False)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("following", [True, False], ids=["following", "late"])
@pytest.mark.parametrize("way", ["rewrite", "metadata"])
def test_mirrors_follow_all_migrations(
    server: EmbeddedServer, spark: SparkSession, tmp_path: Path, way: Way, *, following: bool
) -> None:
    all_of_them = migrations(server.version)
    # The query engines read only some mirrors, selected by the seed, because reading all mirrors takes half an hour.
    chosen = random.Random(f"read {SEED}").sample(all_of_them, len(all_of_them))
    # The source's version does not affect what query engines read. So most mirrors are read only with the newest
    # version.
    read = MOST_READ if server.version == VERSIONS[-1] else READ
    played = _played(server, spark, tmp_path, chosen, way, following=following, read=read)
    _assert_followed(played, late=not following)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("following", [True, False], ids=["following", "late"])
@pytest.mark.parametrize("way", ["rewrite", "metadata"])
def test_mirrors_follow_migrations_of_partitioned_tables(
    server: EmbeddedServer, spark: SparkSession, tmp_path: Path, way: Way, *, following: bool
) -> None:  # fmt: skip
    chosen = random.Random(f"other bases {SEED}").sample(on_other_bases(server.version), SOME_ELSEWHERE)
    played = _played(server, spark, tmp_path, chosen, way, following=following)
    _assert_followed(played, late=not following)


@pytest.mark.long
def test_all_query_engines_that_can_read_mirrors_are_installed() -> None:
    assert not lacking(), "make readers"
    assert {reader.name for reader in at_hand(None)} == {"Spark", "delta-rs", "Polars", "kernel"}


def test_there_are_at_least_200_migrations() -> None:
    assert len(migrations(18)) >= 200
