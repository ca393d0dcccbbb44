"""Commands beside a running `pgcdc follow`, as processes: it does what they ask; killed, it leaves that to them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow import requests
from pgcdc_assets.points.points import ConsistentPoints
from tests.cli.test_commands import ranges, runs
from tests.end_to_end.command import Project, wait_for
from tests.fix_postgres import Database
from tests.oracle import assert_equal

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]


def test_beside_a_sync_that_follows(database: Database, tmp_path: Path) -> None:
    settings = {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60], "PGCDC_RANGE_SECONDS": "1"}
    project, layout = Project(tmp_path, settings), Layout.of(tmp_path / "lake")
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
        conn.execute("INSERT INTO t SELECT g, g::text FROM generate_series(1, 1000) g; INSERT INTO u SELECT * FROM t")
        project.run("setup")
        with project.running("follow") as follow:
            wait_for(lambda: ConsistentPoints(layout).newest() is not None or follow.poll() is not None,
                     what="the first point")  # fmt: skip
            conn.execute("UPDATE t SET v = 'new' WHERE id <= 10")
            wait_for(lambda: "range " in project.log("follow") or follow.poll() is not None, what="a range")
            assert follow.poll() is None, project.log("follow")
            _served(project)
            assert_equal(conn, project.lake, "public.t", "public.u")

            # It holds the lock, and does nothing.
            os.kill(follow.pid, signal.SIGSTOP)
            _withdrawn(project, layout)
            with project.running("snapshot", "public.u") as snapshot:
                wait_for(lambda: requests.current(layout) is not None, what="the request")
                conn.execute("UPDATE u SET v = 'later' WHERE id <= 10")
                os.killpg(follow.pid, signal.SIGKILL)
                follow.wait()
                assert snapshot.wait(200) == 0, project.log("snapshot")
            assert "ask: nobody answered" in project.log("snapshot")
            assert "public.u: 1000 rows copied at" in project.log("snapshot")
        assert_equal(conn, project.lake, "public.t", "public.u")
        assert project.run("verify", "--json").json["ok"]
        assert project.run("status", "--json").json["problems"] == []


def _served(project: Project) -> None:
    """As if each command had done the job itself; Dagster shows its run."""
    asked = project.run("snapshot", "public.u")
    assert asked.out.startswith("public.u: 1000 rows copied at ")
    assert "ask: asks `pgcdc follow` (pid " in asked.err
    assert project.run("repair", "public.t", "--range", ranges(project)[0]).out.startswith("public.t: range ")
    assert project.run("verify", "--json").json["ok"]
    assert project.run("maintain", "--json").json["ok"]
    refused = project.run("repair", "public.t", "--range", "0/1..0/2", expect=1).err
    assert "range 0/1..0/2 begins before the log" in refused
    assert [run[:2] for run in runs(project)[:4]] == [
        ("repair", "FAILURE"), ("maintain", "SUCCESS"), ("repair", "SUCCESS"), ("sync", "SUCCESS"),
    ]  # fmt: skip
    told = project.log("follow")
    assert "serve: `pgcdc repair public.t`" in told


def _withdrawn(project: Project, layout: Layout) -> None:
    with project.running("repair", "public.t", "--range", ranges(project)[0]) as repair:
        wait_for(lambda: requests.current(layout) is not None, what="the request")
        assert not [child for child in psutil.Process(repair.pid).children(recursive=True) if "java" in child.name()]
        repair.send_signal(signal.SIGINT)
        assert repair.wait(10) == 1, project.log("repair")
    assert "interrupted; nothing is half done" in project.log("repair")
    assert requests.current(layout) is None
    with project.running("snapshot", "public.t") as snapshot:
        wait_for(lambda: requests.current(layout) is not None, what="the request")
        snapshot.send_signal(signal.SIGINT)
        assert snapshot.wait(10) == 1, project.log("snapshot")
    assert "`pgcdc follow` (pid " in project.log("snapshot")
    assert "was not waited for; what it has begun it ends" in project.log("snapshot")
    assert requests.current(layout) is None
