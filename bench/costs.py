"""Measures costs that were once far too high: Dagster's events for tables without changes, keys and values of a large
turn, and imports."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import dagster as dg
import psutil
from pyspark.sql import SparkSession

from bench.project import engine, project
from bench.record import Record, Run
from bench.source import database, flushed, run
from bench.usage import usage
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs.observer import DagsterObserver, Watcher
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.reports import RangeReport, TableTurn
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.settings import Settings

TABLES = (100, 1_000)
CHANGING = 10
CLOSES = 3
KEYED_ROWS, KEY_UPDATES = 10_000_000, 200_000
VALUES, VALUE_TEXTS = 80_000, 160
"""Number of updated rows, and number of md5 texts (32 bytes each) in one value, which is therefore 5 KB."""
TURNS = 3
STARTS = 5
COMMANDS = {
    "pgcdc status": "import sys; from pgcdc_assets.cli.main import run; sys.exit(run(['status']))",
    "first Lake.at()": "from pgcdc_assets.lake.lake import Lake; Lake('lake').at()",
}


@dataclass
class Costs:
    server: EmbeddedServer
    spark: SparkSession
    folder: Path
    record: Record

    def events(self, counts: Sequence[int] = TABLES) -> None:
        """Measure what recording Dagster's events costs: for the copies of ``count`` tables, and for closing a range in
        which ten of the tables changed. Dagster's storage is SQLite, as in a new project."""
        for count in counts:
            with database(self.server, f"events_{count}", ()) as conninfo:
                run(conninfo, *(f"CREATE TABLE t{n} (id int PRIMARY KEY, v text)" for n in range(count)))
                with self._project(conninfo, f"events_{count}") as settings:
                    self._events(settings, [TableName("public", f"t{n}") for n in range(count)])

    def _events(self, settings: Settings, tables: list[TableName]) -> None:
        count, points = len(tables), ConsistentPoints(settings.layout)
        points.publish(Lsn(16), dict.fromkeys(tables, 1), dict.fromkeys(tables, Lsn(16)))

        @dg.op
        def record_all(context: dg.OpExecutionContext) -> None:
            observer = DagsterObserver(context, Replication(settings), Watcher())
            with self._driver(f"{count:,} tables copied", count):
                for table in tables:
                    observer.copied(CopyReport(table, Lsn(16), 50, 4000, 1, 0.1, 1))
            for number in range(1, CLOSES + 1):
                with self._driver(f"a range of {count:,} tables closes", 1):
                    observer.range_closed(_report(number, tables[:CHANGING]))

        @dg.job
        def events() -> None:
            record_all()

        with tempfile.TemporaryDirectory(dir=self.folder) as name, dg.DagsterInstance.local_temp(name) as instance:
            console = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
            events.execute_in_process(run_config=console, instance=instance)

    @contextmanager
    def _driver(self, what: str, rows: int) -> Iterator[None]:
        process = psutil.Process()
        started, cpu, written = time.monotonic(), time.process_time(), process.io_counters().write_chars
        yield
        more = {"written_mb": (process.io_counters().write_chars - written) / 1e6}
        spent = {"driver": time.process_time() - cpu}
        self.record.add(Run("S7", what, time.monotonic() - started, rows, cpu=spent, more=more))

    def keys(self, rows: int = KEYED_ROWS, updates: int = KEY_UPDATES) -> None:
        """Measure turns that update rows in all files of a mirror with random keys."""
        with database(self.server, "keys", ()) as conninfo:
            run(conninfo, "CREATE TABLE keyed (id uuid PRIMARY KEY, n int, v int)",
                f"INSERT INTO keyed SELECT gen_random_uuid(), g, 0 FROM generate_series(1, {rows}) g")  # fmt: skip
            self._turns("S8", f"{updates:,} updates of {rows:,} uuid rows", conninfo, updates,
                        lambda turn: f"UPDATE keyed SET v = v + 1 WHERE n % {rows // updates} = {turn}")  # fmt: skip

    def values(self, rows: int = VALUES, texts: int = VALUE_TEXTS) -> None:
        """Measure transactions that update large values. The interesting result is the memory of a Spark worker."""
        with database(self.server, "large_values", ()) as conninfo:
            run(conninfo, "CREATE TABLE documents (id int PRIMARY KEY, body text)",
                f"INSERT INTO documents SELECT g, '' FROM generate_series(1, {rows}) g")  # fmt: skip
            self._turns("S9", f"{rows:,} updates of {texts * 32:,} bytes", conninfo, rows,
                        lambda turn: f"UPDATE documents SET body = repeat(md5('{turn}' || id), {texts})")  # fmt: skip

    def _turns(self, workload: str, what: str, conninfo: str, rows: int, statement: Callable[[int], str]) -> None:
        with self._project(conninfo, workload) as settings:
            ours = engine(settings, self.spark)
            ours.sync(Bounds())
            for turn in range(TURNS):
                run(conninfo, statement(turn))
                end = flushed(conninfo)
                with usage(self.server) as used:
                    report = ours.sync(Bounds(until=end))
                self.record.add(Run(workload, what, report.seconds, rows, 0, used.cpu, used.peak))

    def starts(self) -> None:
        """Measure new processes that only read a lake with one table."""
        with database(self.server, "starts", ("small",)) as conninfo, self._project(conninfo, "starts") as settings:
            engine(settings, self.spark).sync(Bounds())
            for what, code in COMMANDS.items():
                for _ in range(STARTS):
                    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
                    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
                    after = resource.getrusage(resource.RUSAGE_CHILDREN)
                    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                    self.record.add(Run("S10", what, time.monotonic() - started, 1, cpu={"process": cpu}))

    @contextmanager
    def _project(self, conninfo: str, name: str) -> Iterator[Settings]:
        """A project whose settings are also in the environment, so that code without a Settings object uses them."""
        slot = f"{name.lower()}_main"
        found = {"PGCDC_SOURCE": conninfo, "PGCDC_SLOT": slot}
        with patch.dict(os.environ, found), project(self.folder / name, conninfo, slot) as settings:
            yield settings


def _report(number: int, changed: Sequence[TableName]) -> RangeReport:
    span = LsnRange(Lsn(16 * number), Lsn(16 * number + 16))
    turns = {table: TableTurn(table, span.end, number, 1, 0, 0, {"insert": 1}, 0.1, 0.1) for table in changed}
    return RangeReport(span, 1, {"I": len(changed)}, 1000, span.end, span.end, 0, 0.1, turns, {"apply": 0.1})
