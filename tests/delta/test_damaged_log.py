"""A file of the log is lost or damaged. The transform detects this, names the file, and applies none of its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LogCorrupt
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import OWN_FILE_BYTES
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import Database
from tests.mirror.pipeline import Pipeline

pytestmark = pytest.mark.spark

Damage = Callable[[Path, bytes], None]


def _missing(path: Path, content: bytes) -> None:
    path.unlink()


def _half_written(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])


def _emptied(path: Path, content: bytes) -> None:
    path.write_bytes(b"")


def _flipped(share: float) -> Damage:
    def flip(path: Path, content: bytes) -> None:
        changed = bytearray(content)
        changed[int(len(content) * share)] ^= 4
        path.write_bytes(changed)

    return flip


DAMAGES: tuple[Damage, ...] = (_missing, _half_written, _emptied, *map(_flipped, (0.1, 0.6, 0.99)))


def test_damage_is_found_named_and_never_applied(database: Database, spark: SparkSession, tmp_path: Path) -> None:
    """Rows of small tables are in the same file as the batch's descriptions. A large table has its own file, which only
    Spark's workers read."""
    with database.connect() as conn:
        pipe = Pipeline(database, conn, spark, Layout.of(tmp_path / "lake"))
        pipe.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)")
        pipe.follow("t, u")
        size = 1000
        pipe.transaction(f"INSERT INTO t SELECT g, repeat(md5(g::text), {size // 32}) "
                         f"FROM generate_series(1, {2 * OWN_FILE_BYTES // size}) g",
                         "INSERT INTO u SELECT g, md5(g::text) FROM generate_series(1, 100) g")  # fmt: skip
        end = pipe.receive()
        paths = [segment.path for segment in pipe.log.all_segments()]
        assert len(paths) == 2
        for path in paths:
            content = path_of(path).read_bytes()
            for damage in DAMAGES:
                damage(path_of(path), content)
                pipe.log = ChangeLog(pipe.layout).open()
                with pytest.raises(LogCorrupt, match=path.name):
                    pipe.derive(end)
                with pytest.raises(LogCorrupt, match=path.name):
                    ChangeLog(pipe.layout).verify(LsnRange(pipe.log.start, end))
                path_of(path).write_bytes(content)
                assert _rows(pipe, "t") == _rows(pipe, "u") == 0
        pipe.log = ChangeLog(pipe.layout).open()
        pipe.turn(end)
        assert _rows(pipe, "u") == 100


def _rows(pipe: Pipeline, name: str) -> int:
    folder = pipe.layout.changes(TableName("public", name))
    if not DeltaTable.is_deltatable(str(folder)):
        return 0
    return sum(pa.table(DeltaTable(path_of(folder)).get_add_actions(flatten=True))["num_records"].to_pylist())
