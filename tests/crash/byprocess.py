"""Runs commands of a project, each in a process that is killed at a step that makes something durable (a fault point).
Lists these steps for each command."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import LiteralString

import dagster as dg
import psutil
import psycopg

from pgcdc_assets.core import faultpoints
from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.core.lsn import Lsn, LsnRange
from tests.crash.faults import Kind, wait_until
from tests.crash.lakes import LakeRig
from tests.end_to_end.command import Project
from tests.journal import published
from tests.projectfiles import CATALOG_FILE

logger = logging.getLogger(__name__)

LEVEL = "of the whole command"
SECONDS = 900.0
"""The longest wait for anything, on a busy machine."""


SOME = 8
"""The number of cases that the long set selects at random."""


@dataclass(frozen=True)
class Case:
    """A command that reaches the fault point, and the process to kill there. If ``point`` is None, the process is
    killed at a random time."""

    command: str
    point: FaultPoint | None
    kind: Kind = Kind.RUN


FIRST = (
    FaultPoint.LOG_MAKING, FaultPoint.LOG_MADE, FaultPoint.COPY_SLOT_MADE, FaultPoint.SNAPSHOT_EXPORTED,
    FaultPoint.STATE_WRITTEN, FaultPoint.MIRROR_MADE, FaultPoint.PIECE_COPIED, FaultPoint.COPY_COMMITTING,
    FaultPoint.COPY_COMMITTED,
)  # fmt: skip
"""Fault points that a sync reaches when it creates the lake, in order. If a sync is killed at one of them, the next
sync reaches the following points."""
_COPIES = (FaultPoint.COPY_COMMITTED, FaultPoint.COPY_REGISTERED, FaultPoint.COPY_RECORDED)
_TURNS = (
    FaultPoint.SEGMENT_WRITTEN, FaultPoint.SEGMENTS_MOVED, FaultPoint.BATCH_COMMITTING, FaultPoint.BATCH_COMMITTED,
    FaultPoint.BATCH_DURABLE, FaultPoint.BATCH_CONFIRMED, FaultPoint.FEED_FILES_WRITTEN, FaultPoint.FEED_COMMITTING,
    FaultPoint.FEED_COMMITTED, FaultPoint.MIRROR_WIDENED, FaultPoint.COLLAPSED, FaultPoint.LINK_COMMITTING,
    FaultPoint.LINK_COMMITTED, FaultPoint.OVERWRITE_COMMITTING, FaultPoint.OVERWRITE_COMMITTED,
    FaultPoint.MERGE_COMMITTING, FaultPoint.MERGE_COMMITTED, FaultPoint.MIRROR_FILES_WRITTEN,
    FaultPoint.MIRROR_FILES_COMMITTED, FaultPoint.POINT_PUBLISHING, FaultPoint.POINT_PUBLISHED,
    FaultPoint.RANGE_REGISTERING, FaultPoint.RANGE_REGISTERED, FaultPoint.RANGE_RECORDED,
)  # fmt: skip
_UPKEEP = (
    FaultPoint.MIRROR_OPTIMIZED, FaultPoint.POINTS_PRUNED, FaultPoint.LOG_CUT, FaultPoint.FEEDS_CUT,
    FaultPoint.MIRROR_VACUUMED, FaultPoint.LOG_SWEPT,
)  # fmt: skip
PROGRAM = """
from datetime import timedelta
from pgcdc_assets.core import retention
from pgcdc_assets.mirror.delta import compaction
from pgcdc_assets.mirror.delta.compaction import Compaction
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
retention.GRACE, compaction.MOST_SMALL = timedelta(0), 1
DeltaTarget.compaction = Compaction(look_every=1, most_small=2)
from pgcdc_assets.cli.main import main
main()
"""
"""Runs the command with settings under which maintenance deletes even the newest data and merges even two files."""
_WITH_JVM = (
    FaultPoint.FEED_COMMITTING, FaultPoint.COLLAPSED, FaultPoint.MERGE_COMMITTING, FaultPoint.MERGE_COMMITTED,
    FaultPoint.POINT_PUBLISHED,
)  # fmt: skip
AGAIN = "run the command again, which takes a new snapshot"
"""What a sync prints if it could not copy a table, because the table was truncated after each of its snapshots."""
CASES = (
    Case("setup", FaultPoint.SLOT_MADE),
    *(Case("sync", point) for point in FIRST),
    *(Case("sync", point) for point in _TURNS),
    *(Case("sync", point, Kind.JVM) for point in _WITH_JVM),
    *(Case("snapshot", point, Kind.JVM) for point in (FaultPoint.PIECE_COPIED, FaultPoint.COPY_COMMITTED)),
    *(Case("snapshot", point) for point in _COPIES),
    *(Case("repair", point) for point in (FaultPoint.REPAIR_COMMITTING, FaultPoint.REPAIR_COMMITTED)),
    Case("repair", FaultPoint.REPAIR_COMMITTING, Kind.JVM),
    # Files of the log are merged only if a range has several batches, which happens only in follow mode.
    *(Case("follow", point) for point in (FaultPoint.LOG_FILES_REPLACING, FaultPoint.LOG_FILES_REPLACED)),
    *(Case("follow", None, kind) for kind in (Kind.RUN, Kind.JVM, Kind.RUN)),
    *(Case("maintain", point) for point in _UPKEEP),
    Case("maintain", FaultPoint.MIRROR_VACUUMED, Kind.JVM),
)
"""Cases in an order in which a single project can run them."""


@dataclass
class ByProcess(LakeRig):
    folder: Path = Path()
    program: str = PROGRAM
    unmet: list[Case] = field(default_factory=list)
    """Cases whose fault point was never reached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.writers.most_pause = 0.3
        spark = {"master": "local[2]", "spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"}
        self.project = Project(
            self.folder,
            {
                "PGCDC_SOURCE": self.database.conninfo, "PGCDC_SLOT": self.slot, "PGCDC_LAKE": self.lake.text,
                "PGCDC_TABLES": '["public.*"]',
                "PGCDC_SPARK": json.dumps(spark), "PGCDC_BATCH_SECONDS": "0.3",
                "PGCDC_RANGE_SECONDS": "5",
                "PGCDC_RETENTION": "0 minutes",
                faultpoints.VARIABLE: str(self.faults.folder),
            },
        )  # fmt: skip
        self.columns = 0

    def prepare(self, case: Case) -> None:
        """Bring the project into the state that the case needs."""
        if case.command != "setup" and not (self.folder / CATALOG_FILE).exists():
            self.project.run("setup")
        first = case.command == "setup" or (case.command == "sync" and case.point in FIRST)
        if not first and not published(self.lake.text):
            self._sync()
        if case.command == "repair" or case.point is FaultPoint.MIRROR_VACUUMED:
            # A repair derives again only changes that were made after the table's last copy. A VACUUM deletes only
            # files that no kept version uses. To give both something to do, change the tables, and sync.
            self._change_in_every_way(case)
            self._sync()

    def _sync(self) -> None:
        """Run sync until it has copied every table. One sync may not be enough: if a random writer truncates a table
        after its snapshot, the table must be copied again."""
        for _ in range(10):
            result = self.project.run("sync", expect=None)
            if result.code == 0:
                return
            assert AGAIN in result.err, f"exit {result.code}\n{result.out}\n{result.err}"
        raise AssertionError(result.err)

    def cycle(self, case: Case) -> None:
        """Run the command, kill it, and check the lake. Try again if the command ended before it could be killed."""
        for _ in range(4):
            started = time.monotonic()
            hit = self._hit(case)
            logger.info("%s %s, %.1f s", case, hit, time.monotonic() - started)
            if hit:
                self.tally.add(LEVEL, case.point, case.kind)
                return
        self.unmet.append(case)

    def _hit(self, case: Case) -> bool:
        self._change_in_every_way(case)
        before = self.moved()
        if case.point is not None:
            self.faults.arm(case.point)
        with self._running(case) as process:
            hit = self._reach(process.pid, case)
            if hit and case.kind is Kind.RUN:
                os.killpg(process.pid, signal.SIGKILL)
            elif hit:
                _kill_jvm(process.pid)
            moved = self.moved() != before
            self.faults.clear()
            if not hit or case.kind is Kind.JVM:
                assert wait_until(lambda: process.poll() is not None, SECONDS), f"{case}: hangs"
                log = (self.folder / "command.log").read_text()
                assert hit or case.command == "follow" or process.returncode == 0 or AGAIN in log, log
                assert "unexpected" not in log, log
        self.look()
        return hit and (case.point is not None or moved)

    @contextmanager
    def _running(self, case: Case) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / "command.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", self.program, *self._arguments(case)], cwd=self.folder, start_new_session=True,
                env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PGCDC_", "DAGSTER_"))}
        return {**clean, **self.project.settings}

    def _arguments(self, case: Case) -> tuple[str, ...]:
        if case.command == "snapshot":
            return "snapshot", "public.u"
        if case.command == "repair":
            first, last = published(self.lake.text)[0][0], published(self.lake.text)[-1][0]
            return "repair", "public.u", "--range", f"{Lsn(first)}..{Lsn(last)}"
        return (case.command,)

    def _change_in_every_way(self, case: Case) -> None:
        """Write, in addition to the random writers, a change for each way in which a mirror is changed: append, merge,
        overwrite, and a new column (only if the case needs it)."""
        self._done("INSERT INTO entry (note) VALUES ('nudge'); UPDATE u SET v = v + 1 WHERE a > 30")
        self._done("BEGIN; TRUNCATE wiped; INSERT INTO wiped VALUES (1, 'nudge'); COMMIT")
        if case.point is FaultPoint.MIRROR_WIDENED:
            self.columns += 1
            self.conn.execute(f"ALTER TABLE wide ADD COLUMN c{self.columns} int".encode())
            self.conn.execute(f"INSERT INTO wide (id, c{self.columns}) VALUES ({self.columns}, 1)".encode())

    def _done(self, statements: LiteralString) -> None:
        """Run the statements. Run them again if PostgreSQL cancelled them because of a deadlock with a writer."""
        while True:
            try:
                self.conn.execute(statements)
                return
            except psycopg.errors.DeadlockDetected:
                self.conn.execute("ROLLBACK")

    def _reach(self, pid: int, case: Case) -> bool:
        process, point = psutil.Process(pid), case.point

        def ended() -> bool:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

        if point is None:
            before = self.moved()
            wait_until(lambda: ended() or sum(self.moved()) > sum(before) + 3, SECONDS)
            time.sleep(self.chance.uniform(0, 3))
            return not ended()
        assert wait_until(lambda: ended() or self.faults.reached(point) is not None, SECONDS), f"{case}: hangs"
        return self.faults.reached(point) is not None

    def assert_recorded(self) -> None:
        """Check Dagster's records: the ranges are contiguous, and no killed run has the status STARTED."""
        with dg.DagsterInstance.from_config(str(self.folder / ".dagster")) as instance:
            spans = [LsnRange.from_key(key) for key in instance.get_dynamic_partitions("pgcdc_lsn_ranges")]
            assert spans
            assert all(left.end == right.start for left, right in pairwise(spans)), spans
            assert len(set(spans)) == len(spans)
            started = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
            assert not started


def _kill_jvm(pid: int) -> None:
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name() == "java":
                child.kill()
