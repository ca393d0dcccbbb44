"""Measures how costs grow with the numbers of tables, rows of a mirror, batches not yet applied, ranges, and past
turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dagster as dg
from pyspark.sql import SparkSession

from bench.project import engine, project
from bench.record import Record, Run
from bench.source import database, flushed, run
from bench.usage import usage
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs.keys import Names
from pgcdc_assets.defs.partitions import RangeRegister
from pgcdc_assets.delta.commit import commit_files
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.points.points import ConsistentPoints

TABLES = (10, 100, 500)
MIRROR_ROWS = (1_000_000, 10_000_000)
BATCHES = (1, 10, 100)
RANGES = (100, 1_000, 10_000)
VERSIONS = (100, 1_000, 10_000)
CHANGING = 10
UPDATES = 10_000
TURNS = 3
"""Turns of each size. All are recorded. The first turn also includes what is read once per process."""


@dataclass
class Scale:
    server: EmbeddedServer
    spark: SparkSession
    folder: Path
    record: Record

    def tables(self, counts: Sequence[int] = TABLES) -> None:
        """Measure turns with ``count`` tables, of which ten change, each by one row."""
        for count in counts:
            with database(self.server, f"tables_{count}", ()) as conninfo:
                run(conninfo, *(f"CREATE TABLE t{n} (id int PRIMARY KEY, v text)" for n in range(count)))
                changing = [n * count // CHANGING for n in range(CHANGING)]
                self._turns("S1", f"10 of {count} tables change", conninfo, CHANGING, partial(_one_row_each, changing))

    def mirrors(self, sizes: Sequence[int] = MIRROR_ROWS) -> None:
        """Measure turns of 10,000 updates that are spread evenly over a mirror of ``size`` rows."""
        for size in sizes:
            with database(self.server, f"mirror_{size}", ("small",)) as conninfo:
                run(conninfo, f"INSERT INTO small SELECT g, g % 1000, md5(g::text) FROM generate_series(1, {size}) g")
                self._turns("S2", f"{UPDATES:,} updates of {size:,} rows", conninfo, UPDATES,
                            partial(_scattered, size // UPDATES))  # fmt: skip

    def batches(self, counts: Sequence[int] = BATCHES) -> None:
        """Measure one turn that applies ``count`` batches of the log, each with 100 rows."""
        for count in counts:
            with database(self.server, f"batches_{count}", ("small",)) as conninfo:
                self._turns("S3", f"{count} batches wait", conninfo, count * 100, partial(_transactions, count),
                            batch_bytes=1)  # fmt: skip

    def ranges(self, counts: Sequence[int] = RANGES) -> None:
        """Measure the Dagster calls of the register for closing one more range when ``count`` ranges are registered."""
        names = Names("pgcdc")
        for count in counts:
            with tempfile.TemporaryDirectory(dir=self.folder) as name, dg.DagsterInstance.local_temp(name) as instance:
                spans = [LsnRange(Lsn(number), Lsn(number + 1)) for number in range(1, count + 1)]
                instance.add_dynamic_partitions(str(names.lsn_ranges.name), [span.key for span in spans])
                for turn in range(TURNS):
                    started = time.monotonic()
                    register = RangeRegister(instance, names)
                    register.prune(Lsn(0), Lsn(count * 2))
                    register.add(LsnRange(Lsn(count + turn + 1), Lsn(count + turn + 2)))
                    self.record.add(Run("S4", f"{count:,} ranges registered", time.monotonic() - started, 1))

    def versions(self, counts: Sequence[int] = VERSIONS) -> None:
        """Measure a turn after ``count`` earlier turns, each of which made a version of the mirror and a point. Three
        hours have 10,000 turns."""
        for count in counts:
            with database(self.server, f"versions_{count}", ("small",)) as conninfo:
                run(conninfo, "INSERT INTO small SELECT g, 0, 'x' FROM generate_series(1, 1000) g")
                self._turns("S5", f"{count:,} turns before", conninfo, 1, _one_update, age=count)

    def _turns(
        self, workload: str, what: str, conninfo: str, rows: int, statements: Callable[[int], list[str]], *,
        batch_bytes: int = 32 << 20, age: int = 0,
    ) -> None:  # fmt: skip
        name = conninfo.rsplit("=", 1)[-1]
        with project(self.folder / name, conninfo, f"{name}_main", batch_bytes=batch_bytes) as settings:
            ours = engine(settings, self.spark)
            first = ours.sync(Bounds())
            self.record.add(Run(workload, f"{what}: first copy", first.seconds, max(rows, 1)))
            _grow_old(settings.layout, age)
            for turn in range(TURNS):
                run(conninfo, *statements(turn))
                end = flushed(conninfo)
                with usage(self.server) as used:
                    report = ours.sync(Bounds(until=end))
                self.record.add(Run(workload, what, report.seconds, rows, 0, used.cpu, used.peak))


def _grow_old(layout: Layout, turns: int) -> None:
    """Make the Delta commits and points that this many turns would make, but without rows."""
    points, log = ConsistentPoints(layout), DeltaLog(layout.mirror(TableName("public", "small")))
    for _ in range(turns):
        newest, mirror = points.newest(), log.newest()
        assert newest is not None
        assert mirror is not None
        versions = {name: commit_files(mirror, [], "append", {}) for name in newest.tables}
        points.publish(newest.replay_lsn, versions, newest.positions)


def _one_update(turn: int) -> list[str]:
    return [f"UPDATE small SET v = 'turn {turn}' WHERE id = {turn + 1}"]


def _one_row_each(tables: Sequence[int], turn: int) -> list[str]:
    return [f"INSERT INTO t{number} VALUES ({turn}, 'x')" for number in tables]


def _scattered(step: int, turn: int) -> list[str]:
    return [f"UPDATE small SET v = 'turn {turn}' WHERE id % {step} = {turn}"]


def _transactions(count: int, turn: int) -> list[str]:
    first = turn * 1_000_000
    return [
        f"INSERT INTO small SELECT {first + number * 100} + g, 0, 'x' FROM generate_series(1, 100) g"
        for number in range(count)
    ]
