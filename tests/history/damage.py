"""Damage to a mirror by hand: rows that a range changed are other, gone, or back again."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.ranges import LsnRange
from tests.history.tables import Spec

_COMMIT_LSN, _RAW = "_pgcdc_commit_lsn", "_pgcdc_raw"


def damage(
    spark: SparkSession, path: Path, spec: Spec, span: LsnRange, copied: Lsn, versions: tuple[int, int] | None,
    pick: int,
) -> str | None:  # fmt: skip
    """What was done, ``changed``, ``removed`` or ``added``; None for nothing.

    ``copied``: consistent point of the mirror's copy. It may lie in the span, and its rows carry it, but no
    transaction of the span wrote them. ``versions``: of the mirror at the span's start and end, to find rows that
    were deleted in it.
    """
    table = f"delta.{_quoted(str(path))}"
    touched = f"{_COMMIT_LSN} BETWEEN {int(span.start)} AND {int(span.end) - 1} AND {_COMMIT_LSN} <> {int(copied)}"
    kinds = ("changed", "removed", *(("added",) if versions else ()))
    kind = kinds[pick % len(kinds)]
    if kind == "changed":
        statement = f"UPDATE {table} SET {_quoted(spec.values[0].name)} = NULL, {_RAW} = NULL WHERE {touched}"
    elif kind == "removed":
        statement = f"DELETE FROM {table} WHERE {touched}"
    else:
        assert versions is not None
        same = " AND ".join(f"n.{_quoted(column.name)} = o.{_quoted(column.name)}" for column in spec.key)
        # Rows whose keys may not fit their type are left alone: such keys are NULL, and not found by equality.
        gone = [
            f"NOT EXISTS (SELECT 1 FROM {place} AS n WHERE {same})"
            for place in (f"{table} VERSION AS OF {versions[1]}", table)
        ]
        before = f"{table} VERSION AS OF {versions[0]} AS o WHERE o.{_RAW} IS NULL AND {' AND '.join(gone)}"
        # An INSERT does not tell how many rows it made.
        count = spark.sql(f"SELECT count(*) FROM {before}").collect()[0][0]
        spark.sql(f"INSERT INTO {table} SELECT o.* FROM {before}").collect()
        return kind if count else None
    (counts,) = spark.sql(statement).collect()
    return kind if counts[0] else None


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
