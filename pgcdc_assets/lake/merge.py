"""The SQL of a MERGE, as text; and its execution.

A MERGE says itself what it expects of the target: a row that changes must be there, a row that arrives
must not. Where the mirror disagrees, ``raise_error`` fails the statement while it writes, before
anything is committed, so that a mirror that differs from its source is never written over. The counts
that Delta reports after the commit are compared as well; they can differ only by a fault of ours.
"""

# ruff: noqa: S608 - Spark binds no identifiers: every name goes through quoted(), every text through literal().
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.lake.collapse import MASK, ORIGIN, PRESENT, REMOVE, UPSERT
from pgcdc_assets.lake.feed import COMMIT_LSN, COMMIT_TS, HASH, LEAF, OP, RAW, ROW, FeedColumn
from pgcdc_assets.lake.multiset import COUNT, GROUP

SOURCE, ADDED, REMOVED = "pgcdc_source", "pgcdc_added", "pgcdc_removed"
"""Temporary views that the text reads."""

SETTINGS = {
    # Our sources are files that never change, so there is no need to keep a copy while the MERGE reads them twice.
    "spark.databricks.delta.merge.materializeSource": "none",
    # Planning anew at every stage costs a small MERGE a sixth of its CPU time, and gains nothing on few cores.
    "spark.sql.adaptive.enabled": "false",
}
"""Of the session that runs a MERGE."""

LACKS = "the mirror lacks a row that the source changed"
HOLDS = "the mirror holds a row that the source inserted"
_EMPTY_MAP = "CAST(map() AS MAP<STRING, STRING>)"


@dataclass(frozen=True)
class MergeCounts:
    inserted: int
    updated: int
    deleted: int


@dataclass(frozen=True)
class KeyedMerge:
    """What the text of one MERGE depends on.

    ``masked`` names the attnums that have a mask column; ``lookup_version`` is the target's version
    where some masked values stand under another key; ``odd_keys`` tells that a key value may not fit
    its type and is compared by its text; ``leaves`` names the leaves that were truncated.
    """

    path: str
    columns: tuple[FeedColumn, ...]
    has_leaf: bool = False
    masked: tuple[int, ...] = ()
    lookup_version: int | None = None
    odd_keys: bool = False
    leaves: tuple[str, ...] = ()

    def sql(self) -> str:
        clauses = [
            f"MERGE INTO delta.{quoted(self.path)} AS t",
            f"USING ({self._source()}) AS s",
            f"ON {_same_key(self.columns, 't', 's', self.odd_keys, 's.' + RAW)}",
            f"WHEN MATCHED AND s.{OP} = '{REMOVE}' THEN DELETE",
            f"WHEN MATCHED THEN UPDATE SET {self._assignments()}",
            f"WHEN NOT MATCHED AND (s.{OP} = '{UPSERT}' OR s.{PRESENT}) THEN INSERT {self._insert()}",
        ]
        return "\n".join([*clauses, *_emptied(self.leaves)])

    def _source(self) -> str:
        """The collapsed rows; those whose masked values stand under another key filled from there."""
        if self.lookup_version is None:
            return f"SELECT * FROM {SOURCE}"
        moved = f"s.{ORIGIN} IS NOT NULL"
        found = f"o.{COMMIT_LSN} IS NOT NULL"
        names = [OP, PRESENT, COMMIT_TS, *([LEAF] if self.has_leaf else [])]
        parts = [f"s.{name}" for name in names]
        parts.append(f"{_unless(f'{moved} AND NOT {found}', f's.{COMMIT_LSN}', LACKS)} AS {COMMIT_LSN}")
        parts.append(f"{_raw(self._masked_columns(), 'o', moved)} AS {RAW}")
        for column in self.columns:
            value = f"s.{quoted(column.name)}"
            if column.attnum in self.masked:
                mask = f"s.{MASK}{column.attnum}"
                value = f"CASE WHEN {moved} AND {mask} THEN o.{quoted(column.source)} ELSE {value} END"
                parts.append(f"{mask} AND NOT ({moved}) AS {MASK}{column.attnum}")
            parts.append(f"{value} AS {quoted(column.name)}")
        target = f"delta.{quoted(self.path)} VERSION AS OF {self.lookup_version}"
        key = _same_key(self.columns, "o", f"s.{ORIGIN}", self.odd_keys, f"s.{ORIGIN}.{RAW}")
        return f"SELECT {', '.join(parts)} FROM {SOURCE} AS s LEFT JOIN {target} AS o ON {key}"

    def _masked_columns(self) -> list[FeedColumn]:
        return [column for column in self.columns if column.attnum in self.masked]

    def _assignments(self) -> str:
        # A row of a truncated leaf is gone before its key arrives anew.
        emptied = f" AND t.{LEAF} NOT IN ({_listed(self.leaves)})" if self.leaves else ""
        pairs = {COMMIT_LSN: _unless(f"NOT s.{PRESENT}{emptied}", f"s.{COMMIT_LSN}", HOLDS)}
        pairs |= {COMMIT_TS: f"s.{COMMIT_TS}", RAW: _raw(self._masked_columns(), "t", "true")}
        if self.has_leaf:
            pairs[LEAF] = f"s.{LEAF}"
        for column in self.columns:
            value, kept = f"s.{quoted(column.name)}", f"t.{quoted(column.source)}"
            if column.attnum in self.masked:
                value = f"CASE WHEN s.{MASK}{column.attnum} THEN {kept} ELSE {value} END"
            pairs[quoted(column.source)] = value
        return ", ".join(f"t.{name} = {value}" for name, value in pairs.items())

    def _insert(self) -> str:
        pairs = {COMMIT_LSN: _unless(f"s.{PRESENT}", f"s.{COMMIT_LSN}", LACKS)}
        names = (COMMIT_TS, RAW, LEAF) if self.has_leaf else (COMMIT_TS, RAW)
        pairs |= {name: f"s.{name}" for name in names}
        pairs |= {quoted(column.source): f"s.{quoted(column.name)}" for column in self.columns}
        return f"({', '.join(pairs)}) VALUES ({', '.join(pairs.values())})"


@dataclass(frozen=True)
class MultisetMerge:
    """Takes copies of rows away and adds others; a copy to take away that is not there fails the statement."""

    path: str
    columns: tuple[FeedColumn, ...]
    version: int
    """Of the target, where the copies to take away are looked up."""
    has_leaf: bool = False
    leaves: tuple[str, ...] = ()

    def sql(self) -> str:
        names = self._names()
        targets = ", ".join([ROW, *(mirror for _, mirror in names)])
        values = ", ".join([f"s.{ROW}", *(f"s.{feed}" for feed, _ in names)])
        clauses = [
            f"MERGE INTO delta.{quoted(self.path)} AS t",
            f"USING ({self._arriving()} UNION ALL {self._leaving()}) AS s",
            f"ON t.{ROW} = s.{ROW}",
            f"WHEN MATCHED AND s.{OP} = '{REMOVE}' THEN DELETE",
            f"WHEN NOT MATCHED AND s.{OP} = '{UPSERT}' THEN INSERT ({targets}) VALUES ({values})",
        ]
        return "\n".join([*clauses, *_emptied(self.leaves)])

    def _names(self) -> list[tuple[str, str]]:
        """Feed and mirror name of each column but the row's identity."""
        own = (COMMIT_LSN, COMMIT_TS, RAW, HASH, *((LEAF,) if self.has_leaf else ()))
        return [*((name, name) for name in own), *((quoted(c.name), quoted(c.source)) for c in self.columns)]

    def _arriving(self) -> str:
        return f"SELECT '{UPSERT}' AS {OP}, {ROW}, {', '.join(feed for feed, _ in self._names())} FROM {ADDED}"

    def _leaving(self) -> str:
        """As many copies of each row as are to go, by their identities."""
        same = [f"t.{HASH} = r.{HASH}", *([f"t.{LEAF} <=> r.{LEAF}"] if self.has_leaf else [])]
        same += [f"t.{quoted(c.source)} <=> r.{quoted(c.name)}" for c in self.columns]
        group = f"PARTITION BY r.{HASH}, r.{GROUP}"
        target = f"delta.{quoted(self.path)} VERSION AS OF {self.version}"
        copies = (
            f"SELECT t.{ROW} AS row, r.{COUNT} AS wanted, count(t.{ROW}) OVER ({group}) AS found, "
            f"row_number() OVER ({group} ORDER BY t.{ROW}) AS place "
            f"FROM {REMOVED} AS r LEFT JOIN {target} AS t ON {' AND '.join(same)}"
        )
        row = _unless("found < wanted", "row", LACKS, "STRING")
        nulls = ", ".join("NULL" for _ in self._names())
        return f"SELECT '{REMOVE}', {row}, {nulls} FROM ({copies}) WHERE place <= wanted"


def execute(session: SparkSession, sql: str) -> MergeCounts | None:
    """Run a MERGE in a session of its own and return what it changed; None where Delta skipped it as done.

    Raises MergeMismatch, with nothing committed, where the mirror does not hold what it must.
    """
    for key, value in SETTINGS.items():
        session.conf.set(key, value)
    try:
        rows = session.sql(sql).collect()
    except (PySparkException, Py4JError) as error:
        for what in (LACKS, HOLDS):
            if what in str(error):
                raise MergeMismatch(what) from None
        raise
    if not rows:
        return None
    counts = rows[0].asDict()
    return MergeCounts(*(int(counts[f"num_{kind}_rows"]) for kind in ("inserted", "updated", "deleted")))


def quoted(name: str) -> str:
    """An identifier or path for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A string literal for Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _emptied(leaves: Sequence[str]) -> list[str]:
    """The clause that empties truncated leaves of what the source does not hold."""
    return [f"WHEN NOT MATCHED BY SOURCE AND t.{LEAF} IN ({_listed(leaves)}) THEN DELETE"] if leaves else []


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(literal(text) for text in texts)


def _unless(bad: str, value: str, what: str, kind: str = "BIGINT") -> str:
    """``value``, or the end of the statement where ``bad`` holds."""
    return f"CASE WHEN {bad} THEN CAST(raise_error({literal(what)}) AS {kind}) ELSE {value} END"


def _same_key(columns: Sequence[FeedColumn], target: str, source: str, odd: bool, source_raw: str) -> str:
    """The join by key. A value that does not fit its type is NULL, and told apart by its text.

    Rows of a table without a key match nothing: all that comes is new.
    """
    terms = []
    for column in columns:
        if not column.key:
            continue
        left, right = f"{target}.{quoted(column.source)}", f"{source}.{quoted(column.name)}"
        if odd:
            name = literal(column.source)
            texts = f"try_element_at({target}.{RAW}, {name}) <=> try_element_at({source_raw}, {name})"
            terms.append(f"{left} <=> {right} AND {texts}")
        else:
            terms.append(f"{left} = {right}")
    return " AND ".join(terms) or "false"


def _raw(masked: Sequence[FeedColumn], row: str, where: str) -> str:
    """The source's texts, plus those of masked values, which stand in the target's row."""
    if not masked:
        return f"s.{RAW}"
    keeps = " OR ".join(f"(k = {literal(c.source)} AND s.{MASK}{c.attnum})" for c in masked)
    kept = f"map_filter({row}.{RAW}, (k, v) -> {keeps})"
    return (
        f"CASE WHEN {where} AND size({kept}) > 0 "
        f"THEN map_concat(coalesce(s.{RAW}, {_EMPTY_MAP}), {kept}) ELSE s.{RAW} END"
    )
