"""Each row in the log is in a change feed, or is already in the copy of its table, or is reported as a row that went
into no mirror."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.checks.status import status
from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.feed.schema import COMMIT_LSN, ORDINAL
from pgcdc_assets.flow.progress import TablesProgress
from pgcdc_assets.flow.ranges import Why, untaken
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.mirror.delta.mirror import Mirrors
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.slot.slot import identity
from pgcdc_assets.spark.session import SparkOnDemand
from pgcdc_assets.store.local import path_of
from pgcdc_assets.structure.record import TableRecord, TableState
from tests.fix_postgres import Database
from tests.flow.mirrors import delta_target, no_spark
from tests.flow.rig import Rig
from tests.mirror.pipeline import Pipeline
from tests.projectfiles import CATALOG_FILE

_PARTITIONED = (
    "CREATE TABLE p (id int, part int, PRIMARY KEY (id, part)) PARTITION BY LIST (part); "
    "CREATE TABLE p_1 PARTITION OF p FOR VALUES IN (1); CREATE TABLE p_2 PARTITION OF p FOR VALUES IN (2)"
)
_SWAP = "ALTER TABLE t RENAME TO x; ALTER TABLE k RENAME TO t; ALTER TABLE x RENAME TO k"
_TURNS = (
    ("INSERT INTO t SELECT g FROM generate_series(100, 120) g", "UPDATE t SET v = 'x'; DELETE FROM k",
     "TRUNCATE k, p_2"),
    ("ALTER TABLE t RENAME TO y; INSERT INTO y VALUES (200)", "DELETE FROM y WHERE id = 3; ALTER TABLE y RENAME TO t"),
    (f"{_SWAP}; INSERT INTO t VALUES (7, 7); INSERT INTO k VALUES (300)", _SWAP, "INSERT INTO p VALUES (1, 1), (1, 2)"),
    ("CREATE TABLE z (id int)", "ALTER PUBLICATION {publication} ADD TABLE z",
     "INSERT INTO z VALUES (1), (2); INSERT INTO t VALUES (400)", "DROP TABLE z"),
    ("ALTER TABLE p DETACH PARTITION p_1", "INSERT INTO p_1 VALUES (2, 1); INSERT INTO t VALUES (500)",
     "ALTER TABLE p ATTACH PARTITION p_1 FOR VALUES IN (1)"),
    ("ALTER TABLE t RENAME big TO huge", "INSERT INTO t VALUES (600)", "INSERT INTO p VALUES (3, 2)"),
    ("UPDATE t SET v = 'y'", "INSERT INTO k VALUES (8, 8)"),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_each_row_in_the_log_is_in_a_feed_or_in_a_copy_or_is_reported(rig: Rig) -> None:
    rig.settings = rig.settings.model_copy(update={"schema_changes": "set_aside"})
    rig.conn.execute("CREATE TABLE k (id int PRIMARY KEY, v int); INSERT INTO k VALUES (1, 1), (2, 2)")
    rig.conn.execute(_PARTITIONED.encode())
    rig.setup()
    rig.sync()
    reasons: dict[str, str] = {}
    for statements in _TURNS:
        for statement in statements:
            rig.conn.execute(statement.format(publication=rig.settings.publication).encode())
        before = len(rig.observer.ranges)
        rig.sync()
        for closed in rig.observer.ranges[before:]:
            _check(rig, closed.span, {entry.relation_id: entry.rows for entry in closed.untaken})
            reasons |= {entry.name.name: entry.why for entry in closed.untaken}
    assert reasons["z"] == Why.UNKNOWN
    told = [problem for problem in status(rig.settings).problems if "that are in no mirror" in problem.what]
    assert [problem.thing for problem in told] == ["table public.z"]
    assert re.fullmatch(
        r"has 2 rows in the change log, between LSNs \S+ and \S+, that are in no mirror: it was neither .*",
        told[0].what,
    )
    assert reasons["t"] == Why.SET_ASIDE, "a column of it was renamed"
    rig.assert_equal("public.k", "public.p", "public.u")


def test_rows_that_are_in_no_mirror_are_reported_with_their_number_and_the_reason(
    database: Database, tmp_path: Path
) -> None:
    with database.connect() as conn:
        for name in ("a", "b", "c", "left_out", "gone"):
            conn.execute(f"CREATE TABLE {name} (id int)".encode())
        conn.execute("CREATE PUBLICATION p FOR TABLE a, b, c, left_out, gone")
        slot = f"s_{database.name}"
        made = "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')"
        row = conn.execute(made, (slot,)).fetchone()
        assert row is not None
        settings = Settings(source=database.conninfo, lake=tmp_path / "lake", tables=("-public.left_out",))
        start, log = Lsn.parse(row[0]), ChangeLog(settings.layout)
        pipe = Pipeline(database, conn, cast(SparkSession, None), settings.layout)
        pipe.log = log
        log.create(identity(conn, slot), start, 1)
        tables = tuple(t for t in read_tables(conn, ["p"], settings.tables) if t.name.name != "gone")
        catalog = Catalog(log.identity, "p", 180000, tables)
        for name in ("a", "b", "c", "left_out", "gone"):
            conn.execute(f"INSERT INTO {name} VALUES (1), (2)".encode())
        conn.execute("DROP TABLE gone")
        end = pipe.receive()
    target = delta_target(settings.layout, log.identity)
    progress = TablesProgress(settings.layout, catalog, target, log.began, log.start)
    a, b, _ = tables
    # This test makes no mirrors and no copies, so it sets the state that a table has after its copy.
    progress._tables[a.name] = TableRecord(a, TableState.CATCHING_UP, start, 0)
    progress.put_aside(b.name, start, "as a test has it")
    work = Work(settings, catalog, log, target, progress, Silent(), SparkOnDemand(no_spark))
    found = untaken(work, LogSpan(log, LsnRange(start, end)))
    assert {(entry.name.name, entry.rows, entry.why) for entry in found} == {
        ("b", 2, Why.SET_ASIDE), ("c", 2, Why.COPY), ("left_out", 2, Why.LEFT_OUT), ("gone", 2, Why.UNKNOWN),
    }  # fmt: skip


def _check(rig: Rig, span: LsnRange, untaken: dict[int, int]) -> None:
    """Checks one LSN range. For each table of the catalog, the number of its rows in the log must be the number of its
    rows in the feed, plus the number of rows that its copy already contains or that are reported as in no mirror (the
    larger of these two numbers). All rows of other relations must be reported as in no mirror."""
    counts = LogSpan(ChangeLog(rig.settings.layout), span).rows
    catalog = load_catalog(CATALOG_FILE)
    assert catalog is not None
    for table in catalog.tables:
        relations = counts.keys() & {table.oid, *(leaf.oid for leaf in table.leaves)}
        held = _total(counts, relations)
        below = _below_copy(rig, table, span, relations)
        told = sum(untaken.pop(relation, 0) for relation in relations)
        assert held == _taken(rig, table, span) + max(below, told), (table.name, span)
        for relation in relations:
            del counts[relation]
    assert {relation: kinds.total() for relation, kinds in counts.items()} == untaken


def _total(counts: dict[int, Counter[str]], relations: Iterable[int]) -> int:
    return sum(counts[relation].total() for relation in relations if relation in counts)


def _taken(rig: Rig, table: Table, span: LsnRange) -> int:
    """Counts the rows of the LSN range in the table's feed. An update counts once, although the feed may store an
    update as two rows."""
    layout = rig.settings.layout
    if not DeltaTable.is_deltatable(str(layout.changes(table.name))):
        return 0
    feed = DeltaTable(path_of(layout.changes(table.name))).to_pyarrow_table(columns=[COMMIT_LSN, ORDINAL])
    at, half = feed[COMMIT_LSN], pc.bit_wise_and(feed[ORDINAL], 1)
    own = pc.and_(pc.equal(half, 1), pc.and_(pc.greater_equal(at, int(span.start)), pc.less(at, int(span.end))))
    return int(pc.sum(own).as_py() or 0)


def _below_copy(rig: Rig, table: Table, span: LsnRange, relations: Iterable[int]) -> int:
    copied = Mirrors(rig.settings.layout, ChangeLog(rig.settings.layout).identity).open(table.name).snapshot_lsn
    if copied is None or copied <= span.start:
        return 0
    part = LsnRange(span.start, min(copied, span.end))
    return _total(LogSpan(ChangeLog(rig.settings.layout), part).rows, relations)
