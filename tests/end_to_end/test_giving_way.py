"""Commands beside a running `pgcdc follow`, as processes: it gives way and goes on, whoever of them is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow import lock
from pgcdc_assets.points.points import ConsistentPoints
from tests.end_to_end.command import Project, ranges, runs, wait_for
from tests.fix_postgres import Database, inside
from tests.oracle import assert_equal

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]


def test_beside_a_sync_that_follows(database: Database, tmp_path: Path) -> None:
    settings = {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60], "PGCDC_RANGE_SECONDS": "1"}
    project, layout = Project(tmp_path, settings), Layout.of(tmp_path / "lake")
    points = ConsistentPoints(layout)
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
        conn.execute("INSERT INTO t SELECT g, g::text FROM generate_series(1, 1000) g; INSERT INTO u SELECT * FROM t")
        project.run("setup")
        with project.running("follow") as follow:

            def reaches(value: str) -> None:
                with conn.transaction():
                    conn.execute("UPDATE t SET v = %s WHERE id <= 10", [value])
                    goal = inside(conn)
                wait_for(lambda: ((newest := points.newest()) is not None and newest.replay_lsn >= goal)
                         or follow.poll() is not None, what=value)  # fmt: skip
                assert follow.poll() is None, project.log("follow")

            reaches("first")
            wait_for(lambda: "range " in project.log("follow"), what="a range")
            _in_turn(project)
            reaches("after the commands")

            # It holds the lock, and does nothing.
            os.kill(follow.pid, signal.SIGSTOP)
            for number, code in ((signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)):
                with project.running("repair", "public.t", "--range", ranges(project)[0]) as repair:
                    wait_for(lambda: lock.waiting(layout) is not None, what="the command")
                    repair.send_signal(number)
                    assert repair.wait(10) == code, project.log("repair")
                assert lock.waiting(layout) is None
            os.kill(follow.pid, signal.SIGCONT)
            reaches("after a command that was killed while it waited")

            with project.running("snapshot", "public.u") as snapshot:
                wait_for(lambda: _holder(layout) == snapshot.pid, what="the command's turn")
                snapshot.kill()
                snapshot.wait()
            reaches("after a command that was killed at its work")

            os.kill(follow.pid, signal.SIGSTOP)
            with project.running("snapshot", "public.u") as snapshot:
                wait_for(lambda: lock.waiting(layout) is not None, what="the command")
                conn.execute("UPDATE u SET v = 'later' WHERE id <= 10")
                os.killpg(follow.pid, signal.SIGKILL)
                follow.wait()
                assert snapshot.wait(200) == 0, project.log("snapshot")
            assert "public.u: 1000 rows copied at" in project.log("snapshot")
        assert_equal(conn, project.lake, "public.t", "public.u")
        assert project.run("verify", "--json").json["ok"]
        assert project.run("status", "--json").json["problems"] == []


def _holder(layout: Layout) -> int | None:
    holder = lock.holder(layout)
    return None if holder is None else holder.pid


def _in_turn(project: Project) -> None:
    """Each command does its work, and Dagster shows its run."""
    copied = project.run("snapshot", "public.u")
    assert copied.out.startswith("public.u: 1000 rows copied at ")
    assert "lock: waits for `pgcdc follow` (pid " in copied.err
    assert project.run("repair", "public.t", "--range", ranges(project)[0]).out.startswith("public.t: range ")
    assert project.run("verify", "--json").json["ok"]
    assert project.run("maintain", "--json").json["ok"]
    refused = project.run("repair", "public.t", "--range", "0/1..0/2", expect=1).err
    assert "range 0/1..0/2 begins before the log" in refused
    assert [run[:2] for run in runs(project)[:4]] == [
        ("repair", "FAILURE"), ("maintain", "SUCCESS"), ("repair", "SUCCESS"), ("sync", "SUCCESS"),
    ]  # fmt: skip
