"""The query of the published tables does not wait for locks on the tables, and its result equals
pg_publication_tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.errors import CopyBlocked
from pgcdc_assets.source.catalog.pgclass import read_leaves
from pgcdc_assets.source.catalog.published import LISTS_SINCE, read_beside_locks, read_published
from pgcdc_assets.source.catalog.tables import read_catalog
from tests.fix_postgres import Database

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


def test_published_tables_read_without_locks_equal_the_view(database: Database, names: list[str]) -> None:
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
def test_a_table_dropped_during_the_read_causes_no_error(database: Database, names: list[str]) -> None:
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
    """The filter from the last catalog is used until a catalog row that publishes the table changes, because a prepared
    transaction may lock the table for days."""
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
