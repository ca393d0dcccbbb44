"""The fingerprint of the catalog changes after each change that the catalog watch must see, and only then."""

from __future__ import annotations

from dataclasses import replace

from pgcdc_assets.source.catalog.tables import CatalogSnapshot, read_tables
from pgcdc_assets.source.connect.connection import connect
from tests.fix_postgres import Database

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


def test_other_statements_do_not_change_the_fingerprint(database: Database) -> None:
    """After changes of rows, statistics, unpublished tables or temporary tables, the catalog need not be read again."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute(START)
        snapshot = CatalogSnapshot.read(conn, ["p"], [])
        user.execute("INSERT INTO t VALUES (1, 'x', 1); INSERT INTO r VALUES (1, 1); DELETE FROM t")
        for other in ("ANALYZE", "VACUUM t", "CREATE TEMP TABLE mine (id int)", "CREATE TABLE new (id int)",
                      "ALTER TABLE other ADD y int", "DROP TABLE other", "CREATE VIEW v AS SELECT 1"):  # fmt: skip
            user.execute(other.encode())
        assert snapshot.is_current(conn)


def test_files_and_columns_are_read_from_one_snapshot(database: Database) -> None:
    """New files together with the old columns would look like a TRUNCATE, and the rewrite would not be noticed."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute(START)
        with conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            before = read_tables(conn, ["p"])
            user.execute("ALTER TABLE t ALTER n TYPE int USING n + 1")
            assert read_tables(conn, ["p"]) == before
        assert read_tables(conn, ["p"]) != before


def test_a_changed_comment_is_seen_without_a_new_fingerprint(database: Database) -> None:
    """A changed comment does not change the fingerprint, so no point waits for it. A new snapshot of the catalog
    contains the comment."""
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
        seen = CatalogSnapshot.read(conn, ["p"], [])
        conn.execute("COMMENT ON TABLE t IS 'all'; COMMENT ON COLUMN t.id IS 'the number'")
        (table,) = CatalogSnapshot.read(conn, ["p"], []).tables
        assert seen.is_current(conn)
        assert seen.shows(replace(table, comments=()))
        assert not seen.shows(table)
