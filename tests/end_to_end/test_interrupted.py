"""SIGINT and SIGTERM end a command within ten seconds, in any state, also from a terminal: the command as a process."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.deadpath import DeadPath
from tests.end_to_end.command import Project, wait_for
from tests.fix_postgres import Database

SECONDS = 10
LATE = 2
"""For a machine that is busy: the process has ended, and we have not seen it yet."""


@pytest.fixture
def project(database: Database, tmp_path: Path) -> Project:
    with database.connect() as conn:
        conn.execute("CREATE TABLE public.t (id int PRIMARY KEY, v text)")
        conn.execute("INSERT INTO public.t SELECT g, g::text FROM generate_series(1, 1000) g")
    return Project(tmp_path, {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60]})


class Terminal:
    """A command on a pseudo-terminal of its own, which Ctrl-C is typed at."""

    def __init__(self, project: Project, *args: str) -> None:
        self._master, slave = pty.openpty()
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PGCDC_", "DAGSTER_"))}
        self.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("pgcdc")), *args], cwd=project.folder,
            env={**clean, **project.settings, "TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._said = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def words(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._said.decode(errors="replace")).replace("\r", "\n")

    def wait_for(self, text: str, seconds: float = 200) -> None:
        wait_for(lambda: text in self.words or self.process.poll() is not None, seconds, repr(text))
        assert self.process.poll() is None, self.words

    def ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    def _read(self) -> None:
        with suppress(OSError):
            while piece := os.read(self._master, 65536):
                self._said += piece


@contextmanager
def terminal(project: Project, *args: str) -> Iterator[Terminal]:
    shown = Terminal(project, *args)
    try:
        yield shown
    finally:
        shown.end()


def ends(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> int:
    """Its exit code, once it and all that it started have ended; in time."""
    started = time.monotonic()
    family = psutil.Process(process.pid).children(recursive=True)
    code = process.wait(SECONDS + LATE)
    _, left = psutil.wait_procs(family, timeout=max(0.5, SECONDS + LATE - (time.monotonic() - started)))
    assert left == []
    return code


@pytest.mark.spark
@pytest.mark.process
@pytest.mark.parametrize("when", ["copied public.t", pytest.param("copying 1 tables", marks=pytest.mark.long)])
def test_ctrl_c_with_spark_started(project: Project, when: str) -> None:
    """PySpark has a handler of its own, which would interrupt whatever goes on; and py4j tracebacks."""
    project.run("setup")
    with terminal(project, "follow") as shown:
        shown.wait_for(when)
        shown.ctrl_c()
        code = ends(shown.process)
        said = shown.words
    assert "Traceback" not in said
    assert "py4j" not in said
    if when.startswith("copied"):
        # Nothing was under way: it ends at a boundary, and well.
        assert (code, "replay_lsn" in said) == (0, True), said
    else:
        assert code in (0, 1), said


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("pause", [0.5, 3, 8])
def test_a_signal_at_any_moment(project: Project, database: Database, pause: float) -> None:
    """In Spark's start, in a copy, in a merge; then all is well again."""
    project.run("setup")
    with project.running("sync") as sync:
        time.sleep(pause)
        sync.send_signal(signal.SIGTERM)
        ends(sync)
    project.run("sync")
    assert project.run("verify", "--json").json["ok"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_setup_waits_for_a_transaction_and_says_so(project: Project, database: Database, number: int) -> None:
    with database.connect() as other, terminal(project, "setup") as shown:
        other.execute("BEGIN; INSERT INTO public.t VALUES (0, 'x')")
        shown.wait_for(f"PostgreSQL waits for pid {other.info.backend_pid}", 60)
        shown.process.send_signal(number)
        assert ends(shown.process) == 1
        assert "interrupted" in shown.words
        other.execute("COMMIT")
        ours = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ 'pgcdc'"
        wait_for(lambda: other.execute(ours).fetchone() is None, 10, "the end of its sessions")
        made = other.execute("SELECT FROM pg_replication_slots WHERE database = current_database()").fetchall()
        assert made == [], "no slot is left behind"


@pytest.mark.parametrize("args", [("status",), pytest.param(("follow",), marks=pytest.mark.long)])
def test_a_server_that_says_nothing(project: Project, database: Database, args: tuple[str, ...]) -> None:
    """Connecting, or in a query: whatever it stands at after a while."""
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
def test_follow_beside_a_path_that_died(project: Project, database: Database) -> None:
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
