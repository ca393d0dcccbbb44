"""An embedded PostgreSQL server in a folder. It is the source `embedded`, and the server of most tests. It listens only
on a Unix socket, so it needs no free port. The folder contains data, log and socket, and belongs to the user that runs
the server."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgcdc_assets.demo.binaries import NEWEST, Runner, environment, programs
from pgcdc_assets.errors import MachineError

USER = "postgres"
PORT = 5432
"""Part of the socket's file name. The server does not listen on TCP."""

_SOCKET = f".s.PGSQL.{PORT}"
_SHORT_FOLDER = Path("/tmp")
"""A folder with a short path for the socket. TMPDIR is not used, because its path may be long, and another process of
the project may have a different TMPDIR."""
_SOCKET_PATH_LIMIT = 100
"""The most bytes of the socket's path. Linux allows 107. The rest is for the suffix of the socket's lock file."""
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_/.\-]+")
"""Paths that need no quoting. libpq and unix_socket_directories split at commas, and have different quoting rules."""

_START_SECONDS = 60
_STOP_SECONDS = 20
"""Time limit of a fast shutdown, which waits until the clients of walsenders have confirmed all WAL. If it is exceeded,
an immediate shutdown follows."""

SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_wal_size": "2GB",
    "max_slot_wal_keep_size": "16GB",
    "lc_messages": "C",
    "log_min_messages": "warning",
}


@dataclass
class EmbeddedServer:
    """A server in ``folder``. ``start()`` creates the database cluster if there is none, and starts the server unless
    it already runs. Every user with access to the folder may connect without a password. ``version``: the major version
    of a new cluster. ``database``: the database in ``conninfo``. ``fsync=False`` is for tests. ``programs``: the folder
    with initdb and postgres of another installation of the same version."""

    folder: Path
    version: int = NEWEST
    database: str = "postgres"
    fsync: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    programs: Path | None = None
    _guard: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _started: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        with suppress(FileNotFoundError, PermissionError):
            self.version = int((self.data / "PG_VERSION").read_text())

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def bin(self) -> Path:
        return self.programs or programs(self.version)

    @cached_property
    def runner(self) -> Runner:
        return Runner.for_folders(self.bin, self.folder)

    @property
    def socket_folder(self) -> Path:
        """The folder of the Unix socket: ``folder`` itself or, if the socket's path would be too long or need quoting,
        a folder with a short path below /tmp."""
        path = str(self.folder)
        if len(os.fsencode(path)) + len(_SOCKET) < _SOCKET_PATH_LIMIT and _PLAIN_PATH.fullmatch(path):
            return self.folder
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return _SHORT_FOLDER / f"pgcdc-{os.geteuid()}-{name}"

    @property
    def conninfo(self) -> str:
        return self.conninfo_of(self.database)

    def conninfo_of(self, database: str) -> str:
        return make_conninfo(host=str(self.socket_folder), port=PORT, user=USER, dbname=database)

    @property
    def pid(self) -> int | None:
        """The pid of the running postmaster. None if no postmaster runs, even if postmaster.pid exists."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])
            process = psutil.Process(pid)
            ours = process.name().startswith("postgres") and Path(process.cwd()) == self.data.resolve()
            return pid if ours and process.status() != psutil.STATUS_ZOMBIE else None
        except (OSError, ValueError, psutil.Error):
            return None

    @property
    def psql(self) -> str:
        """A command line that opens the database in psql."""
        return shlex.join([str(self.bin / "psql"), self.conninfo])

    @property
    def system_identifier(self) -> str | None:
        """The system identifier (first field of pg_control), even of a stopped cluster. None if there is no cluster."""
        try:
            with (self.data / "global" / "pg_control").open("rb") as file:
                return str(int.from_bytes(file.read(8), sys.byteorder))
        except OSError:
            return None

    @property
    def running(self) -> bool:
        return self.pid is not None

    def start(self, *, survive: bool = True) -> Self:
        """Starts the server, unless it runs. With ``survive=False``, a server that this call has started ends when this
        process ends, even if the process is killed."""
        with self._alone():
            if not self.running:
                self._prepare()
                self._launch()
                self._started = True
        self._ensure_database()
        if not survive and self._started and self._guard is None:
            self._guard = self._watch_over()
        return self

    def stop(self, *, mode: str = "fast") -> None:
        """Stops a running server. ``mode``: ``fast``, or ``immediate``, which is like a crash: the next start has to
        recover from the WAL."""
        if self.running:
            self._control("stop", "-w", "-m", mode, "-t", str(_STOP_SECONDS))
        if self.running:
            self._control("stop", "-w", "-m", "immediate", "-t", str(_STOP_SECONDS))
        if self.running:
            raise MachineError("does not stop", thing=f"embedded PostgreSQL in {self.folder}")
        if self.socket_folder != self.folder:
            with suppress(OSError):
                self.socket_folder.rmdir()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait(_STOP_SECONDS)
            self._guard = None
        self._started = False

    def __enter__(self) -> Self:
        return self.start(survive=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._started:
            self.stop()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets only one command at a time start the server. A second command waits, and then finds the server
        running."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / f".{self.folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        runner = self.runner
        runner.own(self.folder)
        if self.socket_folder != self.folder:
            self._refuse_planted(runner)
            runner.own(self.socket_folder)
        if not (self.data / "PG_VERSION").exists():
            options = ["--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync", f"--username={USER}"]
            done = runner.run([self.bin / "initdb", *options, "-D", self.data])
            if done.returncode:
                raise MachineError(
                    f"initdb failed: {_last_line(done.stderr)}", thing=f"embedded PostgreSQL in {self.folder}"
                )
        self._write_settings()
        for stale in (self.data / "postmaster.pid", self.socket_folder / f"{_SOCKET}.lock"):
            # These files are left from a server that did not stop cleanly. In a restarted container, an unrelated
            # program may have the pid in them. PostgreSQL would take this program for a running server.
            stale.unlink(missing_ok=True)

    def _refuse_planted(self, runner: Runner) -> None:
        """Raises MachineError if another user owns the socket's folder, or a link is in its place. All users can write
        to the parent folder, so another user could otherwise get the connections to the server."""
        with suppress(FileNotFoundError):
            found = self.socket_folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), runner.uid):
                raise MachineError("belongs to another user", thing=str(self.socket_folder), do="remove it")

    def _write_settings(self) -> None:
        included = "include_if_exists = 'pgcdc.conf'"
        main = self.data / "postgresql.conf"
        if included not in (text := main.read_text()):
            main.write_text(f"{text}\n{included}\n")
        fsync = "on" if self.fsync else "off"
        own = {"unix_socket_directories": str(self.socket_folder), "port": str(PORT), "fsync": fsync}
        if not self.fsync:
            own["full_page_writes"] = "off"
        lines = [f"{name} = '{value}'" for name, value in {**SETTINGS, **own, **self.settings}.items()]
        (self.data / "pgcdc.conf").write_text("\n".join(lines) + "\n")
        (self.data / "pgcdc.conf").chmod(0o644)

    def _launch(self) -> None:
        done = self._control("start", "-w", "-t", str(_START_SECONDS), "-l", str(self.log))
        deadline = time.monotonic() + _STOP_SECONDS
        while done.returncode and not self.running and time.monotonic() < deadline:
            # Child processes of a killed server may still be running and use its shared memory.
            if "shared memory" not in self._log_tail():
                break
            time.sleep(0.2)
            done = self._control("start", "-w", "-t", str(_START_SECONDS), "-l", str(self.log))
        if done.returncode:
            raise MachineError(
                f"did not start: {_last_line(self._log_tail() or done.stderr)}",
                thing=f"embedded PostgreSQL in {self.folder}",
                do=f"see {self.log}",
            )

    def _control(self, action: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.runner.run([self.bin / "pg_ctl", action, "-s", "-D", self.data, *options])

    def _ensure_database(self) -> None:
        if self.database == "postgres":
            return
        with psycopg.connect(self.conninfo_of("postgres"), autocommit=True) as conn:
            found = conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self.database]).fetchone()
            if found is None:
                conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.database)))

    def _watch_over(self) -> subprocess.Popen[bytes]:
        """Starts a shell that stops the server when this process ends. The shell notices the end because its input is
        closed."""
        script = 'cat >/dev/null; "$1" stop -s -w -m fast -t 10 -D "$2" || "$1" stop -s -m immediate -D "$2"'
        return subprocess.Popen(
            self.runner.command(["sh", "-c", script, "sh", self.bin / "pg_ctl", self.data]),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd="/", env=environment(), start_new_session=True,
        )  # fmt: skip

    def _log_tail(self) -> str:
        with suppress(OSError):
            return self.log.read_text(errors="replace")[-2000:]
        return ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "FATAL" in line or "ERROR" in line), lines[-1] if lines else "?")
