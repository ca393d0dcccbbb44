"""SIGINT (also by Ctrl-C in a terminal) and SIGTERM end a command within ten seconds, in any state."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.deadpath import DeadPath
from tests.end_to_end.command import Project
from tests.end_to_end.terminal import ends, terminal
from tests.fix_postgres import Database
from tests.waiting import wait_for


@pytest.fixture
def project(database: Database, tmp_path: Path) -> Project:
    with database.connect() as conn:
        conn.execute("CREATE TABLE public.t (id int PRIMARY KEY, v text)")
        conn.execute("INSERT INTO public.t SELECT g, g::text FROM generate_series(1, 1000) g")
    return Project(tmp_path, {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60]})


@pytest.mark.long
@pytest.mark.process
def test_ctrl_c_during_a_copy_ends_the_command(project: Project) -> None:
    """PySpark's own SIGINT handler must not be active: it would interrupt any code, and py4j would print tracebacks."""
    project.run("setup")
    with terminal(project, "follow") as shown:
        shown.wait_for("copying 1 table")
        shown.ctrl_c()
        assert ends(shown.process) in (0, 1), shown.words
        assert "Traceback" not in shown.words
        assert "py4j" not in shown.words


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("pause", [0.5, 3, 8])
def test_sigterm_at_any_moment_ends_sync_and_loses_no_change(
    project: Project, database: Database, pause: float
) -> None:
    """The signal arrives while Spark starts, during a copy, or during a merge. The next sync succeeds."""
    project.run("setup")
    with project.running("sync") as sync:
        time.sleep(pause)
        sync.send_signal(signal.SIGTERM)
        ends(sync)
    project.run("sync")
    assert project.run("verify", "--json").json["ok"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_setup_while_it_waits_for_a_transaction(project: Project, database: Database, number: int) -> None:
    with database.connect() as other, terminal(project, "setup") as shown:
        other.execute("BEGIN; INSERT INTO public.t VALUES (0, 'x')")
        shown.wait_for(f"PostgreSQL waits for pid {other.info.backend_pid}", 60)
        shown.process.send_signal(number)
        assert ends(shown.process) == 1
        assert "interrupted" in shown.words
        other.execute("COMMIT")
        ours = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ 'pgcdc'"
        wait_for(lambda: other.execute(ours).fetchone() is None, 60, "the end of its sessions")
        made = other.execute("SELECT FROM pg_replication_slots WHERE database = current_database()").fetchall()
        assert made == [], "no slot is left behind"


@pytest.mark.long
@pytest.mark.parametrize("args", [("status",), pytest.param(("follow",), marks=pytest.mark.long)])
def test_sigint_ends_a_command_whose_source_does_not_answer(
    project: Project, database: Database, args: tuple[str, ...]
) -> None:
    """When the signal arrives, the command is connecting to the server, or waits for the result of a query."""
    project.run("setup")
    with DeadPath(database) as path:
        project.settings["PGCDC_SOURCE"] = f"{path.conninfo} connect_timeout=60"
        path.die()
        with project.running(*args) as command:
            time.sleep(3 if args == ("status",) else 10)
            if command.poll() is None:
                command.send_signal(signal.SIGINT)
                ends(command)


@pytest.mark.long
@pytest.mark.process
def test_sigterm_ends_follow_while_the_network_forwards_nothing(project: Project, database: Database) -> None:
    with DeadPath(database) as path:
        project.settings["PGCDC_SOURCE"] = path.conninfo
        project.run("setup")
        with project.running("follow") as follow:
            wait_for(lambda: "copied public.t" in project.log("follow") or follow.poll() is not None, what="the copy")
            path.die()
            time.sleep(4)
            assert follow.poll() is None, project.log("follow")
            follow.send_signal(signal.SIGTERM)
            ends(follow)


# What a user sees on a terminal while `pgcdc follow` copies tables and then follows their changes

ROWS = 300_000


@pytest.mark.long
@pytest.mark.process
def test_follow_shows_the_progress_of_copies_and_then_lsn_lag_and_rate(database: Database, tmp_path: Path) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE public.t (id int PRIMARY KEY, v text); CREATE TABLE public.u (id int PRIMARY KEY)")
        conn.execute("INSERT INTO public.t SELECT g, repeat(md5(g::text), 8) FROM generate_series(1, %s) g", [ROWS])
    project = Project(tmp_path, {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60]})
    project.run("setup")
    with terminal(project, "follow") as shown:
        shown.wait_for("follow: copying, ")
        shown.wait_for("copies: table 1 of 2, 0 rows, 0 B of ")
        # Each Spark task copies one piece of a table. When a task ends, the rows of its piece are added to the count.
        counted = re.compile(r"copies: table \d of 2, (\d+,\d+) rows, [\d.]+ MiB of [\d.]+ MiB, \d+ s left")
        wait_for(lambda: counted.search(shown.words) is not None, 120, "a part of the copy")
        shown.wait_for("follow: following, at ")
        with database.connect() as conn:
            conn.execute("UPDATE public.t SET v = 'x' WHERE id <= 20000")
        moved = re.compile(r"follow: (following|catching up), at [0-9A-F]+/[0-9A-F]+, .* behind, [1-9][\d,]* rows/s")
        wait_for(lambda: moved.search(shown.words) is not None, 60, "a rate")
        shown.ctrl_c()
        assert ends(shown.process) == 0, shown.words
