"""Creates mirrors of one small table with several structures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from pgcdc_assets.core.catalog import Column, Identity, PgType, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.datafile import DataFile
from pgcdc_assets.mirror.delta.mirror import IDENTITY, Mirror, Mirrors, create_mirror
from pgcdc_assets.mirror.delta.mirrorschema import MirrorSchema
from pgcdc_assets.mirror.delta.reshape import reshape_mirror
from pgcdc_assets.protocol.text.typed import typed
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.successor import successor
from tests.deltatables import commit, live_files
from tests.flow.mirrors import no_spark
from tests.structure.marked import marks

OWNER = Identity("7000000000000000001", "shop", "pgcdc")
NAME = TableName("public", "t")
INT, TEXT = PgType(23, "int4"), PgType(25, "text")


def numeric(precision: int, scale: int) -> PgType:
    return PgType(1700, "numeric", (precision << 16 | scale) + 4)


def table(*columns: Column) -> Table:
    rows = " ".join(f"{column.attnum}:7" for column in columns)
    return Table(1000, NAME, columns, key=(1,), marks=marks(rows, relfilenode=5))


ID, A, N = Column(1, "id", INT), Column(2, "a", TEXT), Column(3, "n", numeric(10, 2))
T = table(ID, A, N)
ROWS: list[list[str | None]] = [["1", "2", "3", "4"], ["one", None, "three", "four"], ["1.50", "NaN", None, "4.00"]]


def made(root: Path, before: Table = T, *groups: Sequence[Sequence[str | None]]) -> Mirror:
    """A mirror that has a file for each group of rows. Its second row is deleted."""
    layout = Layout.of(root)
    create_mirror(layout.mirror(NAME), MirrorSchema.of(before), {IDENTITY: OWNER.app_id()}, layout.root)
    mirror = Mirrors(layout, OWNER).open(NAME)
    reports = []
    for texts in groups or (ROWS,):
        count = len(texts[0])
        done = typed([pa.array(text, pa.string()) for text in texts], before.columns, count)
        own = [pa.array([10] * count, pa.int64()), pa.nulls(count, pa.timestamp("us", "UTC")), done.raw]
        with DataFile(mirror.path, mirror.physical(MirrorSchema.of(before))) as file:
            file.write([*done.values, *own])
            reports.append(file.finish())
    commit(mirror.path, [report for report in reports if report], "append", {mirror.snapshot_app_id: 10})
    return mirror.again()


def rows(mirror: Mirror, version: int | None = None) -> list[dict[str, Any]]:
    """Rows in the order of the first column. Of the columns that pgcdc adds, only ``_pgcdc_raw`` is included."""
    delta = DeltaTable(path_of(mirror.path), version=version)
    found: list[dict[str, Any]] = pa.table(
        QueryBuilder().register("t", delta).execute("SELECT * FROM t ORDER BY 1").read_all()
    ).to_pylist()
    for row in found:
        del row["_pgcdc_commit_lsn"], row["_pgcdc_commit_ts"]
        row["_pgcdc_raw"] = dict(row["_pgcdc_raw"] or ())
    return found


PLAIN: list[list[str | None]] = [["1", "2", "3"], ["one", "two", None], ["1.50", "-2.25", None]]
"""Rows in which every value fits its type."""


def relabelled(mirror: Mirror, after: Table, before: Table = T) -> Table:
    """Changes the structure by metadata alone, without Spark. No file is rewritten. Returns the new table."""
    follows = successor(before, after, Lsn(50))
    assert isinstance(follows, Table), follows
    files = live_files(mirror.path)
    reshape_mirror(
        SparkOnDemand(no_spark), mirror.mirrors, before, follows, by_metadata=True
    )  # fmt: skip
    assert live_files(mirror.path) == files
    return follows
