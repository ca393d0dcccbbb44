"""A project with a running ``pgcdc up``, and what its Dagster instance has recorded. Several tests share the project,
so the command is started only once."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import psycopg

from tests.end_to_end.command import Project
from tests.fix_postgres import Database
from tests.servers import held_port
from tests.waiting import wait_for

SHOP = """
CREATE TABLE public.customers (id int PRIMARY KEY, name text NOT NULL, credit numeric(12,2));
CREATE TABLE public.orders (id int PRIMARY KEY, customer_id int NOT NULL, status text NOT NULL, placed_at timestamptz);
CREATE TABLE public.products (sku text PRIMARY KEY, name text NOT NULL, price numeric(10,2) NOT NULL);
INSERT INTO public.customers SELECT g, 'Customer ' || g, g / 8.0 FROM generate_series(1, 200) g;
INSERT INTO public.orders SELECT g, 1 + g % 200, 'open', timestamptz '2025-01-01 00:00Z' + g * interval '1 h'
  FROM generate_series(1, 1000) g;
INSERT INTO public.products SELECT 'P-' || g, 'Product ' || g, g + 0.99 FROM generate_series(1, 50) g;
"""
TABLES = ("customers", "orders", "products")

_MARK = "UP_TEST_MARK"
"""An environment variable. Its value marks the command and all processes that the command starts, even if they have
another session or another parent process."""


@dataclass(frozen=True)
class Served:
    project: Project
    database: Database
    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def words(self) -> str:
        """The output of the command and of Dagster, for failure messages."""
        log = self.project.folder / ".pgcdc" / "up.log"
        return self.project.log("up") + (log.read_text()[-5000:] if log.exists() else "")

    def connect(self) -> psycopg.Connection[Any]:
        return self.database.connect()

    @contextmanager
    def instance(self) -> Iterator[dg.DagsterInstance]:
        with dg.DagsterInstance.from_config(str(self.project.folder / ".dagster")) as instance:
            yield instance

    def materialised(self, *key: str) -> dict[str, dict[str, Any]]:
        """The metadata of the newest materialisation of each partition, in the order of the partition keys."""
        with self.instance() as instance:
            records = instance.fetch_materializations(dg.AssetKey(["pgcdc", *key]), limit=500).records
        found: dict[str, dict[str, Any]] = {}
        for record in reversed(records):
            event = record.asset_materialization
            assert event is not None
            found[str(event.partition)] = {name: value.value for name, value in event.metadata.items()}
        return dict(sorted(found.items()))

    def ranges(self) -> list[str]:
        """The keys of the LSN ranges that were applied to all mirrors, in LSN order."""
        return list(self.materialised("consistent_points"))

    def follow(self, statement: str) -> str:
        """Commits a change, and waits until a run that the sensor has launched has applied the change. Returns the key
        of the LSN range that contains the change. Tests change rows of the source only through this function. So the
        first new range with a transaction contains this change."""
        before = set(self.ranges())
        with self.connect() as conn:
            conn.execute(statement)
        self.wait(lambda: bool(self._filled() - before), "the change's range")
        return min(self._filled() - before)

    def _filled(self) -> set[str]:
        return {key for key, found in self.materialised("consistent_points").items() if found["transactions"]}

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """Sends a GraphQL query, as Dagster's pages do."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
        assert "errors" not in found, found["errors"]
        return dict(found["data"])

    def started_by_hand(self) -> dict[str, str]:
        """The status, by id, of the runs and backfills that were launched in the UI."""
        with self.instance() as instance:
            found = {fill.backfill_id: fill.status.value for fill in instance.get_backfills()}
            for run in instance.get_runs(dg.RunsFilter(job_name="__ASSET_JOB")):
                found[run.run_id] = run.status.value
        return found

    def marked(self) -> list[psutil.Process]:
        return processes(self.process_mark)

    @property
    def process_mark(self) -> str:
        return self.project.settings[_MARK]

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 150) -> None:
        try:
            wait_for(lambda: condition() or self.process.poll() is not None, seconds, what)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.words}") from None
        assert self.process.poll() is None, self.words


def processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def settings_of(database: Database) -> dict[str, str]:
    return {
        "PGCDC_SOURCE": database.conninfo,
        "PGCDC_SLOT": f"s_{database.name}",
        "PGCDC_RANGE_SECONDS": "2",
        "PGCDC_IDLE_SECONDS": "5",
        "PGCDC_SENSOR_SECONDS": "2",
        "PGCDC_SPARK": '{"master": "local[2]", "spark.driver.memory": "1g"}',
        _MARK: uuid.uuid4().hex,
    }


@contextmanager
def serve(database: Database, folder: Path) -> Iterator[Served]:
    """Creates the tables, starts ``pgcdc up``, and waits for its UI. At the end of the block, all processes of ``pgcdc
    up`` are ended."""
    with database.connect() as conn:
        conn.execute(SHOP)
    project = Project(folder, settings_of(database))
    port = held_port()
    with project.running("up", "--port", str(port)) as process:
        served = Served(project, database, process, port)
        try:
            served.wait(lambda: served.url in project.log("up"), "Dagster's UI", seconds=120)
            yield served
        finally:
            end_all(served)


def end_all(served: Served) -> None:
    """Ends the command with SIGTERM, so that the log is complete, then kills the remaining processes."""
    if served.process.poll() is None:
        served.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            served.process.wait(60)
    for process in served.marked():
        with suppress(psutil.Error):
            process.kill()
