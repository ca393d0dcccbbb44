"""Whole syncs in this process are crashed at every step that writes feeds, mirrors or points. Every published point is
compared with the source."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core import faultpoints
from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.mirror.delta.compaction import Compaction
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup
from tests.crash.faults import ANY_TIME, Faults, Kind, Tally, kill, wait_until
from tests.crash.lakes import TABLES, LakeRig, work
from tests.crash.proxy import Proxy
from tests.fix_postgres import fresh_database
from tests.flow.rig import children_running
from tests.projectfiles import CATALOG_FILE

pytestmark = pytest.mark.spark

logger = logging.getLogger(__name__)

LEVEL = "over the whole path in one process"
ROUND = 20
_stand = faultpoints._stop
PATIENCE = 45.0
"""Seconds to wait for a fault point that a sync might not reach. The next cycle (a sync and its crash) then selects
another point."""
SECONDS = 400.0
"""The longest wait for anything, on a busy machine."""
RECEIVING = (FaultPoint.BATCH_COMMITTING, FaultPoint.BATCH_DURABLE, FaultPoint.BATCH_CONFIRMED)
COPYING = (
    FaultPoint.COPY_SLOT_MADE, FaultPoint.SNAPSHOT_EXPORTED, FaultPoint.STATE_WRITTEN, FaultPoint.PIECE_COPIED,
    FaultPoint.COPY_COMMITTING, FaultPoint.COPY_COMMITTED,
)  # fmt: skip
APPLYING = (
    FaultPoint.FEED_FILES_WRITTEN, FaultPoint.FEED_COMMITTING, FaultPoint.FEED_COMMITTED, FaultPoint.COLLAPSED,
    FaultPoint.LINK_COMMITTING, FaultPoint.LINK_COMMITTED, FaultPoint.OVERWRITE_COMMITTING,
    FaultPoint.OVERWRITE_COMMITTED, FaultPoint.MERGE_COMMITTING, FaultPoint.MERGE_COMMITTED,
    FaultPoint.MIRROR_FILES_WRITTEN, FaultPoint.MIRROR_FILES_COMMITTED,
    FaultPoint.POINT_PUBLISHING, FaultPoint.POINT_PUBLISHED, FaultPoint.LOG_FILES_REPLACING,
    FaultPoint.LOG_FILES_REPLACED,
)  # fmt: skip
IN_WORKERS = (
    FaultPoint.PIECE_COPIED, FaultPoint.FEED_FILES_WRITTEN, FaultPoint.COLLAPSED, FaultPoint.MIRROR_FILES_WRITTEN,
)  # fmt: skip
ALL = (*RECEIVING, *COPYING, *APPLYING, *APPLYING, *[None] * 6)
SURE = (FaultPoint.BATCH_DURABLE, FaultPoint.COPY_COMMITTING, FaultPoint.FEED_COMMITTED, FaultPoint.POINT_PUBLISHED)
"""One fault point of each stage, which every sync reaches."""
FEW = 20
"""With fewer cycles than this, only the fault points in ``SURE`` are selected."""


class Aborted(BaseException):
    """Stops a thread almost like a kill: after the fault point, only ``finally`` blocks are executed."""


class Listening(Silent):
    """Collects what a sync reports about lost connections to the source."""

    def __init__(self) -> None:
        super().__init__()
        self.outages = list[str]()

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        if stage == "source":
            self.outages.append(message)


@dataclass
class InProcess(LakeRig):
    spark: SparkSession | None = None
    points: Sequence[FaultPoint | None] = ALL
    """Each cycle selects one of these fault points at random."""
    aborted: FaultPoint | None = None
    """The fault point at which threads raise :class:`Aborted` as soon as they may continue."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settings = Settings(
            source=self.proxy.conninfo(self.database.conninfo), slot=self.slot, lake=self.lake.text,
            tables=("public.*",), batch_seconds=0.2, range_seconds=2, messages=("*",),
        )  # fmt: skip
        self.observer = Listening()
        assert self.settings.source is not None
        save_catalog(setup(self.settings, self.settings.source).catalog, CATALOG_FILE)

    def sync(self, bounds: Bounds | None = None, copy_anew: Sequence[TableName] = ()) -> None:
        assert self.settings.source is not None
        assert self.spark is not None
        spark = self.spark
        engine = Engine(self.settings, self.settings.source, self.observer, lambda: spark, "crash test")
        engine.sync(bounds or Bounds(), copy_anew=copy_anew)

    def cycle(self) -> bool:
        """Runs a sync, crashes it and checks the lake. Returns whether the crash interrupted a change of the lake."""
        started = time.monotonic()
        point, kind, anew = self._draw()
        # In follow mode, a sync keeps its receiver until the receiver is killed. Without follow mode, a sync often ends
        # before its receiver can be killed.
        bounds = Bounds(follow=kind is Kind.RECEIVER or self.chance.random() < 0.7)
        before = self.moved()
        failures: list[BaseException] = []
        self.observer.outages.clear()
        thread = threading.Thread(target=self._run, args=(bounds, anew, failures))
        thread.start()
        try:
            hit = self._reach(thread, point) and self._inflict(kind, point)
            counts = hit and (point is not None or self.moved() != before)
            if hit and bounds.follow and kind in (Kind.SERVER, Kind.CUT):
                # In follow mode, a sync connects again and continues, unless a new copy was requested.
                assert self._noticed(kind, failures), f"{kind} at {point} went unnoticed"
                time.sleep(self.chance.uniform(0, 5))
            elif hit and bounds.follow:
                # In follow mode, the sync would never end by itself. The crash must end it with an error.
                thread.join(SECONDS)
                assert failures, f"{kind} at {point} went unnoticed"
        finally:
            bounds.stop.set()
            self.faults.clear()
            thread.join(SECONDS)
        self.aborted = None
        assert not thread.is_alive(), "the run hangs"
        typed = (PgcdcError, Aborted) if kind is not Kind.WORKER else BaseException
        assert not failures or isinstance(failures[0], typed), repr(failures[0])
        self.connected_again()
        self.look()
        logger.info("%s %s %s %s, %.1f s", point or ANY_TIME, kind, counts, failures, time.monotonic() - started)
        if counts:
            self.tally.add(LEVEL, point, kind)
        return counts

    def _noticed(self, kind: Kind, failures: list[BaseException]) -> bool:
        """Waits until the sync notices the crash. Cuts the connections again from time to time: a receiver that was
        about to leave its connections for new ones does not notice the first cut."""
        deadline = time.monotonic() + SECONDS
        while not wait_until(lambda: bool(failures or self.observer.outages), 5):
            if time.monotonic() > deadline:
                return False
            if kind is Kind.CUT:
                self.proxy.cut()
        return True

    def stop(self, folder: Path, point: FaultPoint) -> None:
        """Replaces the function that stops a thread at a fault point. When the thread may continue, raises
        :class:`Aborted` if the test aborts the sync at this point."""
        _stand(folder, point)
        if point is self.aborted:
            raise Aborted

    def _draw(self) -> tuple[FaultPoint | None, Kind, list[TableName]]:
        """Select at random the fault point, the kind of crash, and the tables that the sync copies again. Arms the
        point."""
        chance = self.chance
        point = chance.choice(self.points)
        own = Kind.WORKER if point in IN_WORKERS else Kind.ABORT
        kinds = [Kind.RECEIVER, Kind.SERVER, Kind.CUT, *([own] * 2 if point in (*COPYING, *APPLYING) else [])]
        anew = [TableName("public", chance.choice(TABLES).split(".")[1])] if point in COPYING else []
        if point is not None:
            self.faults.arm(point, chance.randrange(2) if point in (*RECEIVING, *APPLYING) else 0)
        if chance.random() < 0.5:
            self.writers.work = work(chance)
        return point, chance.choice(kinds), anew

    def _run(self, bounds: Bounds, anew: list[TableName], failures: list[BaseException]) -> None:
        try:
            self.sync(bounds, anew)
        except BaseException as error:  # noqa: BLE001 - checked by `cycle`
            failures.append(error)

    def _reach(self, thread: threading.Thread, point: FaultPoint | None) -> bool:
        if point is not None:
            wait_until(lambda: not thread.is_alive() or self.faults.reached(point) is not None, PATIENCE)
            return self.faults.reached(point) is not None
        time.sleep(self.chance.uniform(0, 5))
        return thread.is_alive()

    def _inflict(self, kind: Kind, point: FaultPoint | None) -> bool:
        """Makes the crash. Returns False if the receiver, which should be killed, has already ended."""
        if kind is Kind.RECEIVER:
            found = children_running("pgcdc_assets.log.receive.process")
            for pid in found:
                kill(pid)
            self.faults.clear()
            return bool(found)
        if kind is Kind.ABORT:
            self.aborted = point
        elif kind is Kind.WORKER:
            assert point is not None
            kill(self.faults.reached(point) or 0)
        elif kind is Kind.CUT:
            self.proxy.cut()
        else:
            self.server.stop(mode="immediate")
            self.server.start(survive=False)
        self.faults.clear()
        return True


@pytest.fixture
def watched_spark(spark: SparkSession, fault_folder: Path) -> SparkSession:
    """The session's Spark, whose Python workers can stop at fault points."""
    spark.sparkContext.environment[faultpoints.VARIABLE] = str(fault_folder)
    return spark


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.takes(60)
def test_every_published_point_equals_the_source_although_syncs_crash(
    crash_server: EmbeddedServer, faults: Faults, chance: random.Random, cycles: int, tally: Tally,
    watched_spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(DeltaTarget, "compaction", Compaction(look_every=2, most_small=2))
    left = max(cycles // 4, 2)
    while left > 0:
        folder = tmp_path / f"project{left}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        with fresh_database(crash_server) as database, Proxy(crash_server.socket_folder) as proxy, closing(
            InProcess(crash_server, faults, proxy, chance, tally, database, Location.of(folder / "lake"),
                      spark=watched_spark, points=SURE if cycles < FEW else ALL)
        ) as rig:  # fmt: skip
            monkeypatch.setattr(faultpoints, "_stop", rig.stop)
            left -= _round(rig, min(left, ROUND))


def _round(rig: InProcess, cycles: int) -> int:
    counted = tried = 0
    with rig.writers.writing():
        while counted < cycles:
            tried += 1
            assert tried < 4 * cycles + 10, "most crashes interrupted no change"
            counted += rig.cycle()
    rig.sync()
    rig.assert_all_there()
    return counted
