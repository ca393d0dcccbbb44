"""Measures how the files of a mirror grow in hours of steady change: one turn per second, which changes ten rows.

A turn is simulated without the source and Spark. It writes what a real turn writes: one file of new rows, the deletion
vectors of every file that lost a row, a Delta commit and a consistent point. Time is compressed: a simulated second
lasts 1.5 times as long as a turn takes. Retention's ladder and grace are scaled in the same way.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
from pyroaring import BitMap64
from pyspark.sql import SparkSession

from bench.project import engine, project
from bench.record import Record, Run
from bench.source import database, run
from pgcdc_assets.core import retention
from pgcdc_assets.core.layout import DELTA_LOG, Location, commit_name
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.commit import FileChange, commit_change, commit_rewritten
from pgcdc_assets.delta.datafile import DataFile
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.delta.logfiles import commit_actions
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import THIN_AFTER_VERSIONS
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta.compaction import COMPACTION, compact_file
from pgcdc_assets.mirror.delta.mirror import Mirror, Mirrors
from pgcdc_assets.mirror.delta.removal import unneeded_parts
from pgcdc_assets.mirror.delta.rowgroups import MergeTarget
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store.local import path_of

ROWS, HOURS, HOUR_TURNS, CHANGES = 10_000_000, 3, 3_600, 10
WORN = 64
"""One row in 64 is deleted at the start: half of the share of deleted rows at which a file is rewritten."""
_NAME = TableName("public", "small")
_CALIBRATED_BY = 200


@dataclass
class Day:
    server: EmbeddedServer
    spark: SparkSession
    folder: Path
    record: Record

    def hours(self, rows: int = ROWS, hours: int = HOURS, turns: int = HOUR_TURNS) -> None:
        """Measure the bytes that each hour writes, and by how much the mirror grows in that hour."""
        with database(self.server, "day", ("small",)) as conninfo:
            run(conninfo, f"INSERT INTO small SELECT g, g % 1000, md5(g::text) FROM generate_series(1, {rows}) g")
            with project(self.folder / "day", conninfo, "day_main") as settings:
                engine(settings, self.spark).sync(Bounds())
                mirror = Mirrors(settings.layout, ChangeLog(settings.layout).identity).open(_NAME)
                turner = _Turns(mirror, ConsistentPoints(settings.layout))
                turner.take(rows // WORN)
                started = time.monotonic()
                for _ in range(_CALIBRATED_BY):
                    turner.take(CHANGES)
                second = 1.5 * (time.monotonic() - started) / _CALIBRATED_BY
                with _pressed(second):
                    self._measure(turner, hours, turns, second)

    def _measure(self, turner: _Turns, hours: int, turns: int, second: float) -> None:
        before, written = _size(path_of(turner.mirror.path)), turner.written
        for hour in range(1, hours + 1):
            started = time.monotonic()
            for number in range(turns):
                turner.take(CHANGES)
                if number % THIN_AFTER_VERSIONS == THIN_AFTER_VERSIONS - 1:
                    turner.thin()
                time.sleep(max(0.0, started + (number + 1) * second - time.monotonic()))
            left, wrote = _size(path_of(turner.mirror.path)), turner.written
            more = {"written_mb": (wrote - written) / 1e6, "left_mb": (left - before) / 1e6,
                    "log_files": len(list(path_of(turner.mirror.path / DELTA_LOG).iterdir()))}  # fmt: skip
            self.record.add(Run("S6", f"hour {hour} of a turn a second", time.monotonic() - started, turns * CHANGES,
                                more=more))  # fmt: skip
            before, written = left, wrote


class _Turns:
    """Changes random rows in all large files of the mirror, no row twice."""

    def __init__(self, mirror: Mirror, points: ConsistentPoints) -> None:
        self.mirror = mirror
        self.written = 0
        self._points = points
        self._log = DeltaLog(mirror.path)
        self._chance = random.Random(1)
        self._version = mirror.version
        self._gone: dict[str, set[int]] = {}

    def take(self, count: int) -> None:
        table = self._log.newest()
        newest = self._points.newest()
        assert table is not None
        assert newest is not None
        large = [file for file in table.files if (file.rows or 0) > 10 * CHANGES]
        gone: dict[str, set[int]] = {}
        for _ in range(count):
            (file,) = self._chance.choices(large, [file.rows or 0 for file in large])
            place = self._chance.randrange(file.rows or 0)
            if place not in self._gone.setdefault(file.path, set()):
                self._gone[file.path].add(place)
                gone.setdefault(file.path, set()).add(place)
        with DataFile(self.mirror.path, pa.schema(table.schema.to_arrow())) as data:
            data.write([pa.nulls(CHANGES, field.type) for field in pa.schema(table.schema.to_arrow())])
            report = data.finish()
        assert report is not None
        change = FileChange([report], {path: BitMap64(places) for path, places in gone.items()})
        self._version = commit_change(table, change, {}, {})
        if self._version % COMPACTION.look_every == 0:
            self._rewrite()
        self._points.publish(newest.replay_lsn, {_NAME: self._version}, newest.positions)
        self.written += _written(path_of(self.mirror.path), self._version)

    def _rewrite(self) -> None:
        table = self._log.newest()
        assert table is not None
        files = COMPACTION.worth_rewriting(table.files)
        if files:
            self._version = commit_rewritten(table, files, compact_file(replace(MergeTarget.of(table), files=files)))
            for file in files:
                self._gone.pop(file.path, None)
            self.written += _written(path_of(self.mirror.path), self._version)

    def thin(self) -> None:
        now = datetime.now(UTC)
        promised = self._points.versions([_NAME])[_NAME]
        self._points.prune(now - timedelta(days=7), [_NAME], now)
        unneeded_parts(self.mirror.again(), promised, retention.GRACE).delete()


@contextmanager
def _pressed(second: float) -> Iterator[None]:
    """Scale the retention's ladder and grace to a simulated second of this many seconds."""
    ladder = tuple((age * second, step * second) for age, step in retention.LADDER)
    with patch.object(retention, "LADDER", ladder), patch.object(retention, "GRACE", retention.GRACE * second):
        yield


def _written(folder: Path, version: int) -> int:
    """Bytes of a Delta commit, and of the files and deletion vectors that it adds."""
    log = folder / DELTA_LOG
    adds = [action["add"] for action in commit_actions(Location.of(log), version) if "add" in action]
    vectors = sum(add["deletionVector"]["sizeInBytes"] for add in adds if add.get("deletionVector"))
    files = sum(add["size"] for add in adds if not add.get("deletionVector"))
    return (log / commit_name(version)).stat().st_size + int(vectors + files)


def _size(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
