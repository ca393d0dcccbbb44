"""Rates of receiving, end to end and copying, side by side in one run with pg_recvlogical and COPY.

    python bench/measure.py [--scale 0.1] [--repeat 3] [--out bench/results.json]

W1: 200,000 transactions of one update and one insert. W2: 1,000,000 inserts of 12 columns, 1,000 a
transaction. W3: one transaction of 2,000,000 rows. W4: copy of 5,000,000 rows of 12 columns. ``--scale``
multiplies all of them. Floor and ours read the same WAL over the same kind of connection; Spark is warm;
end to end is clocked from the start of receiving to the last row of consistent_points.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.observer import Silent
from pgcdc_assets.flow.sync import Bounds
from pgcdc_assets.lake.session import spark_session
from pgcdc_assets.settings import CATALOG_FILE, Settings
from pgcdc_assets.source.setup import setup

HERE = Path(__file__).parent


@dataclass
class Bench:
    server: EmbeddedServer
    scale: float
    repeat: int
    spark: SparkSession
    runs: list[dict[str, Any]] = field(default_factory=list)

    def rows(self, full: int) -> int:
        return int(full * self.scale)

    def record(self, workload: str, what: str, seconds: float, rows: int) -> None:
        run = {"workload": workload, "what": what, "seconds": round(seconds, 3), "rows": rows}
        self.runs.append(run)
        print(f"{workload}  {what:<28} {seconds:8.2f} s  {rows / seconds:12,.0f} rows/s", flush=True)

    def program(self, name: str, *args: str) -> float:
        started = time.monotonic()
        subprocess.run([str(self.server.bin / name), *args], check=True, capture_output=True)
        return time.monotonic() - started


@contextmanager
def project(folder: Path) -> Iterator[None]:
    """Settings and the saved catalog belong to the working directory."""
    before = Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def stream(bench: Bench, workload: str, tables: str, load: Callable[[str], int], folder: Path) -> None:
    """Floor, receive alone and end to end, each on the same backlog, once per repetition."""
    for turn in range(bench.repeat):
        database = f"{workload.lower()}_{turn}"
        conninfo = made(bench.server, database, tables)
        with project(folder / database):
            settings = Settings(source=conninfo, slot=f"{database}_main", range_bytes=64 << 20)
            setup(settings, conninfo).catalog.save(CATALOG_FILE)
            engine = Engine(settings, conninfo, Silent(), lambda: bench.spark, "bench")
            engine.sync(Bounds())
            with psycopg.connect(conninfo, autocommit=True) as conn:
                conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (f"{database}_floor",))
                rows = load(conninfo)
                conn.execute("CHECKPOINT")
                end = Lsn.parse(str(conn.execute("SELECT pg_current_wal_flush_lsn()").fetchall()[0][0]))
                floor(bench, workload, conninfo, f"{database}_floor", end, rows)
                conn.execute("SELECT pg_drop_replication_slot(%s)", (f"{database}_floor",))
            clock = Landing()
            engine = Engine(settings, conninfo, clock, lambda: bench.spark, "bench")
            started = time.monotonic()
            engine.sync(Bounds(until=end))
            bench.record(workload, "ours, end to end", time.monotonic() - started, rows)
            bench.record(workload, "ours, into the log", clock.landed - started, rows)


class Landing(Silent):
    """Notes when the receiver had everything in the log."""

    landed = 0.0

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        if stage == "receive":
            self.landed = time.monotonic()


def floor(bench: Bench, workload: str, conninfo: str, slot: str, end: Lsn, rows: int) -> None:
    seconds = bench.program(
        "pg_recvlogical", "-d", conninfo, "-S", slot, "--start", "--no-loop", f"--endpos={end}", "-f", "/dev/null",
        "-o", "proto_version=1", "-o", "publication_names=pgcdc",
    )  # fmt: skip
    bench.record(workload, "pg_recvlogical to nothing", seconds, rows)


def made(server: EmbeddedServer, database: str, tables: str) -> str:
    with psycopg.connect(server.conninfo_of("postgres"), autocommit=True) as conn:
        conn.execute(f'CREATE DATABASE "{database}"')  # type: ignore[arg-type]
    conninfo = server.conninfo_of(database)
    with psycopg.connect(conninfo, autocommit=True) as conn:
        conn.execute((HERE / "workloads.sql").read_text())  # type: ignore[arg-type]
        for name in {"accounts", "history", "wide", "small", "snap"} - set(tables.split()):
            conn.execute(f"DROP TABLE {name} CASCADE")  # type: ignore[arg-type]
    return conninfo


def copy(bench: Bench, folder: Path) -> None:
    rows = bench.rows(5_000_000)
    conninfo = made(bench.server, "w4", "wide snap")
    with psycopg.connect(conninfo, autocommit=True) as conn:
        conn.execute("INSERT INTO snap SELECT * FROM widerow(1, %s)", (rows,))
        conn.execute("DROP TABLE wide CASCADE")
        conn.execute("VACUUM (ANALYZE, FREEZE) snap")
    for turn in range(bench.repeat):
        seconds = bench.program("psql", "-X", "-q", conninfo, "-c", r"\copy snap to '/dev/null'")
        bench.record("W4", "COPY text by psql", seconds, rows)
        with project(folder / f"w4_{turn}"):
            settings = Settings(source=conninfo, slot=f"w4_{turn}")
            setup(settings, conninfo).catalog.save(CATALOG_FILE)
            engine = Engine(settings, conninfo, Silent(), lambda: bench.spark, "bench")
            report = engine.sync(Bounds())
            bench.record("W4", "ours, copy", report.copied[0].seconds, rows)
            bench.record("W4", "ours, whole sync", report.seconds, rows)


def summary(runs: list[dict[str, Any]]) -> list[str]:
    medians: dict[tuple[str, str], float] = {}
    for workload, what in dict.fromkeys((run["workload"], run["what"]) for run in runs):
        chosen = [run["rows"] / run["seconds"] for run in runs if (run["workload"], run["what"]) == (workload, what)]
        medians[workload, what] = statistics.median(chosen)
    floors = {workload: rate for (workload, what), rate in medians.items() if not what.startswith("ours")}
    return [
        f"{workload}  {what:<28} {rate:12,.0f} rows/s  {rate / floors[workload]:6.2f} of the floor"
        for (workload, what), rate in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workloads", default="W1,W2,W3,W4")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    chosen = set(args.workloads.split(","))
    with tempfile.TemporaryDirectory(prefix="pgcdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        spark = spark_session(Settings())
        with EmbeddedServer(folder / "postgres", settings={"synchronous_commit": "off"}) as server:
            bench = Bench(server, args.scale, args.repeat, spark)
            if "W1" in chosen:
                stream(bench, "W1", "accounts history", lambda c: pgbench(bench, c), folder)
            if "W2" in chosen:
                stream(bench, "W2", "wide", lambda c: run_sql(c, f"CALL w2({bench.rows(10**6)}, 1000)",
                                                              bench.rows(10**6)), folder)  # fmt: skip
            if "W3" in chosen:
                count = bench.rows(2 * 10**6)
                insert = f"INSERT INTO small SELECT g, g % 1000, md5(g::text) FROM generate_series(1, {count}) g"
                stream(bench, "W3", "small", lambda c: run_sql(c, insert, count), folder)
            if "W4" in chosen:
                copy(bench, folder)
        spark.stop()
    lines = summary(bench.runs)
    print("\nMedians\n" + "\n".join(lines))
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"Largest child process: {children / 1024:.0f} MiB")
    if args.out:
        args.out.write_text(json.dumps({"scale": args.scale, "runs": bench.runs}, indent=1))


def pgbench(bench: Bench, conninfo: str) -> int:
    transactions = bench.rows(200_000) // 4
    bench.program("pgbench", "-n", "-f", str(HERE / "w1.pgbench"), "--random-seed=42", "-c", "4", "-j", "2",
                  "-t", str(transactions), "-d", conninfo)  # fmt: skip
    return transactions * 4 * 2


def run_sql(conninfo: str, statement: str, rows: int) -> int:
    with psycopg.connect(conninfo, autocommit=True) as conn:
        conn.execute(statement)  # type: ignore[arg-type]
    return rows


if __name__ == "__main__":
    main()
