"""Receiving and decoding with every supported version: the rows computed from the log equal the source at each
boundary."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from pgcdc_assets.checks.report import VerifyReport
from pgcdc_assets.checks.verify import verify
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.flow.requests import place_verify_request
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.project import load_catalog
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import LogicalMessage
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import check_source
from pgcdc_assets.store.local import path_of
from tests.fix_postgres import fresh_database
from tests.flow.rig import Rig
from tests.history.derived import title
from tests.history.mirror import PlainMirror
from tests.journal import Journal
from tests.log.conftest import rows
from tests.oracle import Rows, source_rows
from tests.projectfiles import CATALOG_FILE
from tests.versions.conftest import Received
from tests.versions.workload import ALTERED, GENERATED_SINCE, LISTS_SINCE, TABLES, Workload, make

EMPTY_TRANSACTIONS_UNTIL = 14
"""The last version in which pgoutput sends Begin and Commit for transactions without published changes."""


def test_rows_computed_from_the_log_equal_the_source_at_every_boundary(received: Received) -> None:
    derived, whole = received.derived, [received.log.start, *received.boundaries]
    for table in derived.tables:
        if title(table) in TABLES:
            derived.apply(table, whole)
    assert derived.parts.keys() >= set(TABLES)


@pytest.mark.long
def test_rows_computed_from_the_whole_log_equal_the_current_source(received: Received) -> None:
    for table in (*TABLES, ALTERED):
        schema, name = table.split(".", 1)
        columns, expected = source_rows(received.journal.conn, schema, name)
        assert rows_of(received, table, columns) == expected, table
        if table == "Odd Schema.Select":
            assert ("a b" in columns) == (received.version >= GENERATED_SINCE)
    assert received.log.verify(LsnRange(received.log.start, received.log.position()))


def rows_of(received: Received, name: str, columns: list[str]) -> Rows:
    """The rows of a table, computed from the whole log."""
    derived = received.derived
    (table,) = [table for table in derived.tables if title(table) == name]
    shutil.rmtree(path_of(derived.layout.mirror(table.name)), ignore_errors=True)
    mirror = PlainMirror(derived.layout, derived.log.identity, table, derived.log.start)
    mirror.apply(derived.parts[name], derived.log.position())
    return mirror.rows(columns)


def test_transactions_in_the_log_are_complete_and_in_commit_order(received: Received) -> None:
    commits = {int(xid): Lsn.parse(lsn) for xid, lsn in received.journal.commits().items()}
    found = rows(received.log, "kind IN ('I', 'U', 'D', 'T', 'C')")
    assert {row["commit_lsn"] for row in found if row["xid"] in commits} <= set(commits.values())
    seen = [row["xid"] for row in found if row["kind"] == "C"]
    assert len(seen) == len(set(seen))
    ordinals: dict[int, list[int]] = {}
    for row in found:
        if row["kind"] != "T":
            ordinals.setdefault(row["xid"], []).append(row["tx_ordinal"])
    assert all(numbers == sorted(set(numbers)) for numbers in ordinals.values())
    begins = [row for row in found if row["kind"] == "I" and b"begins first" in row["payload"]]
    commits_first = [row for row in found if row["kind"] == "I" and b"commits first" in row["payload"]]
    assert begins[0]["lsn"] < commits_first[0]["lsn"]
    assert begins[0]["commit_lsn"] > commits_first[0]["commit_lsn"]


def test_log_has_logical_messages_and_replication_origins(received: Received) -> None:
    found = {row["tx_ordinal"]: decode(row["payload"], Lsn(0)) for row in rows(received.log, "kind = 'M'")}
    seen = {m.prefix: (m.transactional, m.content) for m in found.values() if isinstance(m, LogicalMessage)}
    assert seen == {"loose": (False, b"between"), "held": (True, b"inside")}
    origins = {row["origin"] for row in rows(received.log, "kind = 'I'")}
    assert origins == {None, f"o_{received.database.name}"}


def test_empty_transactions_get_no_rows_in_the_log(received: Received) -> None:
    """PostgreSQL 14 sends Begin and Commit even for transactions without published changes."""
    raw = _raw(received)
    empty = sum(one[:1] + two[:1] == b"BC" for one, two in pairwise(raw))
    assert (empty > 0) == (received.version <= EMPTY_TRANSACTIONS_UNTIL)
    transactions = sum(batch.transactions for batch in received.log.batches(received.log.start))
    assert transactions == sum(payload[:1] == b"B" for payload in raw) - empty
    ordinals = rows(received.log, "kind = 'C' AND tx_ordinal = 0")
    assert ordinals == []


def test_log_has_only_the_published_rows_and_columns(received: Received) -> None:
    """Covers row filters, column lists and FOR TABLES IN SCHEMA."""
    if received.version < LISTS_SINCE:
        pytest.skip(f"PostgreSQL {received.version} has no row filters, column lists or schemas in publications")
    conn, shown = received.journal.conn, sql.SQL("(SELECT * FROM filtered WHERE v > 30) AS shown")
    columns, expected = source_rows(conn, "public", "filtered", shown)
    assert rows_of(received, "public.filtered", columns) == expected
    assert {row[0] for row in expected} == {"1", "4"}
    listed = Rows(conn.execute("SELECT id::text, shown FROM listed").fetchall())
    assert rows_of(received, "public.listed", ["id", "shown"]) == listed
    (table,) = [table for table in received.derived.tables if table.name.name == "listed"]
    assert [column.name for column in table.columns] == ["id", "shown"]
    assert rows_of(received, "whole_schema.inside", ["id"]) == Rows([("2",)])


def _raw(received: Received) -> list[bytes]:
    """The messages as the server sends them, read with SQL through a separate slot."""
    names = ",".join(received.publications)
    found = received.journal.conn.execute(
        "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
        " 'publication_names', %s)", [received.raw, names],
    ).fetchall()  # fmt: skip
    return [bytes(data) for (data,) in found]


# What ``setup`` reports depends on the source's version ---------------------------------------------

NULLS = "sends NULL as the old value of this column"


@pytest.mark.long
@pytest.mark.versions(14, 15, 18)
@pytest.mark.parametrize(
    ("via_root", "key", "warned"), [("true", "", True), ("false", "", False), ("true", "PRIMARY KEY", False)]
)
def test_setup_warns_about_null_values_in_old_row_images(
    version_server: EmbeddedServer, via_root: str, key: str, warned: bool
) -> None:
    """Before PostgreSQL 15, old row images of a table that is published via its root have NULL in columns that were
    added later with a default. This matters only without a key, because old rows are then found by all their values."""
    with fresh_database(version_server) as database, database.connect() as conn:
        conn.execute(f"CREATE TABLE t (id int {key}, v text) PARTITION BY RANGE (id)".encode())
        conn.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)")
        if not key:
            conn.execute("ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t1 REPLICA IDENTITY FULL")
        conn.execute(f"CREATE PUBLICATION theirs FOR TABLE t WITH (publish_via_partition_root = {via_root})".encode())
        settings = Settings(source=database.conninfo, slot=f"s_{database.name}", publication="theirs")
        seen = [str(finding) for finding in check_source(conn, settings) if NULLS in finding.what]
    assert bool(seen) is (warned and version_server.version < 15)


# Setup, copy, changes and verify with the oldest and newest server ----------------------------------


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.versions(14, long=[18])
def test_every_point_after_copy_and_changes_equals_the_source(
    version_server: EmbeddedServer, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _whole_path(version_server, spark)


def _whole_path(server: EmbeddedServer, spark: SparkSession) -> None:
    with fresh_database(server) as database, database.connect() as conn:
        settings = Settings(
            source=database.conninfo, slot=f"s_{database.name}", tables=("-journal.*",), messages=("*",)
        )
        rig = Rig(settings, conn, lambda: spark, Silent())
        work = Workload(database)
        make(conn, server.version)
        work.before()
        journal = Journal.keep(conn, *TABLES)
        rig.setup()
        rig.sync()
        work.rows()
        rig.sync()
        work.transactions()
        report = rig.sync()
        assert report.set_aside == []
        assert journal.assert_published(rig.lake) >= 3
        rig.assert_equal(*TABLES, ALTERED)
        assert _verified(rig).ok
        # The insert position is now after a page header that no record follows. verify must not wait for more WAL.
        conn.execute("SELECT pg_switch_wal()")
        assert _verified(rig).ok


def _verified(rig: Rig) -> VerifyReport:
    """Runs ``verify``, and a sync whenever ``verify`` asks for a point at an LSN."""
    catalog, points = load_catalog(CATALOG_FILE), ConsistentPoints(rig.settings.layout)
    assert catalog is not None
    with place_verify_request(rig.settings.layout) as request:

        def reach(lsn: Lsn) -> Point:
            request.at(lsn)
            rig.sync()
            point = points.newest()
            assert point is not None
            return point

        return verify(rig.settings, catalog, None, reach)
