"""The commands on the embedded shop, as processes: what they do, say and return, and what stands in Dagster."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import psycopg
import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from tests.end_to_end.command import Project, ranges, runs, wait_for
from tests.oracle import assert_equal

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SHOP = (
    "public.carts", "public.customers", "public.events", "public.order_lines", "public.orders", "public.payments",
    "public.products",
)  # fmt: skip


@pytest.mark.long
def test_the_embedded_shop_from_setup_to_teardown(tmp_path: Path) -> None:
    project = Project(tmp_path, {"PGCDC_SOURCE": "embedded", "PGCDC_RANGE_SECONDS": "2"})
    server = EmbeddedServer(tmp_path / ".pgcdc" / "postgres", database="shop")
    try:
        assert project.run("sync", expect=1).err.strip().endswith("run `pgcdc setup`")
        assert len(project.run("setup", "--json").json["tables"]) == len(SHOP)
        assert server.running
        with psycopg.connect(server.conninfo, autocommit=True) as conn:
            _follow(project, conn)
            _snapshot(project, conn)
            _repair(project, conn)
        _maintain(project)
        _faults(project)
        _teardown(project, server)
    finally:
        server.stop()


def _follow(project: Project, conn: psycopg.Connection) -> None:
    """It copies, follows, and ends at a boundary with 0 and no process left."""
    with project.running("follow") as follow:
        wait_for(lambda: project.log("follow").count("copied public.") == len(SHOP) or follow.poll() is not None,
                 what="the copies")  # fmt: skip
        conn.execute("UPDATE public.products SET price = price + 1")
        wait_for(lambda: "range " in project.log("follow") or follow.poll() is not None, what="a range")
        assert follow.poll() is None, project.log("follow")
        held = project.run("sync", expect=1).err
        assert f"`pgcdc follow` (pid {follow.pid}) is writing to this lake" in held
        children = psutil.Process(follow.pid).children(recursive=True)
        follow.send_signal(signal.SIGTERM)
        assert follow.wait(120) == 0, project.log("follow")
        _gone, left = psutil.wait_procs(children, timeout=10)
        assert not left
    assert "replay_lsn" in project.log("follow")
    assert project.run("verify", "--json").json["ok"]
    assert_equal(conn, project.lake, *SHOP)
    assert runs(project)[-1] == ("sync", "FAILURE")
    assert ("sync", "SUCCESS") in runs(project)


def _snapshot(project: Project, conn: psycopg.Connection) -> None:
    copied = project.run("snapshot", "products", "public.carts").out
    assert "public.products: 200 rows copied at " in copied
    assert "public.carts: " in copied
    assert "public.orders" not in copied
    assert_equal(conn, project.lake, "public.products", "public.carts")


def _repair(project: Project, conn: psycopg.Connection) -> None:
    said = project.run("repair", "public.customers", "--range", ranges(project)[0]).out
    assert said.startswith("public.customers: range ")
    assert_equal(conn, project.lake, "public.customers")
    assert runs(project)[0] == ("repair", "SUCCESS")


def _maintain(project: Project) -> None:
    """All is young: nothing goes, and the ranges stay."""
    known = ranges(project)
    found = project.run("maintain", "--json").json
    assert (found["ok"], found["log_files"], found["points"], found["failed"]) == (True, 0, 0, [])
    assert project.run("maintain").out.startswith("forgotten: 0 files of the log")
    assert runs(project)[0] == ("maintain", "SUCCESS")
    assert ranges(project) == known


def _faults(project: Project) -> None:
    known = ranges(project)[0]
    for command in (["snapshot", "nowhere"], ["verify", "nowhere"], ["repair", "nowhere", "--range", known]):
        err = project.run(*command, expect=1).err.strip().splitlines()
        assert err[-1].startswith("pgcdc: public.nowhere: "), err
    status = json.loads(project.run("status", "--json").out)
    assert status["ok"], status["problems"]
    assert {table["state"] for table in status["tables"]} == {"streaming"}


def _teardown(project: Project, server: EmbeddedServer) -> None:
    said = project.run("teardown", "--yes").out
    assert "removed slot pgcdc" in said
    assert "kept the change log as" in said
    assert not server.running
    assert (project.lake / "public" / "orders").is_dir()
    project.run("teardown", "--yes", "--lake")
    assert not project.lake.exists()
