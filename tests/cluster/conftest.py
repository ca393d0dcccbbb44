"""Fixtures: one Spark cluster for all tests of a pytest process, and a PostgreSQL server whose password only the driver
gets."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgcdc_assets.core import faultpoints
from pgcdc_assets.demo.server import EmbeddedServer
from tests.cluster.standalone import Cluster, standalone
from tests.crash.faults import Faults
from tests.end_to_end.command import Project
from tests.fix_postgres import TEST_SETTINGS, Database, fresh_database
from tests.oracle import assert_equal
from tests.servers import new_server

SECRET = f"only-the-driver-knows-{secrets.token_hex(8)}"
TABLES = ("public.t", "public.u", "public.keyless")
_ROLE = "behind_a_password"
_MAKE = """
CREATE TABLE t (id int PRIMARY KEY, v text, big text);
CREATE TABLE u (a int, b int, v numeric(10,2), PRIMARY KEY (a, b));
CREATE TABLE keyless (id int, v text);
ALTER TABLE keyless REPLICA IDENTITY FULL;
INSERT INTO t SELECT g, 'v' || g, repeat(md5(g::text), 50) FROM generate_series(1, 5000) g;
INSERT INTO u SELECT g, g % 3, g / 4.0 FROM generate_series(1, 500) g;
INSERT INTO keyless SELECT g, 'k' FROM generate_series(1, 50) g;
"""
_CHANGE = """
UPDATE t SET v = v || '!' WHERE id % 7 = 0;
UPDATE t SET id = -id WHERE id BETWEEN 4900 AND 4950;
DELETE FROM u WHERE a % 5 = 0;
INSERT INTO u SELECT g, 1, NULL FROM generate_series(100000 + {0}, 100100 + {0}) g;
UPDATE keyless SET v = 'changed' WHERE id < 10;
"""


@pytest.fixture(scope="session")
def walled_server(pg_version: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with new_server(tmp_path_factory.mktemp("walled") / "server", pg_version, settings=TEST_SETTINGS) as server:
        with psycopg.connect(server.conninfo_of("postgres"), autocommit=True) as conn:
            conn.execute(f"CREATE ROLE {_ROLE} SUPERUSER LOGIN PASSWORD '{SECRET}'".encode())
            rules = server.data / "pg_hba.conf"
            asked = f"local all,replication {_ROLE} scram-sha-256\n"
            rules.write_text(asked + rules.read_text())
            conn.execute("SELECT pg_reload_conf()")
        yield server


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Sets the fault points at which Spark tasks stop on the executors."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> Iterator[Cluster]:
    with standalone(tmp_path_factory.mktemp("cluster"), {faultpoints.VARIABLE: str(faults.folder)}) as cluster:
        yield cluster


@dataclass
class Rig:
    """A project whose Spark tasks run on the cluster, and ``conn``, a connection to its source."""

    project: Project
    cluster: Cluster
    faults: Faults
    conn: psycopg.Connection[Any]
    lake: str
    changes: int = field(default=0)

    @property
    def events(self) -> Path:
        return self.project.folder / "events"

    def with_spark(self, **more: str) -> Project:
        spark = {**json.loads(self.project.settings["PGCDC_SPARK"]), **more}
        return Project(self.project.folder, {**self.project.settings, "PGCDC_SPARK": json.dumps(spark)})

    def change(self) -> None:
        """Commits one transaction with every kind of change. Each call inserts different rows."""
        self.changes += 1
        self.conn.execute(f"BEGIN; {_CHANGE.format(1000 * self.changes)} COMMIT".encode())

    def assert_equal(self) -> None:
        assert_equal(self.conn, self.lake, *TABLES)


@pytest.fixture
def database(walled_server: EmbeddedServer) -> Iterator[Database]:
    with fresh_database(walled_server) as database:
        yield database


@pytest.fixture
def rig_on(cluster: Cluster, faults: Faults, database: Database, tmp_path: Path) -> Iterator[Callable[[str], Rig]]:
    """Returns a function that creates the tables in the source, and makes a project with its lake at the given
    location."""
    conns: list[psycopg.Connection[Any]] = []

    def made(lake: str) -> Rig:
        conn = database.connect()
        conns.append(conn)
        conn.execute(_MAKE)
        (tmp_path / "events").mkdir()
        settings = {
            "PGCDC_SOURCE": make_conninfo(database.conninfo, user=_ROLE), "PGPASSWORD": SECRET,
            "PGCDC_SLOT": f"s_{database.name}"[:60], "PGCDC_LAKE": lake, "PGCDC_LAKE_SHARED": "true",
            "PGCDC_SPARK": json.dumps({"master": cluster.master, **_SPARK, "spark.eventLog.dir": f"{tmp_path}/events"}),
        }  # fmt: skip
        return Rig(Project(tmp_path, settings), cluster, faults, conn, lake)

    yield made
    faults.clear()
    for conn in conns:
        conn.close()


_SPARK = {
    "spark.driver.memory": "600m", "spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2",
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "true", "spark.ui.port": "0",
    "spark.eventLog.enabled": "true", "spark.eventLog.compress": "false",
}  # fmt: skip


@pytest.fixture
def shared_folder(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


@pytest.fixture
def in_bucket(s3: str) -> str:
    return f"{s3}/{uuid.uuid4().hex}"
