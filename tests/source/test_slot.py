"""The state of the replication slot, as SQL shows it, and the states in which pgcdc refuses the slot."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import CopyBlocked, IdentityMismatch, LogAhead, PgcdcError, SlotAhead, SlotLost, SlotMissing
from pgcdc_assets.source.catalog.pgclass import read_leaves
from pgcdc_assets.source.catalog.published import LISTS_SINCE, read_beside_locks, read_published
from pgcdc_assets.source.catalog.tables import CatalogSnapshot, read_catalog, read_tables
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.blockers import transactions
from pgcdc_assets.source.slot.slot import (
    RECORD_END,
    WAL_ENDS,
    WITHIN,
    SlotStatus,
    check_slot,
    identity,
    require_slot,
    slot_status,
)
from tests.fix_postgres import Database
from tests.servers import VERSIONS, new_server


@pytest.fixture
def slot() -> str:
    return f"s_{secrets.token_hex(5)}"


@pytest.fixture
def status(database: Database, slot: str) -> SlotStatus:
    with connect(database.conninfo) as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        return require_slot(conn, slot)


def test_a_missing_slot_has_no_status_and_is_an_error_where_it_is_required(database: Database, slot: str) -> None:
    with connect(database.conninfo) as conn:
        assert slot_status(conn, slot) is None
        with pytest.raises(SlotMissing, match="pgcdc setup"):
            require_slot(conn, slot)


def test_errors_for_a_slot_ahead_of_the_log_or_a_log_ahead_of_the_wal_name_both_positions(status: SlotStatus) -> None:
    assert status.confirmed_flush_lsn is not None
    before = Lsn(status.confirmed_flush_lsn - 8)
    with pytest.raises(SlotAhead, match=f"{status.confirmed_flush_lsn}.*{before}"):
        check_slot(status, before)
    beyond = Lsn(status.wal_lsn + 8)
    with pytest.raises(LogAhead, match=f"{beyond}.*{status.wal_lsn}"):
        check_slot(status, beyond)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"plugin": "test_decoding"}, IdentityMismatch),
        ({"plugin": None}, IdentityMismatch),
        ({"database": "another"}, IdentityMismatch),
        ({"two_phase": True}, IdentityMismatch),
        ({"synced": True}, IdentityMismatch),
        ({"wal_status": "lost"}, SlotLost),
        ({"invalidation_reason": "wal_removed"}, SlotLost),
        ({"conflicting": True}, SlotLost),
        ({"restart_lsn": None}, SlotLost),
    ],
)
def test_each_kind_of_unusable_slot_raises_an_error_that_says_what_to_do(
    status: SlotStatus, change: dict[str, object], kind: type[PgcdcError]
) -> None:
    with pytest.raises(kind) as caught:
        check_slot(replace(status, **change), status.confirmed_flush_lsn)  # type: ignore[arg-type]
    assert caught.value.do


def test_two_phase_and_physical_slots_and_slots_of_another_database_are_refused(database: Database, slot: str) -> None:
    with connect(database.conninfo) as conn, connect(database.server.conninfo_of("postgres")) as elsewhere:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", [slot])
        with pytest.raises(IdentityMismatch, match="two_phase"):
            check_slot(require_slot(conn, slot), None)
        with pytest.raises(IdentityMismatch, match=f"belongs to database {database.name}, not to postgres"):
            check_slot(require_slot(elsewhere, slot), None)
        physical = f"{slot}_p"
        conn.execute("SELECT pg_create_physical_replication_slot(%s)", [physical])
        try:
            with pytest.raises(IdentityMismatch, match="physical"):
                check_slot(require_slot(conn, physical), None)
        finally:
            conn.execute("SELECT pg_drop_replication_slot(%s)", [physical])


def test_a_role_without_rights_can_read_the_identity_of_the_source(database: Database, slot: str) -> None:
    role = f"plain_{secrets.token_hex(4)}"
    with connect(database.conninfo) as conn:
        expected = identity(conn, slot)
        assert (expected.database, expected.slot) == (database.name, slot)
        assert expected.system_identifier.isdigit()
        conn.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            with connect(f"{database.conninfo} user={role}") as plain:
                assert identity(plain, slot) == expected
                assert slot_status(plain, slot) is None
        finally:
            conn.execute(f"DROP ROLE {role}".encode())


def test_open_and_prepared_transactions_are_listed_with_pid_or_gid(database: Database) -> None:
    gid = f"g_{secrets.token_hex(4)}"
    with database.connect() as writer, database.connect() as other, connect(database.conninfo) as conn:
        writer.execute("BEGIN; SELECT pg_current_xact_id()")
        other.execute("BEGIN; SELECT pg_current_xact_id()")
        other.execute(f"PREPARE TRANSACTION '{gid}'".encode())
        ours = [holder for holder in transactions(conn) if holder.database == database.name]
        assert [(holder.pid, holder.gid) for holder in ours] == [(writer.info.backend_pid, None), (None, gid)]
        assert all(holder.age is not None and holder.age.total_seconds() >= 0 for holder in ours)
        assert f"prepared transaction '{gid}' in database {database.name}, open for" in str(ours[1])


# A slot that a real server has invalidated ----------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_a_slot_whose_wal_was_removed_is_reported_as_lost(tmp_path: Path, version: int) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"}
    with (
        new_server(tmp_path / "pg", version, settings=settings) as server,
        connect(server.conninfo) as conn,
    ):
        conn.execute("SELECT pg_create_logical_replication_slot('lost', 'pgoutput')")
        for _ in range(5):
            conn.execute("SELECT pg_switch_wal(), pg_current_xact_id()")
            conn.execute("CHECKPOINT")
        status = require_slot(conn, "lost")
        assert status.lost
        with pytest.raises(SlotLost, match="copies all tables again"):
            check_slot(status, None)
        with ReplicationConnection.open(server.conninfo) as walsender, pytest.raises(SlotLost) as caught:
            walsender.start("lost", ZERO, ["p"])
        assert caught.value.thing == "slot lost"
        assert not caught.value.retryable


# Positions of the source's WAL, as SQL reports them -------------------------------------------------


def test_the_end_of_a_wal_record_is_read_as_a_position_before_the_next_page_header(database: Database) -> None:
    """If a record fills a page or file, PostgreSQL's insert position is after the header of the next page. The flush
    position is never there. So pgcdc's query returns the position before this header."""
    with database.connect() as conn:

        def at(query: str) -> Lsn:
            return Lsn.parse(str(conn.execute(query.encode()).fetchall()[0][0]))

        record_end = f"SELECT {RECORD_END} FROM {WAL_ENDS}"
        # An attempt takes some milliseconds, and fails if another session writes WAL. An autovacuum may write during
        # more than fifty attempts.
        for _ in range(3000):
            before = at(record_end)
            bare = at("SELECT pg_logical_emit_message(false, '', '')") - before
            # This record fills the page to its end, if no other session writes and the rest of the page is large
            # enough.
            room = (-(before + bare)) % 8192 - bare
            if room < 0:
                continue
            conn.execute("SELECT pg_logical_emit_message(false, '', repeat('x', %s))", [room])
            end, inserted = at(record_end), at("SELECT pg_current_wal_insert_lsn()")
            assert end == inserted or (end % 8192 == 0 and inserted - end in (24, 40))
            if end != inserted:
                break
        else:
            raise AssertionError("no record ended with its page")
        conn.execute("SELECT pg_switch_wal()")
        assert at(record_end) % (1 << 20) == 0


def test_each_position_of_the_wal_is_read_once_and_the_flush_position_first(database: Database) -> None:
    """If ``CASE WHEN ... THEN ...`` read the flush position once in the condition and once in the result, the second
    reading could be higher: the end of a page, in the middle of a record."""
    with database.connect() as conn:
        query = f"EXPLAIN VERBOSE SELECT CASE WHEN {WITHIN} THEN {RECORD_END} ELSE wal.flushed END FROM {WAL_ENDS}"
        plan = "\n".join(line for (line,) in conn.execute(query.encode()).fetchall())
    assert (plan.count("pg_current_wal_flush_lsn()"), plan.count("pg_current_wal_insert_lsn()")) == (1, 1)
    assert plan.index("pg_current_wal_flush_lsn()") < plan.index("pg_current_wal_insert_lsn()")


# The query of the published tables does not wait for locks on the tables, and its result equals pg_publication_tables

TABLES = """
CREATE SCHEMA other;
CREATE TABLE t (id int PRIMARY KEY, v text, g int GENERATED ALWAYS AS (id * 2) STORED);
CREATE TABLE gone (id int PRIMARY KEY, dropped int, v text); ALTER TABLE gone DROP COLUMN dropped;
CREATE TABLE other.u (id int PRIMARY KEY, v text);
CREATE UNLOGGED TABLE scratch (id int);
CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent);
CREATE TABLE root (id int, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE north PARTITION OF root FOR VALUES IN ('n') PARTITION BY RANGE (id);
CREATE TABLE other.north_low PARTITION OF north FOR VALUES FROM (0) TO (100);
CREATE TABLE south (region text NOT NULL, id int NOT NULL); ALTER TABLE root ATTACH PARTITION south FOR VALUES IN ('s');
CREATE VIEW shown AS SELECT 1 AS one;
"""
PUBLICATIONS = """
CREATE PUBLICATION everything FOR ALL TABLES;
CREATE PUBLICATION everything_via_root FOR ALL TABLES WITH (publish_via_partition_root);
CREATE PUBLICATION chosen FOR TABLE t, gone, ONLY parent WITH (publish = 'insert, delete');
CREATE PUBLICATION leaves FOR TABLE root, parent;
CREATE PUBLICATION via_root FOR TABLE root WITH (publish_via_partition_root);
CREATE PUBLICATION via_root_and_leaf FOR TABLE root, north, south WITH (publish_via_partition_root);
CREATE PUBLICATION middle FOR TABLE north WITH (publish_via_partition_root);
CREATE PUBLICATION one_leaf FOR TABLE south;
CREATE PUBLICATION nothing;
"""
LISTS = """
CREATE PUBLICATION listed FOR TABLE t (id), gone (v, id);
CREATE PUBLICATION of_schema FOR TABLES IN SCHEMA other;
CREATE PUBLICATION of_schema_via_root FOR TABLES IN SCHEMA public WITH (publish_via_partition_root);
CREATE PUBLICATION schema_and_table FOR TABLES IN SCHEMA other, TABLE t, root;
CREATE PUBLICATION filtered FOR TABLE other.u WHERE (id > 5);
"""
GENERATED = """
CREATE PUBLICATION generated FOR TABLE t WITH (publish_generated_columns = stored);
CREATE PUBLICATION generated_listed FOR TABLE t (id, g);
"""


@pytest.fixture
def names(database: Database) -> list[str]:
    with database.connect() as conn:
        version = conn.info.server_version
        made = TABLES + PUBLICATIONS + (LISTS if version >= LISTS_SINCE else "")
        conn.execute((made + (GENERATED if version >= 180000 else "")).encode())
        return [row[0] for row in conn.execute("SELECT pubname::text FROM pg_publication ORDER BY 1").fetchall()]


def view_rows(conn: psycopg.Connection, name: str) -> list[tuple[object, ...]]:
    lists = conn.info.server_version >= LISTS_SINCE
    query = (
        "SELECT (quote_ident(t.schemaname) || '.' || quote_ident(t.tablename))::regclass::oid, t.pubname::text, "
        "p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot, "
        # PostgreSQL 15 lists a generated column that is not in the stream.
        + ("array_remove(t.attnames::text[], %s), NULL" if lists else "NULLIF(%s, 'g')::text[], NULL")
        + " FROM pg_publication_tables t JOIN pg_publication p USING (pubname) WHERE pubname = %s ORDER BY 1"
    )
    return conn.execute(query.encode(), ["g" if conn.info.server_version < 180000 else "", name]).fetchall()


def test_published_tables_read_without_locks_equal_pg_publication_tables(database: Database, names: list[str]) -> None:
    with database.connect() as conn:
        for name in set(names) - {"filtered"}:
            assert read_beside_locks(conn, [name]) == view_rows(conn, name), name
        every = [row for name in names if name != "filtered" for row in view_rows(conn, name)]
        assert set(map(str, read_beside_locks(conn, sorted(set(names) - {"filtered"})))) == set(map(str, every))
        oid = view_rows(conn, "chosen")[0][0]
        assert isinstance(oid, int)
        assert {row[0] for row in read_beside_locks(conn, ["chosen", "everything"], [oid])} == {oid}


def test_an_open_truncate_blocks_no_catalog_read(database: Database, names: list[str]) -> None:
    """The start of a sync, the catalog watch, and the receiver's lookup of a relation do not wait for locks on
    tables."""
    who = Identity("1", database.name, "s")
    chosen = ["chosen", "leaves"]
    with database.connect() as conn, database.connect() as other:
        free = read_catalog(conn, who, chosen), read_published(conn, chosen)
        root = conn.execute("SELECT 'root'::regclass::oid").fetchall()[0][0]
        leaves = read_leaves(conn, [root])
        other.execute("BEGIN; TRUNCATE t, root")
        conn.execute("SET statement_timeout = '10s'")
        assert (read_catalog(conn, who, chosen), read_published(conn, chosen)) == free
        assert read_leaves(conn, [root]) == leaves
        assert conn.execute("SHOW lock_timeout").fetchone() == ("0",)


@pytest.mark.since(16, "a view that opens the tables")
def test_a_table_dropped_while_published_tables_are_read_causes_no_error(database: Database, names: list[str]) -> None:
    """PostgreSQL's pg_publication_tables fails in this case: could not open relation with OID."""
    with database.connect() as conn, database.connect() as other, ThreadPoolExecutor() as threads:
        other.execute("BEGIN; DROP TABLE gone")
        reading = threads.submit(read_published, conn, ["chosen"])
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s"
        while other.execute(waiting, [conn.info.backend_pid]).fetchone() == (0,):
            assert not reading.done()
        other.execute("COMMIT")
        assert len(reading.result(20)) == 2


@pytest.mark.since(15, "row filters")
def test_the_error_for_a_locked_table_with_an_unknown_row_filter_names_the_table(
    database: Database, names: list[str]
) -> None:
    with database.connect() as conn, database.connect() as other:
        other.execute("BEGIN; TRUNCATE other.u")
        with pytest.raises(CopyBlocked, match=r"other\.u"):
            read_published(conn, ["filtered"])


@pytest.mark.since(15, "row filters")
def test_the_row_filter_of_a_table_is_read_while_another_table_is_locked(database: Database, names: list[str]) -> None:
    with database.connect() as conn, database.connect() as other:
        conn.execute("CREATE PUBLICATION beside FOR TABLE other.u WHERE (id > 5), t")
        other.execute("BEGIN; TRUNCATE t")
        assert {one.row_filter for one in read_published(conn, ["beside"]).values()} == {"(id > 5)", None}


@pytest.mark.long
@pytest.mark.since(15, "row filters")
def test_the_row_filter_of_a_locked_table_is_taken_from_the_last_catalog(database: Database, names: list[str]) -> None:
    """A prepared transaction may lock a table for days, and the row filter of a locked table cannot be read. So pgcdc
    uses the filter that it read last, as long as the catalog rows that publish the table are unchanged."""
    who = Identity("1", database.name, "s")
    with database.connect() as conn, database.connect() as other:
        free = read_catalog(conn, who, ["filtered"])
        assert free.tables[0].row_filter == "(id > 5)"
        other.execute("BEGIN; TRUNCATE other.u")
        assert read_catalog(conn, who, ["filtered"], before=free.tables) == free
        with pytest.raises(CopyBlocked, match=r"other\.u"):
            read_catalog(conn, who, ["filtered"])
        other.execute("ROLLBACK")
        conn.execute("ALTER PUBLICATION filtered SET TABLE other.u WHERE (id > 6)")
        other.execute("BEGIN; TRUNCATE other.u")
        with pytest.raises(CopyBlocked, match=r"other\.u"):
            read_catalog(conn, who, ["filtered"], before=free.tables)


# The fingerprint of the catalog changes after each change that the catalog watch must see, and only then

START = """
CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TYPE pair AS (a int, m mood); CREATE SCHEMA s;
CREATE TABLE t (id int PRIMARY KEY, x text, n int, p pair[], g int GENERATED ALWAYS AS (1) STORED);
CREATE TABLE r (id int, d int, PRIMARY KEY (id, d)) PARTITION BY LIST (d);
CREATE TABLE branch PARTITION OF r FOR VALUES IN (1, 2) PARTITION BY LIST (d);
CREATE TABLE r1 PARTITION OF branch FOR VALUES IN (1);
CREATE TABLE empty PARTITION OF r FOR VALUES IN (3, 4) PARTITION BY LIST (d);
CREATE TABLE other (id int); CREATE PUBLICATION p FOR TABLE t, r
"""


DONE = (
    "ALTER TABLE t ADD y int", "ALTER TABLE t DROP n", "ALTER TABLE t RENAME n TO m",
    "ALTER TABLE t RENAME n TO m; ALTER TABLE t RENAME m TO n", "ALTER TABLE t RENAME TO u",
    "ALTER TABLE t RENAME TO u; ALTER TABLE u RENAME TO t", "ALTER TABLE t SET SCHEMA s",
    "ALTER TABLE t SET SCHEMA s; ALTER TABLE s.t SET SCHEMA public", "ALTER TABLE t ALTER g DROP EXPRESSION",
    "ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t REPLICA IDENTITY FULL",
    "ALTER TABLE t ALTER n TYPE int8",
    "ALTER TABLE r DETACH PARTITION branch", "ALTER TABLE branch DETACH PARTITION r1",
    "ALTER TABLE r DETACH PARTITION branch; ALTER TABLE r ATTACH PARTITION branch FOR VALUES IN (1, 2)",
    "CREATE TABLE r3 PARTITION OF empty FOR VALUES IN (3)", "TRUNCATE r1", "VACUUM FULL t",
    "ALTER TABLE r1 SET UNLOGGED; ALTER TABLE r1 SET LOGGED", "ALTER TYPE mood RENAME VALUE 'sad' TO 'down'",
    "ALTER TYPE pair ADD ATTRIBUTE c int", "ALTER TYPE pair DROP ATTRIBUTE a", "DROP TABLE t",
    "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY)", "ALTER SCHEMA public RENAME TO open",
    "ALTER PUBLICATION p DROP TABLE t", "ALTER PUBLICATION p DROP TABLE t; ALTER PUBLICATION p ADD TABLE t",
    "ALTER PUBLICATION p SET (publish = 'insert')", "ALTER PUBLICATION p ADD TABLE other",
)  # fmt: skip
AFRESH = (
    "DROP PUBLICATION IF EXISTS p", "DROP SCHEMA IF EXISTS open, public, s CASCADE", "CREATE SCHEMA public",
)  # fmt: skip


def test_each_change_of_the_catalog_changes_the_fingerprint(database: Database) -> None:
    with connect(database.conninfo) as conn, database.connect() as user:
        for done in DONE:
            for statement in AFRESH:
                user.execute(statement.encode())
            user.execute(START)
            snapshot = CatalogSnapshot.read(conn, ["p"], [])
            assert [table.name.name for table in snapshot.tables] == ["r", "t"]
            assert snapshot.is_current(conn)
            for statement in done.split(";"):
                user.execute(statement.encode())
            assert not snapshot.is_current(conn), done


def test_statements_that_do_not_alter_published_tables_keep_the_fingerprint(database: Database) -> None:
    """After changes of rows, statistics, unpublished tables or temporary tables, the catalog need not be read again."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute(START)
        snapshot = CatalogSnapshot.read(conn, ["p"], [])
        user.execute("INSERT INTO t VALUES (1, 'x', 1); INSERT INTO r VALUES (1, 1); DELETE FROM t")
        for other in ("ANALYZE", "VACUUM t", "CREATE TEMP TABLE mine (id int)", "CREATE TABLE new (id int)",
                      "ALTER TABLE other ADD y int", "DROP TABLE other", "CREATE VIEW v AS SELECT 1"):  # fmt: skip
            user.execute(other.encode())
        assert snapshot.is_current(conn)


def test_all_parts_of_the_catalog_are_read_from_one_snapshot(database: Database) -> None:
    """If the catalog reader combined the relfilenode from after an ALTER TABLE with the columns from before it, the
    table's rewrite would look like a TRUNCATE, and pgcdc would ignore the rewrite."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute(START)
        with conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            before = read_tables(conn, ["p"])
            user.execute("ALTER TABLE t ALTER n TYPE int USING n + 1")
            assert read_tables(conn, ["p"]) == before
        assert read_tables(conn, ["p"]) != before


def test_a_changed_comment_is_read_but_does_not_change_the_fingerprint(database: Database) -> None:
    """A changed comment does not change the fingerprint of the catalog, so it does not delay the next consistent point.
    The next read of the catalog returns the new comment."""
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
        seen = CatalogSnapshot.read(conn, ["p"], [])
        conn.execute("COMMENT ON TABLE t IS 'all'; COMMENT ON COLUMN t.id IS 'the number'")
        (table,) = CatalogSnapshot.read(conn, ["p"], []).tables
        assert seen.is_current(conn)
        assert seen.shows(replace(table, comments=()))
        assert not seen.shows(table)
