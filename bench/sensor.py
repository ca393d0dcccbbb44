"""Measures the time from commit to readable with only `pgcdc up` running: during a run in follow mode, and with no run
active."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.latency import MARK, Mark, beside, mark, published, steady, told, waited, warm_marks
from bench.project import project
from bench.record import Record
from bench.source import database, flushed
from bench.usage import usage
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow import lock
from pgcdc_assets.settings import Settings

FROM_IDLE = 5
"""Number of marks that are written while no run is active. Each of them takes about 20 s, because the sensor must start
a run."""
_IDLE_SECONDS = 3.0


def by_sensor(server: EmbeddedServer, folder: Path, record: Record, seconds: float, from_idle: int = FROM_IDLE) -> None:
    """Measure under 1,000 rows a second in two tables, and then with one row at a time, each written while no run is
    active."""
    with (
        database(server, "latency_up", ("accounts", "history")) as conninfo,
        project(folder / "latency_up", conninfo, "latency_up_main", idle_seconds=_IDLE_SECONDS) as settings,
        _served(settings),
    ):
        published(settings, flushed(conninfo))
        with usage(server) as used, beside(lambda stop: steady(conninfo, stop)):
            marks = warm_marks(settings, conninfo, MARK, seconds)
        record.add(told("commit → visible, 2 tables, by the sensor", settings, marks, seconds, used))
        started = time.monotonic()
        with usage(server) as used:
            marks = list(_one_by_one(conninfo, settings, from_idle))
        record.add(told("commit → visible, by the sensor from idle", settings, marks, time.monotonic() - started, used))


def _one_by_one(conninfo: str, settings: Settings, count: int) -> Iterator[Mark]:
    chance = random.Random(3)
    for _ in range(count):
        waited(lambda: lock.holder(settings.layout) is None, "the run does not end")
        # A random time between two ticks of the sensor.
        time.sleep(chance.uniform(0, settings.sensor_seconds))
        made = mark(conninfo, MARK)
        published(settings, made.lsn)
        yield made


@contextmanager
def _served(settings: Settings) -> Iterator[None]:
    given = {"SOURCE": settings.source, "SLOT": settings.slot, "IDLE_SECONDS": settings.idle_seconds}
    with Path("up.log").open("wb") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("pgcdc")), "up"], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env={**os.environ, **{f"PGCDC_{name}": str(value) for name, value in given.items()}},
        )  # fmt: skip
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
