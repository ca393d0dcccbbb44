"""Measures the time from a row's commit until the row is readable. Marked rows are written at random times under a
steady load, during one sync in follow mode."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from bench.project import engine, project
from bench.record import LATENCY, Record, Run
from bench.source import database, run
from bench.usage import Usage, usage
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo import shop
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.demo.shop import Generator
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.settings import Settings
from pgcdc_assets.store import storage

ROWS_PER_SECOND = 1000
_EACH = 20
"""Rows per transaction: half updates, half inserts."""
_BETWEEN = 0.5
"""Seconds between two marks, on average."""
_QUIET = 1.5
"""Seconds before each mark of :meth:`Latency.at_rest` in which nothing is committed: more than ``batch_seconds``."""
MARK = "INSERT INTO history (tid) VALUES (-1)"
WARM_UP = 20.0
"""Seconds before the first mark, because the first turns compile their statements."""


@dataclass(frozen=True)
class Mark:
    """A committed row: the time of its commit, and an LSN above that commit."""

    at: float
    lsn: Lsn


@dataclass
class Latency:
    server: EmbeddedServer
    spark: SparkSession
    folder: Path
    record: Record

    def two_tables(self, seconds: float, **given: Any) -> None:
        """Measure 1,000 rows a second in two tables: updates of one table, inserts into the other. ``given``:
        settings."""
        what = "commit → visible, 2 tables" + (", in a bucket" if given else "")
        with database(self.server, "latency", ("accounts", "history")) as conninfo:
            self._measure(what, conninfo, lambda stop: steady(conninfo, stop), seconds, MARK, **given)

    def at_rest(self, seconds: float) -> None:
        """Measure marks without any other load, each after a quiet time."""
        with database(self.server, "latency_rest", ("accounts", "history")) as conninfo:
            self._measure("commit → visible, at rest", conninfo, lambda stop: None, seconds, MARK, quiet=_QUIET)

    def small_transactions(self, seconds: float) -> None:
        """Measure 100 transactions a second, each with an update of one table and an insert into another."""
        with database(self.server, "latency_small", ("accounts", "history")) as conninfo:
            self._measure("commit → visible, 100 tx/s", conninfo, lambda stop: steady(conninfo, stop, each=2, rows=200),
                          seconds, MARK)  # fmt: skip

    def whole_shop(self, seconds: float) -> None:
        """Measure all tables of the sample shop under its own traffic: 200 transactions with about 1,000 rows a
        second."""
        with database(self.server, "latency_shop", ()) as conninfo:
            shop.ensure(conninfo)

            def traffic(stop: threading.Event) -> None:
                generator = Generator(conninfo, rate=200)
                thread = threading.Thread(target=generator.run, daemon=True)
                thread.start()
                stop.wait()
                generator.stop()
                thread.join()

            self._measure("commit → visible, sample shop", conninfo, traffic, seconds,
                          "INSERT INTO events (kind, payload) VALUES ('mark', '{}')")  # fmt: skip

    def _measure(
        self, what: str, conninfo: str, load: Callable[[threading.Event], None], seconds: float, statement: str, *,
        quiet: float = 0.0, **given: Any,
    ) -> None:  # fmt: skip
        name = conninfo.rsplit("=", 1)[-1]
        with project(self.folder / name, conninfo, f"{name}_main", **given) as settings:
            ours = engine(settings, self.spark)
            ours.sync(Bounds())
            ends = Bounds(follow=True)
            with usage(self.server) as used, beside(load), following(ours, ends):
                marks = warm_marks(settings, conninfo, statement, seconds, quiet)
            self.record.add(told(what, settings, marks, seconds, used))


def warm_marks(settings: Settings, conninfo: str, statement: str, seconds: float, quiet: float = 0.0) -> list[Mark]:
    """Write marks for this many seconds, after the first turns. Returns when a point contains all of them."""
    time.sleep(WARM_UP)
    marks = list(random_marks(conninfo, statement, seconds, quiet))
    published(settings, marks[-1].lsn)
    return marks


def told(what: str, settings: Settings, marks: list[Mark], seconds: float, used: Usage) -> Run:
    """Summarizes how long each mark took until it was durable in the log, and until a published point contained it."""
    points = publications(settings)
    batches = log_commits(settings)
    curve = [(mark.at - marks[0].at, first(points, mark) - mark.at) for mark in marks]
    visible = sorted(lag for _, lag in curve)
    durable = sorted(first(batches, mark) - mark.at for mark in marks)
    more = {
        "median s": statistics.median(visible), "p99 s": visible[int(len(visible) * 0.99)],
        "most s": visible[-1], "turns a second": _rate(points), "durable: median s": statistics.median(durable),
        "durable: p99 s": durable[int(len(durable) * 0.99)],
    }  # fmt: skip
    return Run(LATENCY, what, seconds, len(marks), 0, used.cpu, used.peak, more, curve)


def _rate(points: list[tuple[Lsn, float]]) -> float:
    return (len(points) - 1) / (points[-1][1] - points[0][1])


def publications(settings: Settings) -> list[tuple[Lsn, float]]:
    """The LSN of each consistent point, and the time when it was published."""
    return [(point.replay_lsn, point.at.timestamp()) for point in ConsistentPoints(settings.layout).all()]


def log_commits(settings: Settings) -> list[tuple[Lsn, float]]:
    """The log's position after each Delta commit of the receiver, and the time of this Delta commit."""
    log = ChangeLog(settings.layout).open()
    app_id, found = log.identity.app_id(), []
    folder = log.path / "_delta_log"
    for entry in storage.list_after(folder):
        if entry.name.endswith(".json"):
            actions = [json.loads(line) for line in storage.read(folder / entry.name).splitlines()]
            moved = [action["txn"]["version"] for action in actions if action.get("txn", {}).get("appId") == app_id]
            found += [(Lsn(version), entry.written) for version in moved]
    return sorted(found)


def first(landed: list[tuple[Lsn, float]], mark: Mark) -> float:
    """The time of the first entry of ``landed`` whose LSN includes the mark."""
    return min(at for lsn, at in landed if lsn >= mark.lsn)


def steady(conninfo: str, stop: threading.Event, *, each: int = _EACH, rows: int = ROWS_PER_SECOND) -> None:
    """Write transactions of ``each`` rows, half updates and half inserts, with ``rows`` rows a second in total."""
    chance = random.Random(1)
    with psycopg.connect(conninfo, autocommit=True) as conn:
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            due += each / rows
            ids = [chance.randrange(1, 100_000) for _ in range(each // 2)]
            with conn.transaction():
                conn.execute("UPDATE accounts SET abalance = abalance + 1 WHERE aid = ANY(%s)", [ids])
                conn.execute("INSERT INTO history (aid, delta, mtime) SELECT unnest(%s::int[]), 1, now()", [ids])


def random_marks(conninfo: str, statement: str, seconds: float, quiet: float = 0.0) -> Iterator[Mark]:
    chance, end = random.Random(2), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(quiet + chance.expovariate(1 / _BETWEEN))
        yield mark(conninfo, statement)


def mark(conninfo: str, statement: str) -> Mark:
    (lsn,) = run(conninfo, statement, "SELECT pg_current_wal_insert_lsn()")[0]
    # The position is read after the commit has returned. WAL that other sessions wrote since then may lie between.
    return Mark(time.time(), Lsn.parse(str(lsn)))


def published(settings: Settings, lsn: Lsn, seconds: float = 120) -> None:
    """Wait until a published point is at or above ``lsn``."""
    points = ConsistentPoints(settings.layout)

    def seen() -> bool:
        newest = points.newest()
        return newest is not None and newest.replay_lsn >= lsn

    waited(seen, f"nothing was published at or above {lsn}", seconds)


def waited(for_: Callable[[], bool], otherwise: str, seconds: float = 120) -> None:
    """Wait until ``for_`` returns True. After ``seconds``, raise TimeoutError with the text ``otherwise``."""
    deadline = time.monotonic() + seconds
    while not for_():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.2)


@contextmanager
def beside(load: Callable[[threading.Event], None]) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=load, args=(stop,), daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


@contextmanager
def following(engine: Engine, ends: Bounds) -> Iterator[None]:
    thread = threading.Thread(target=engine.sync, args=(ends,), daemon=True)
    thread.start()
    yield
    ends.stop.set()
    thread.join()
