"""The source of a power cut test: tables, their journal, a writer, and a slot that can be moved back to an earlier
position."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LakeError
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.log.commit import recover_log
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import change_note, load_note, save_catalog
from pgcdc_assets.settings import STATE_FOLDER, Settings
from pgcdc_assets.source.setup.setup import setup
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import Database
from tests.journal import Journal, published
from tests.oracle import RAW, Rows, mirror_rows, written
from tests.power.victim import TABLES
from tests.projectfiles import CATALOG_FILE

HOOKS = Path(__file__).with_name("hooks")
_MAKE = """
CREATE TABLE t (id int PRIMARY KEY, v text);
CREATE TABLE bag (k int, v text);
ALTER TABLE bag REPLICA IDENTITY FULL;
CREATE TABLE entry (id bigserial PRIMARY KEY, note text);
CREATE TABLE wiped (id int PRIMARY KEY, v text);
INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 40) g;
INSERT INTO bag SELECT g % 7, 'copy' FROM generate_series(1, 30) g;
INSERT INTO entry (note) SELECT 'first' FROM generate_series(1, 10);
INSERT INTO wiped SELECT g, 'v' FROM generate_series(1, 10) g;
"""


def statements(chance: random.Random) -> str:
    at = chance.randrange(60)
    return chance.choice([
        f"INSERT INTO t VALUES ({at}, 'new') ON CONFLICT (id) DO UPDATE SET v = t.v || '!'",
        f"UPDATE t SET v = 'set {at}' WHERE id BETWEEN {at} AND {at + 9}",
        f"DELETE FROM t WHERE id = {at}",
        f"UPDATE t SET id = id + 1000 WHERE id = {at} AND NOT EXISTS (SELECT FROM t WHERE id = {at + 1000})",
        f"INSERT INTO bag VALUES ({at % 7}, 'copy'), ({at % 7}, 'copy')",
        f"UPDATE bag SET v = 'set {at}' WHERE k = {at % 7}",
        "INSERT INTO entry (note) SELECT 'more' FROM generate_series(1, 3)",
        "INSERT INTO entry (note) SELECT 'more' FROM generate_series(1, 3)",
        f"BEGIN; TRUNCATE wiped; INSERT INTO wiped SELECT g, 'again' FROM generate_series(1, {at % 9}) g; COMMIT",
    ])  # fmt: skip


@dataclass
class PowerRig:
    database: Database
    project: Path
    spark: SparkSession
    slot: str
    conn: psycopg.Connection[Any] = field(init=False)
    journal: Journal = field(init=False)
    _expected: dict[tuple[str, int], tuple[list[str], Rows]] = field(default_factory=dict)
    _commits: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conn = self.database.connect()
        self.conn.execute(_MAKE)
        self.journal = Journal.keep(self.conn, *(f"public.{name}" for name in TABLES))
        self.settings = Settings(
            source=self.database.conninfo, slot=self.slot, tables=("public.*",), batch_seconds=0.1, range_seconds=2,
            retention="0 days",  # type: ignore[arg-type]
        )  # fmt: skip
        save_catalog(setup(self.settings, self.database.conninfo).catalog, CATALOG_FILE)
        self.conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [self.slot, self._origin])

    @property
    def _origin(self) -> str:
        """The name of a slot that is never read, and so stays at the LSN where the project's slot began."""
        return f"{self.slot}_o"[:63]

    @contextmanager
    def victim(self, syncs: Path, seed: int) -> Iterator[psutil.Process]:
        """Runs syncs in a separate process (the victim), and a thread that writes to the source at the same time."""
        path = os.pathsep.join([str(HOOKS), str(Path(__file__).parents[2]),
                                os.environ.get("PYTHONPATH", "")])  # fmt: skip
        env = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "PGCDC_TEST_SYNCS": str(syncs)}
        settings_json = json.dumps(self.settings.model_dump(mode="json", exclude_defaults=True))
        log = syncs.with_suffix(".log").open("wb")
        process = subprocess.Popen([sys.executable, "-m", "tests.power.victim", settings_json], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True)  # fmt: skip
        watched = psutil.Process(process.pid)
        stop = threading.Event()
        writer = threading.Thread(target=self._write, args=(random.Random(seed), stop))
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", syncs.with_suffix(".log").read_text()[-3000:]
            process.stdin.write(b"%d\n" % seed)
            process.stdin.flush()
            writer.start()
            yield watched
        finally:
            stop.set()
            with suppress(RuntimeError):
                writer.join(30)
            process.kill()
            process.wait(30)
            _end_all_of(syncs)
            for pipe in (process.stdin, process.stdout, log):
                assert pipe is not None
                pipe.close()
        self._commits = self.journal.commits()

    def _write(self, chance: random.Random, stop: threading.Event) -> None:
        with self.database.connect() as conn:
            while not stop.wait(chance.uniform(0.02, 0.15)):
                conn.execute(statements(chance).encode())

    def confirmed(self) -> Lsn:
        row = self.conn.execute(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", [self.slot]
        ).fetchone()
        assert row is not None
        return Lsn.parse(row[0])

    def set_slot_back(self) -> None:
        """Moves the slot back as far as possible, because a power cut of the source could lose confirmations."""
        deadline = time.monotonic() + 30
        while True:
            try:
                self.conn.execute("SELECT pg_drop_replication_slot(%s)", [self.slot])
                break
            except psycopg.errors.ObjectInUse:
                assert time.monotonic() < deadline, "the slot stays in use"
                self.conn.execute("SELECT pg_terminate_backend(active_pid, 1000) FROM pg_replication_slots "
                                  "WHERE slot_name = %s AND active_pid IS NOT NULL", [self.slot])  # fmt: skip
        self.conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [self._origin, self.slot])

    def close(self) -> None:
        self.conn.close()

    # Checks of an image (what a power cut left). The current directory is the image's folder ------

    def before(self, confirmed: Lsn, chance: random.Random) -> list[tuple[int, dict[str, int]]]:
        """Checks the image before recovery: each point is read correctly or refused with an error. Returns the points,
        or an empty list if the list of points itself is refused."""
        layout = self.settings.layout
        recover_log(layout.change_log)
        log = ChangeLog(layout)
        if log.exists:
            assert log.position() >= confirmed, f"confirmed {confirmed}, but the log ends at {log.position()}"
        try:
            lake = Lake(layout.root)
            points = [(int(p.replay_lsn), {str(n): v for n, v in p.tables.items()}) for p in lake._points.all()]
        except LakeError:
            return []
        for lsn, tables in _some(points, chance):
            for name in tables:
                with suppress(LakeError):
                    self._assert_rows(name, lsn, _rows(lake, name, lsn))
        return points

    def recovered(self) -> None:
        self.set_slot_back()
        if load_note(STATE_FOLDER).log is not None:
            # After the power cut, the lake is a copy at another path. The project's note must name this path. Otherwise
            # pgcdc refuses the lake as a copy of the lake of the original project, which still exists.
            change_note(STATE_FOLDER, lake=self.settings.layout.root.text)
        assert self.settings.source is not None
        engine = Engine(self.settings, self.settings.source, Silent(), lambda: self.spark, "power cut test")
        report = engine.sync(Bounds())
        assert report.set_aside == [], report.set_aside

    def after(self, points: list[tuple[int, dict[str, int]]], chance: random.Random) -> int:
        """Checks the image after recovery: all earlier ``points`` still exist, and some of them, and all new points,
        are read correctly. Returns the number of points read."""
        now = published(path_of(self.settings.layout.root))
        assert now[: len(points)] == points, "an earlier point is missing or has changed"
        assert [lsn for lsn, _ in now] == sorted(lsn for lsn, _ in now), "the points are not in order"
        assert set(now[-1][1]) == {f"public.{name}" for name in TABLES}
        chosen = [*_some(points, chance), *now[len(points) :]]
        for lsn, versions in chosen:
            for name, version in versions.items():
                columns, _ = self._rows_at(name, lsn)
                root = path_of(self.settings.layout.root)
                self._assert_rows(name, lsn, mirror_rows(root, name.replace(".", "/"), columns, version))
        for name in TABLES:
            # Users read with `Lake.at`, which also checks that the mirrors have the versions that the point names.
            self._assert_rows(f"public.{name}", now[-1][0], _rows(Lake(self.settings.layout.root), f"public.{name}",
                                                                  now[-1][0]))  # fmt: skip
        return len(chosen)

    def _assert_rows(self, name: str, lsn: int, found: Rows) -> None:
        _, expected = self._rows_at(name, lsn)
        missing, extra = expected - found, found - expected
        assert not missing, f"{name} at {Lsn(lsn)}: {missing.total()} rows missing, like {next(iter(missing))}"
        assert not extra, f"{name} at {Lsn(lsn)}: {extra.total()} rows too many, like {next(iter(extra))}"

    def _rows_at(self, name: str, lsn: int) -> tuple[list[str], Rows]:
        if (name, lsn) not in self._expected:
            self._expected[name, lsn] = self.journal.rows_at(name, lsn, self._commits)
        return self._expected[name, lsn]


def _rows(lake: Lake, name: str, lsn: int) -> Rows:
    """The rows of a table at an LSN, in the form in which ``tests.oracle`` compares rows."""
    data = lake.at(lsn).arrow(name)
    columns = [column for column in data.column_names if not column.startswith("_pgcdc_")]
    misfits = [dict(entry or ()) for entry in data[RAW].to_pylist()]
    return Rows(zip(*(written(column, data[column], misfits) for column in columns), strict=True))


def _some(points: list[tuple[int, dict[str, int]]], chance: random.Random) -> list[tuple[int, dict[str, int]]]:
    """The two newest points, which a power cut is most likely to damage, and two random earlier points."""
    last = {lsn: (lsn, tables) for lsn, tables in points}
    newest = list(last.values())
    return [*chance.sample(newest[:-2], min(2, len(newest[:-2]))), *newest[-2:]]


def _end_all_of(syncs: Path) -> None:
    """Kills all processes of a dead victim, including the processes that the victim started right before its end. A
    remaining receiver would use the slot again, and confirm positions of the log in the victim's folder."""
    deadline = time.monotonic() + 30
    while left := [one for one in psutil.process_iter() if _writes_down_to(one, syncs)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, 5)


def _writes_down_to(process: psutil.Process, syncs: Path) -> bool:
    with suppress(psutil.Error):
        return bool(process.environ().get("PGCDC_TEST_SYNCS") == str(syncs))
    return False


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """Stops the process and all its children during the block."""
    stopped: dict[int, psutil.Process] = {}
    try:
        while fresh := [one for one in _tree(process) if one.pid not in stopped]:
            for one in fresh:
                with suppress(psutil.NoSuchProcess):
                    one.suspend()
                stopped[one.pid] = one
        for one in stopped.values():
            with suppress(psutil.NoSuchProcess):
                while one.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    time.sleep(0.001)
        yield
    finally:
        for one in stopped.values():
            with suppress(psutil.NoSuchProcess):
                one.resume()
