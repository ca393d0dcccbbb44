"""The outbox by the commands alone: SIGKILL of all processes while an application writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgcdc_assets import Lake
from tests.end_to_end.command import Project, wait_for
from tests.fix_postgres import Database


@pytest.mark.process
@pytest.mark.long
def test_killed_runs_bring_row_and_message_once(database: Database, tmp_path: Path) -> None:
    project = Project(
        tmp_path,
        {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60], "PGCDC_MESSAGES": '["outbox.*"]'},
    )
    written = 0
    with database.connect() as conn:
        conn.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        project.run("setup")
        project.run("sync")
        for _ in range(2):
            before = Lake(project.lake).at().lsn
            with project.running("follow") as follow:
                wait_for(lambda: _held(conn, project) or follow.poll() is not None, what="the stream")
                while Lake(project.lake).at().lsn == before or written % 20:
                    assert follow.poll() is None, project.log("follow")
                    with conn.transaction():
                        conn.execute("INSERT INTO orders VALUES (%s)", [written])
                        conn.execute("SELECT pg_logical_emit_message(true, 'outbox.o', %s::text)", [str(written)])
                    written += 1
                os.killpg(follow.pid, signal.SIGKILL)
        project.run("sync")
    at = Lake(project.lake).at()
    told = [int(content) for content in at.messages()["content"].to_pylist()]
    assert told == list(range(written))
    assert sorted(at.arrow("orders")["id"].to_pylist()) == told
    assert project.run("status", "--json").json["messages"]["replay_lsn"] == str(at.lsn)
    shown = project.run("status").out
    assert f"messages             {at.lsn}" in shown


def _held(conn: psycopg.Connection[Any], project: Project) -> bool:
    found = conn.execute(
        "SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name = %s", [project.settings["PGCDC_SLOT"]]
    ).fetchone()
    return found is not None and found[0] > 0
