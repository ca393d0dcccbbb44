"""Compares a lake in an object store with a lake in a local folder. The store is S3Proxy on the same cores, so only the
ratios are meaningful."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from bench.latency import Latency
from bench.project import engine, project
from bench.record import Record, Run
from bench.source import WORKLOADS, Workload, database, flushed, make_slot
from bench.streams import receive
from bench.usage import usage
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.settings import Settings
from tests.fix_objects import BUCKET, s3_server

WORKLOAD = "B"
PLACES = ("local", "bucket")


@contextmanager
def bucket() -> Iterator[str]:
    """Runs an S3 server and yields the URL of a bucket. Importing ``tests.fix_objects`` has set the server's port in
    the environment."""
    port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    with tempfile.TemporaryDirectory(prefix="pgcdc-bench-s3-") as name, s3_server(Path(name), port):
        yield f"s3://{BUCKET}"


@dataclass
class Buckets:
    server: EmbeddedServer
    spark: SparkSession
    folder: Path
    record: Record
    url: str

    def turns(self, repeat: int, seconds: float) -> None:
        for number in range(repeat):
            for name in ("W1", "W2"):
                self._turn(WORKLOADS[name], number)
        latency = Latency(self.server, self.spark, self.folder, self.record)
        latency.two_tables(seconds)
        latency.two_tables(seconds, lake=self._fresh())

    def _turn(self, workload: Workload, number: int) -> None:
        """Measure everything once, in an order that changes with ``number``."""
        name = f"b_{workload.name.lower()}_{number}"
        with database(self.server, name, workload.tables) as conninfo, ExitStack() as stack:
            lakes = {"local": {}, "bucket": {"lake": self._fresh()}}
            projects = {}
            for place in PLACES:
                folder, slot = self.folder / f"{name}_{place}", f"{name}_{place}"
                projects[place] = (folder, stack.enter_context(project(folder, conninfo, slot, **lakes[place])))
                engine(projects[place][1], self.spark).sync(Bounds())
            slots = {place: make_slot(conninfo, f"{name}_r_{place}") for place in PLACES}
            rows = workload.load(self.server, conninfo, self.record.scale)
            end = flushed(conninfo)
            ways: list[Callable[[], None]] = []
            for place in PLACES if number % 2 else reversed(PLACES):
                ways.append(partial(self._receive, workload, conninfo, place, slots[place], end, rows))
                ways.append(partial(self._end_to_end, workload, *projects[place], place, end, rows))
            for way in ways:
                way()

    def _fresh(self) -> str:
        return f"{self.url}/{uuid.uuid4().hex}"

    def _receive(self, workload: Workload, conninfo: str, place: str, slot: str, end: Lsn, rows: int) -> None:
        layout = Layout.of(self._fresh() if place == "bucket" else self.folder / slot)
        found = receive(self.server, WORKLOAD, conninfo, layout, slot, end, 1 << 60)
        self.record.add(replace(found, what=f"{workload.name}: receive, {place}", rows=rows))

    def _end_to_end(
        self, workload: Workload, folder: Path, settings: Settings, place: str, end: Lsn, rows: int
    ) -> None:
        os.chdir(folder)
        with usage(self.server) as used:
            report = engine(settings, self.spark).sync(Bounds(until=end))
        newest = ConsistentPoints(settings.layout).newest()
        assert newest is not None
        what = f"{workload.name}: end to end, {place}"
        self.record.add(Run(WORKLOAD, what, report.seconds, rows, 0, used.cpu, used.peak))
