"""Measures the first copy of a table: COPY by psql, our copy, and Spark's own JDBC reader."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from bench.project import engine, project
from bench.record import Record, Run
from bench.source import database, program, run
from bench.usage import usage
from pgcdc_assets.demo.server import PORT, USER, EmbeddedServer
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.spark.jars import Artifact, cached, retrieve

FLOOR = "COPY text by psql"
JDBC = Artifact("org.postgresql", "postgresql", "42.7.8", title="PostgreSQL's JDBC driver", size="1 MB")
PARTITIONS = 4
_COLUMNS = "id, c_int, c_num::text, c_text, c_ts, c_date, c_bool, c_uuid::text, c_json::text, c_f8, c_arr::text, c_vc"
"""A column is read as text if Spark's JDBC reader would map its type to a different type, or cannot map it."""


def jdbc_jar() -> Path:
    folder = cached(f"jars/{JDBC.name}-{JDBC.revision}", _fetch)
    return next(folder.glob("postgresql-*.jar"))


def _fetch(folder: Path) -> None:
    folder.mkdir()
    retrieve(JDBC, folder)


@dataclass
class Copies:
    server: EmbeddedServer
    spark: SparkSession
    folder: Path
    record: Record

    def turns(self, repeat: int, *, jdbc: bool = True) -> None:
        """Measure ``repeat`` times. ``jdbc`` needs a server that listens on TCP, and the driver among Spark's jars."""
        rows = int(5_000_000 * self.record.scale)
        with database(self.server, "w4", ("wide", "snap")) as conninfo:
            run(conninfo, f"INSERT INTO snap SELECT * FROM widerow(1, {rows})", "DROP TABLE wide CASCADE",
                "VACUUM (ANALYZE, FREEZE) snap")  # fmt: skip
            for number in range(repeat):
                ways = [self._floor, self._ours, *([self._jdbc] if jdbc else [])]
                for step in range(len(ways)):
                    ways[(step + number) % len(ways)](conninfo, rows, number)

    def _floor(self, conninfo: str, rows: int, number: int) -> None:
        with usage(self.server) as used:
            seconds = program(self.server, "psql", "-X", "-q", conninfo, "-c", r"\copy snap to '/dev/null'")
        self.record.add(Run("W4", FLOOR, seconds, rows, 0, used.cpu, used.peak))

    def _ours(self, conninfo: str, rows: int, number: int) -> None:
        """Measure our copy of the table (from the snapshot's export to the mirror's Delta commit), and the whole
        sync."""
        with project(self.folder / f"w4_{number}", conninfo, f"w4_{number}") as settings:
            with usage(self.server) as used:
                report = engine(settings, self.spark).sync(Bounds())
            (copy,) = report.copied
            self.record.add(Run("W4", "snapshot copy", copy.seconds, rows, 0, used.cpu, used.peak,
                                {"whole run s": report.seconds}))  # fmt: skip
        run(conninfo, f"SELECT pg_drop_replication_slot('w4_{number}')")

    def _jdbc(self, conninfo: str, rows: int, number: int) -> None:
        target = tempfile.mkdtemp(dir=self.folder)
        options = {
            "url": f"jdbc:postgresql://127.0.0.1:{PORT}/w4", "user": USER, "driver": "org.postgresql.Driver",
            "dbtable": f"(SELECT {_COLUMNS} FROM snap) s", "fetchsize": "10000", "partitionColumn": "id",
            "lowerBound": "1", "upperBound": str(rows), "numPartitions": str(PARTITIONS),
        }  # fmt: skip
        with usage(self.server) as used:
            started = time.monotonic()
            self.spark.read.format("jdbc").options(**options).load().write.format("delta").mode("overwrite").save(
                target
            )
            seconds = time.monotonic() - started
        shutil.rmtree(target)
        self.record.add(Run("W4", f"Spark JDBC, {PARTITIONS} partitions", seconds, rows, 0, used.cpu, used.peak))
