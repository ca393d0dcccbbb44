"""``python -m bench``: measures the chosen workloads, saves every single measurement, and draws the rates.

python -m bench --scale 1 --repeat 5 --workloads W1,W2,W3,W4 --out build/bench
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from bench import bucket, copies, costs, day, inprogress, latency, scale, sensor, streams
from bench.plot import draw, draw_curves, draw_lag
from bench.record import LATENCY, Record
from bench.source import WORKLOADS
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.settings import Settings
from pgcdc_assets.spark.session import spark_session

SERVER = {"synchronous_commit": "off", "max_wal_size": "8GB", "checkpoint_timeout": "1h", "autovacuum": "off"}
"""Settings that make writing a backlog fast, and keep the server from starting a checkpoint during a measurement."""

FLOORS = {**dict.fromkeys(WORKLOADS, streams.FLOOR), "W4": copies.FLOOR, inprogress.WORKLOAD: inprogress.FLOOR}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description="Rates side by side with PostgreSQL's own tools")
    parser.add_argument("--scale", type=float, default=1.0, help="of the workloads' sizes")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--workloads",
        default="W1,W2,W3,W4",
        help="and W6: in progress; B: in a bucket; L: latency; S1 to S6: growth; S7 to S10: costs",
    )
    parser.add_argument("--seconds", type=float, default=120, help="of latency")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    chosen = args.workloads.split(",")
    record = Record(args.scale, FLOORS)
    with tempfile.TemporaryDirectory(prefix="pgcdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server may run as another user
        jar = f"{copies.jdbc_jar()}" if "W4" in chosen else ""
        spark = spark_session(Settings(spark={"spark.jars": jar} if jar else {}))
        source = EmbeddedServer(folder / "source", settings={**SERVER, "listen_addresses": "127.0.0.1"})
        target = EmbeddedServer(folder / "target", settings=SERVER)
        with source, target:
            rates(record, chosen, args.repeat, source, target, spark, folder)
            if bucket.WORKLOAD in chosen:
                with bucket.bucket() as url:
                    bucket.Buckets(source, spark, folder, record, url).turns(args.repeat, args.seconds)
            if LATENCY in chosen:
                measured = latency.Latency(source, spark, folder, record)
                measured.at_rest(args.seconds)
                measured.small_transactions(args.seconds)
                measured.two_tables(args.seconds)
                measured.whole_shop(args.seconds)
                sensor.by_sensor(source, folder, record, args.seconds)
            growth = scale.Scale(source, spark, folder, record)
            other = costs.Costs(source, spark, folder, record)
            measures: dict[str, Callable[[], None]] = {
                "S1": growth.tables,
                "S2": growth.mirrors,
                "S3": growth.batches,
                "S4": growth.ranges,
                "S5": growth.versions,
                "S6": day.Day(source, spark, folder, record).hours,
                "S7": other.events,
                "S8": other.keys,
                "S9": other.values,
                "S10": other.starts,
            }
            for name in chosen:
                if name in measures:
                    measures[name]()
        spark.stop()
    record.save(args.out / "runs.json")
    table = "\n".join(record.table())
    (args.out / "table.md").write_text(table + "\n")
    draw(record, args.out / "rates.svg")
    draw_curves(record, args.out / "retained.svg")
    draw_lag(record, args.out / "lag.svg")
    print(f"\n{table}\n\n{args.out}")


def rates(
    record: Record, chosen: list[str], repeat: int, source: EmbeddedServer, target: EmbeddedServer,
    spark: SparkSession, folder: Path,
) -> None:  # fmt: skip
    """Measure the rates. Before that, each workload runs once at a hundredth of its size and is not recorded, so that
    Spark, the servers and the page cache are warm."""
    warm = Record(record.scale / 100, record.floors)
    bench = streams.Streams(source, target, spark, folder, warm)
    for number, workload in enumerate(WORKLOADS.values()):
        bench.turn(workload, 90 + number)
    bench.record = record
    for number in range(repeat):
        for name in chosen:
            if name in WORKLOADS:
                bench.turn(WORKLOADS[name], number)
    if "W4" in chosen:
        copies.Copies(source, spark, folder, record).turns(repeat)
    if inprogress.WORKLOAD in chosen:
        inprogress.InProgress(source, spark, folder, record).turns(repeat)


if __name__ == "__main__":
    main()
