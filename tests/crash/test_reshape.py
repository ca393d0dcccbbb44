"""The command killed at every step of a change of structure; the source changes again before the next one goes on."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.settings import Settings
from tests.crash.faults import Faults, wait_until
from tests.end_to_end.command import Project
from tests.fix_postgres import fresh_database
from tests.history.structure.chronicle import Chronicle
from tests.history.structure.judge import Judge
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
CHANGES = (
    "ALTER TABLE t ADD a int NOT NULL DEFAULT 5", "ALTER TABLE t RENAME a TO b; ALTER TABLE t RENAME v TO a",
    "ALTER TABLE t DROP b; ALTER TABLE t ADD b text DEFAULT 'x'", "ALTER TABLE t ALTER n TYPE numeric(12,2)",
    "ALTER TABLE t RENAME a TO c; ALTER TABLE t RENAME b TO a; ALTER TABLE t ADD b date DEFAULT 'infinity'",
    "ALTER TABLE t DROP c",
)  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.takes(90)
@pytest.mark.parametrize("steps", [STEPS[:1], pytest.param(STEPS, marks=pytest.mark.long)], ids=["one", "all"])
def test_killed_at_each_step(
    crash_server: EmbeddedServer, faults: Faults, fault_folder: Path, tmp_path: Path, steps: tuple[FaultPoint, ...]
) -> None:  # fmt: skip
    with fresh_database(crash_server) as database, ExitStack() as closing:
        conn, watching = (closing.enter_context(database.connect()) for _ in range(2))
        conn.execute(_MAKE.encode())
        slot = f"s_{database.name}"[:60]
        project = Project(tmp_path, {
            "PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": slot, "PGCDC_TABLES": '["public.*"]',
            "PGCDC_SPARK": '{"master": "local[2]"}', "PGCDC_FAULTS": str(fault_folder),
        })  # fmt: skip
        settings = Settings(source=database.conninfo, slot=slot, lake=project.lake, tables=("public.*",))
        chronicle = Chronicle.begin(watching, ["public"])
        judge = Judge(settings, database.conninfo, chronicle, everything=True)

        def commit(*statements: str) -> None:
            with conn.transaction():
                for statement in statements:
                    conn.execute(statement.encode())
                chronicle.announce(conn)
            chronicle.committed(["public"])

        project.run("setup")
        project.run("sync")
        for number, (step, change) in enumerate(zip(steps, CHANGES, strict=False)):
            commit(f"INSERT INTO t (id) VALUES ({1000 + number})", f"DELETE FROM t WHERE id = {10 + number}")
            commit("UPDATE t SET n = n + 1 WHERE id < 5", change, "UPDATE t SET n = n + 1 WHERE id BETWEEN 4 AND 8")
            commit(f"INSERT INTO t (id) VALUES ({2000 + number})")
            faults.arm(step)
            with project.running("sync") as process:
                assert wait_until(lambda at=step: faults.reached(at) is not None, SECONDS), project.log("sync")  # type: ignore[misc]
                os.killpg(process.pid, signal.SIGKILL)
            faults.clear()
            if number % 2:
                commit(f"ALTER TABLE t ADD z{number} int DEFAULT {number}", f"UPDATE t SET n = 0 WHERE id = {number}")
            for _ in range(2):
                project.run("sync")
            assert_equal(conn, project.lake, "public.t")
            assert not judge.judge(), step
        assert judge.listed > len(steps)
        assert project.run("verify", "--json").json["ok"]
