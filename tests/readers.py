"""Engines that read mirrors with their own code. They must refuse Delta features that they do not support.

Polars and the reader of the Delta kernel are not installed by default, but by ``make readers``. :func:`at_hand` returns
the installed engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaLog
from pgcdc_assets.lake.point import LakeAt
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.local import path_of
from tests.oracle import RAW, Rows, written

OTHERS: Final = ("polars", "polars_deltalake")
"""Packages of the engines that are not installed by default."""


@dataclass(frozen=True)
class Reader:
    name: str
    read: Callable[[Path, int], pa.Table]
    """Reads the rows of a version."""
    unknown: frozenset[str] = frozenset()
    """Table features that the engine refuses."""
    in_part: frozenset[str] = frozenset()
    """Table features that the engine supports in part. The engine fails when it reads a file that uses the unsupported
    part."""


def at_hand(spark: SparkSession) -> list[Reader]:
    found = [
        Reader("Spark", partial(_by_spark, spark)),
        Reader("delta-rs", _by_delta_rs, frozenset({"typeWidening"})),
    ]
    if lacking():
        return found
    return [
        *found,
        Reader("Polars", _by_polars, frozenset({"columnMapping", "typeWidening"})),
        # The kernel supports widened integers, but not widened decimals.
        Reader("kernel", _by_kernel, in_part=frozenset({"typeWidening"})),
    ]


def lacking() -> list[str]:
    return [name for name in OTHERS if find_spec(name) is None]


def _by_spark(spark: SparkSession, folder: Path, version: int) -> pa.Table:
    return spark.read.format("delta").option("versionAsOf", version).load(str(folder)).toArrow()


def _by_delta_rs(folder: Path, version: int) -> pa.Table:
    query = QueryBuilder().register("t", DeltaTable(folder, version=version))
    return pa.table(query.execute("SELECT * FROM t").read_all())


def _by_polars(folder: Path, version: int) -> pa.Table:
    import polars

    return polars.read_delta(str(folder), version=version).to_arrow()


def _by_kernel(folder: Path, version: int) -> pa.Table:
    import polars_deltalake

    return polars_deltalake.read_delta(str(folder), version=version).to_arrow()


@dataclass
class Tally:
    """By engine: how many versions it read, and how many it refused. ``wrong``: descriptions of wrong results."""

    read: Counter[str]
    refused: Counter[str]
    wrong: list[str]


def tallied(settings: Settings, schemas: Sequence[str], readers: Sequence[Reader]) -> Tally:
    """Reads the mirrors of these PostgreSQL schemas with every engine. If a mirror had several structures (Delta
    schemas), reads the last published version with each structure."""
    tally = Tally(Counter(), Counter(), [])
    for at, name, features in _structures(settings, schemas):
        folder, version = path_of(settings.layout.mirror(name)), at.versions[name]
        where = f"{name} version {version}, {sorted(features)}"
        expected = _texts(at.arrow(name))
        for reader in readers:
            try:
                found = _texts(reader.read(folder, version))
            except Exception as error:  # noqa: BLE001 (each engine has its own)
                tally.refused[reader.name] += 1
                if not features & (reader.unknown | reader.in_part):
                    tally.wrong.append(f"{reader.name} cannot read {where}: {error!r}"[:500])
                continue
            tally.read[reader.name] += 1
            if features & reader.unknown:
                tally.wrong.append(f"{reader.name} is not known to read {where}")
            if found != expected:
                tally.wrong.append(f"{reader.name} reads otherwise {where}: {found} for {expected}"[:2000])
    return tally


def _structures(settings: Settings, schemas: Sequence[str]) -> Iterator[tuple[LakeAt, TableName, frozenset[str]]]:
    """For each structure (Delta schema) that each table had: the last point at which the table had this structure, and
    the table's features at that point."""
    last: dict[tuple[TableName, str], tuple[LakeAt, TableName, frozenset[str]]] = {}
    for point in ConsistentPoints(settings.layout).all():
        at = LakeAt(settings.layout, point)
        for name in at.tables:
            if name.schema in schemas:
                table = DeltaLog(settings.layout.mirror(name)).at(at.versions[name])
                last[name, table.metadata["schemaString"]] = (at, name, table.features)
    yield from last.values()


def _texts(rows: pa.Table) -> tuple[tuple[str, ...], Rows]:
    """The column names in order, and the rows in PostgreSQL's text form."""
    misfits = [dict(_pair(one) for one in entry or ()) for entry in rows[RAW].to_pylist()]
    names = tuple(name for name in rows.column_names if not name.startswith("_pgcdc_"))
    return names, Counter(zip(*(written(name, rows[name], misfits) for name in names), strict=True))


def _pair(entry: Any) -> tuple[str, str]:
    """Key and value of an entry of a map. Polars returns the entry as a struct."""
    return (entry["key"], entry["value"]) if isinstance(entry, dict) else entry
