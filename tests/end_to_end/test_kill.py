"""SIGKILL of the whole process group in the middle of the copy and of streaming; run again; equal."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable

from tests.end_to_end.command import Project, wait_for
from tests.fix_postgres import Database
from tests.oracle import assert_equal


@pytest.fixture
def project(database: Database, tmp_path: Path) -> Project:
    return Project(tmp_path, {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60]})


def versions(path: Path) -> int:
    """Number of Delta commits, without opening the table."""
    return len(list((path / "_delta_log").glob("*.json")))


@pytest.mark.process
@pytest.mark.long
def test_killed_in_the_copy(project: Project, database: Database) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE public.small (id int PRIMARY KEY, v text)")
        conn.execute("INSERT INTO public.small SELECT g, g::text FROM generate_series(1, 100) g")
        conn.execute("CREATE TABLE public.large (id int PRIMARY KEY, v text, w text)")
        conn.execute(
            "INSERT INTO public.large SELECT g, repeat(md5(g::text), 20), md5((-g)::text)"
            " FROM generate_series(1, 400000) g"
        )
        project.run("setup")
        large = project.lake / "public" / "large"
        with project.running("sync") as sync:
            wait_for(lambda: any(large.glob("*.parquet")) or sync.poll() is not None, what="a first file of the copy")
            assert sync.poll() is None, project.log("sync")
            os.killpg(sync.pid, signal.SIGKILL)
        assert not DeltaTable(str(large)).file_uris(), "the copy was committed before the kill"
        conn.execute("UPDATE public.large SET w = 'after' WHERE id <= 100")
        conn.execute("DELETE FROM public.small WHERE id = 5")
        project.run("sync")
        assert_equal(conn, project.lake, "public.small", "public.large")


@pytest.mark.process
@pytest.mark.long
def test_killed_while_streaming(project: Project, database: Database) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE public.account (id int PRIMARY KEY, balance bigint NOT NULL, note text)")
        conn.execute("CREATE TABLE public.entry (id bigserial PRIMARY KEY, account int, amount bigint)")
        conn.execute("INSERT INTO public.account SELECT g, 0, repeat('x', 4000) FROM generate_series(1, 200) g")
        project.run("setup")
        project.run("sync")
        stop = threading.Event()
        writer = threading.Thread(target=transfer, args=(database.conninfo, stop))
        writer.start()
        try:
            log, mirror = project.lake / "_pgcdc" / "change_log", project.lake / "public" / "account"
            with project.running("follow") as follow:
                logged, merged = versions(log), versions(mirror)
                wait_for(
                    lambda: (versions(log) > logged + 2 and versions(mirror) > merged + 1) or follow.poll() is not None,
                    what="log and mirror moving",
                )
                assert follow.poll() is None, project.log("follow")
                os.killpg(follow.pid, signal.SIGKILL)
        finally:
            stop.set()
            writer.join()
        project.run("sync")
        assert_equal(conn, project.lake, "public.account", "public.entry")
        assert project.run("verify", "--json").json["ok"]


def transfer(conninfo: str, stop: threading.Event) -> None:
    """Small transactions over both tables until told to stop."""
    with psycopg.connect(conninfo) as conn:
        count = 0
        while not stop.is_set():
            count += 1
            with conn.transaction():
                conn.execute("UPDATE public.account SET balance = balance - 1 WHERE id = %s", (count % 200 + 1,))
                conn.execute("INSERT INTO public.entry (account, amount) VALUES (%s, -1)", (count % 200 + 1,))
            stop.wait(0.002)
