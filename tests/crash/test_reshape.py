"""`pgcdc sync` is killed at every step of applying a schema change to a mirror. After every second kill, the source's
structure changes again before the next sync starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.settings import Settings
from tests.crash.faults import Faults, wait_until
from tests.end_to_end.command import Project
from tests.fix_postgres import fresh_database
from tests.history.structure.chronicle import Chronicle
from tests.history.structure.comparison import Comparison
from tests.oracle import assert_equal

pytestmark = pytest.mark.process

SECONDS = 300.0
STEPS = (
    FaultPoint.RESHAPE_COMMITTED, FaultPoint.RESHAPE_COMMITTING, FaultPoint.RESHAPED_FILE_WRITTEN,
    FaultPoint.RESHAPED_FILES_WRITTEN, FaultPoint.STATE_WRITTEN, FaultPoint.RESHAPE_RECORDED,
)  # fmt: skip
_MAKE = """
CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(10,2));
INSERT INTO t SELECT g, 'v' || g, g / 4.0 FROM generate_series(1, 50) g
"""
_PARTED = """
CREATE TABLE t (id int PRIMARY KEY, gone int, v text, n numeric(10,2)) PARTITION BY RANGE (id);
CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (7); ALTER TABLE t DROP gone;
CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (7) TO (20); CREATE TABLE t3 PARTITION OF t DEFAULT;
INSERT INTO t SELECT g, 'v' || g, g / 4.0 FROM generate_series(1, 50) g
"""
CHANGES = (
    "ALTER TABLE t ADD a int NOT NULL DEFAULT 5", "ALTER TABLE t RENAME a TO b; ALTER TABLE t RENAME v TO a",
    "ALTER TABLE t DROP b; ALTER TABLE t ADD b text DEFAULT 'x'", "ALTER TABLE t ALTER n TYPE numeric(12,2)",
    "ALTER TABLE t RENAME a TO c; ALTER TABLE t RENAME b TO a; ALTER TABLE t ADD b date DEFAULT 'infinity'",
    "ALTER TABLE t DROP c",
)  # fmt: skip
BY_METADATA = (
    FaultPoint.RESHAPE_COMMITTED, FaultPoint.RESHAPE_COMMITTING, FaultPoint.STATE_WRITTEN, FaultPoint.RESHAPE_RECORDED,
)  # fmt: skip
WITHOUT_ROWS = (
    "ALTER TABLE t RENAME v TO a; ALTER TABLE t ADD v text", "ALTER TABLE t RENAME a TO b; ALTER TABLE t RENAME v TO a",
    "ALTER TABLE t DROP b; ALTER TABLE t ADD b text", "ALTER TABLE t ALTER n TYPE numeric(12,2)",
)  # fmt: skip
"""Schema changes that change no value of any row."""


_RENAMES = (
    FaultPoint.RENAME_COMMITTED, FaultPoint.MIRROR_MADE, FaultPoint.RENAMED_FILES_LINKED, FaultPoint.STATE_WRITTEN,
    FaultPoint.RENAME_RECORDED,
)  # fmt: skip


class _Stage:
    """A source with a table, the chronicle (a record of the table's rows after each commit), and the project whose
    syncs are killed."""

    def __init__(
        self,
        conn: psycopg.Connection[Any],
        watching: psycopg.Connection[Any],
        conninfo: str,
        project: Project,
        faults: Faults,
        made: str,
    ) -> None:
        self._conn, self._project, self._faults = conn, project, faults
        conn.execute(made.encode())
        self._chronicle = Chronicle.begin(watching, ["public"])
        slot = project.settings["PGCDC_SLOT"]
        settings = Settings(source=conninfo, slot=slot, lake=project.lake, tables=("public.*",))
        self.comparison = Comparison(settings, self._chronicle, everything=True)
        project.run("setup")
        project.run("sync")

    def commit(self, *statements: str) -> None:
        with self._conn.transaction():
            for statement in statements:
                self._conn.execute(statement.encode())
            self._chronicle.announce(self._conn)
        self._chronicle.committed(["public"])

    def kill_at(self, step: FaultPoint) -> None:
        self._faults.arm(step)
        with self._project.running("sync") as process:
            assert wait_until(lambda: self._faults.reached(step) is not None, SECONDS), self._project.log("sync")
            os.killpg(process.pid, signal.SIGKILL)
        self._faults.clear()

    def assert_right(self, step: FaultPoint, table: str) -> None:
        for _ in range(2):
            self._project.run("sync")
        if self._project.settings["PGCDC_SCHEMA_CHANGES"] == "rewrite":
            # ``assert_equal`` reads with delta-rs, which cannot read the types that are widened with the setting
            # ``schema_changes: metadata``. ``comparison`` can read these types.
            assert_equal(self._conn, self._project.lake, table)
        assert not self.comparison.compare(), step


@pytest.fixture
def way() -> str:
    return "rewrite"


@pytest.fixture
def made() -> str:
    return _MAKE


@pytest.fixture
def stage(
    crash_server: EmbeddedServer, faults: Faults, fault_folder: Path, tmp_path: Path, way: str, made: str
) -> Iterator[_Stage]:  # fmt: skip
    with fresh_database(crash_server) as database, database.connect() as conn, database.connect() as watching:
        project = Project(tmp_path, {
            "PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60],
            "PGCDC_TABLES": '["public.*"]', "PGCDC_SPARK": '{"master": "local[2]"}', "PGCDC_FAULTS": str(fault_folder),
            "PGCDC_SCHEMA_CHANGES": way,
        })  # fmt: skip
        yield _Stage(conn, watching, database.conninfo, project, faults, made)
        assert project.run("verify", "--json").json["ok"]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.takes(200)
def test_sync_killed_at_each_step_of_a_schema_change_loses_nothing(stage: _Stage) -> None:
    _kill(stage, dict(zip(STEPS, CHANGES, strict=True)))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("made", [_PARTED])
def test_sync_killed_at_each_step_of_a_partitioned_tables_schema_change_loses_nothing(stage: _Stage, made: str) -> None:
    _kill(stage, dict(zip(STEPS, CHANGES, strict=True)))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["metadata"])
def test_sync_killed_at_each_step_of_a_schema_change_by_metadata_loses_nothing(stage: _Stage, way: str) -> None:
    _kill(stage, dict(zip(BY_METADATA, WITHOUT_ROWS, strict=True)))


def _kill(stage: _Stage, changes: dict[FaultPoint, str]) -> None:
    for number, (step, change) in enumerate(changes.items()):
        stage.commit(f"INSERT INTO t (id) VALUES ({1000 + number})", f"DELETE FROM t WHERE id = {10 + number}")
        stage.commit("UPDATE t SET n = n + 1 WHERE id < 5", change, "UPDATE t SET n = n + 1 WHERE id BETWEEN 4 AND 8")
        stage.commit(f"INSERT INTO t (id) VALUES ({2000 + number})")
        stage.kill_at(step)
        if number % 2:
            stage.commit(f"ALTER TABLE t ADD z{number} int DEFAULT {number}", f"UPDATE t SET n = 0 WHERE id = {number}")
        stage.assert_right(step, "public.t")
    assert stage.comparison.listed > len(changes)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sync_killed_at_each_step_of_a_rename_loses_nothing(stage: _Stage) -> None:
    """After every second kill, the table gets its former name back before the next sync checks the catalog."""
    name = "t"
    for number, step in enumerate(_RENAMES):
        former, name = name, f"t{number}"
        stage.commit(f"INSERT INTO {former} (id) VALUES ({1000 + number})")
        stage.commit(f"ALTER TABLE {former} RENAME TO {name}", f"DELETE FROM {name} WHERE id = {10 + number}")
        stage.kill_at(step)
        stage.commit(f"UPDATE {name} SET n = n + 1 WHERE id < 5")
        if number % 2:
            stage.commit(f"ALTER TABLE {name} RENAME TO {former}", f"UPDATE {former} SET n = n + 1 WHERE id > 40")
            name = former
        stage.assert_right(step, f"public.{name}")
    assert stage.comparison.listed > len(_RENAMES)
