"""Changes of the catalog that are not in the stream, and so have no LSN. The comparison of two catalogs must show
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psycopg
import pytest

from pgcdc_assets.checks.facts import _without_identity
from pgcdc_assets.core.catalog import Table
from pgcdc_assets.mirror.delta.mirrorschema import refusal
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.pgclass import read_relations
from pgcdc_assets.source.catalog.published import PublicationRows, read_beside_locks, read_published
from pgcdc_assets.source.catalog.tables import CatalogSnapshot, read_tables
from pgcdc_assets.source.connect.connection import connect
from pgcdc_assets.source.setup.selection import stored_tables
from pgcdc_assets.source.setup.setup import check_source
from pgcdc_assets.structure import differences
from pgcdc_assets.structure.differences import Difference
from tests.fix_postgres import Database

Seen = list[tuple[str, Difference]]
Watched = Callable[[str], Seen]

START = """
CREATE TABLE t (id int PRIMARY KEY, x text, n int); INSERT INTO t SELECT i, 'x', i FROM generate_series(1, 100) AS i;
CREATE TABLE keyless (id int); ALTER TABLE keyless REPLICA IDENTITY FULL;
CREATE TABLE r (id int, d int, PRIMARY KEY (id, d)) PARTITION BY LIST (d);
CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1); CREATE TABLE r2 PARTITION OF r FOR VALUES IN (2);
CREATE TABLE detached (id int NOT NULL, d int NOT NULL);
CREATE TABLE deep (id int, d int, v text, PRIMARY KEY (id, d)) PARTITION BY LIST (d);
CREATE TABLE branch PARTITION OF deep FOR VALUES IN (1, 2) PARTITION BY LIST (d);
CREATE TABLE deep1 PARTITION OF branch FOR VALUES IN (1);
CREATE TABLE doubled (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED);
CREATE TABLE coded (code text NOT NULL, v text); CREATE UNIQUE INDEX coded_code ON coded (code);
ALTER TABLE coded REPLICA IDENTITY USING INDEX coded_code;
CREATE PUBLICATION p FOR TABLE t, keyless, r, deep, doubled, coded
"""
AFRESH = """
DROP PUBLICATION IF EXISTS p; DROP SCHEMA IF EXISTS public, elsewhere CASCADE; CREATE SCHEMA public
"""


class Changed(NamedTuple):
    table: str
    difference: Difference
    what: str


def changes(before: Sequence[Table], now: Sequence[Table]) -> list[Changed]:
    """The changes of all tables that are in both catalogs, ordered by table name."""
    live = {table.name: table for table in now}
    return [Changed(table.name.name, found.difference, found.what)
            for table in sorted(before, key=lambda table: table.name) if table.name in live
            for found in differences.changes(table, live[table.name])]  # fmt: skip


@pytest.fixture
def watched(database: Database) -> Watched:
    def do(sql: str) -> Seen:
        with connect(database.conninfo) as conn, database.connect() as user:
            user.execute(AFRESH)
            user.execute(START)
            before: tuple[Table, ...] = read_tables(conn, ["p"])
            for statement in sql.split(";"):
                user.execute(statement.encode())
            return [(c.table, c.difference) for c in changes(before, read_tables(conn, ["p"]))]

    return do


CARRIED = (
    "INSERT INTO t VALUES (1000); UPDATE t SET id = -id; DELETE FROM r",
    "TRUNCATE t",
    "VACUUM FULL t",
    "CLUSTER t USING t_pkey",
    "ANALYZE",
    "ALTER TABLE t ALTER x SET STATISTICS 100",
    "CREATE INDEX ON t (x)",
    "ALTER TABLE t ALTER n SET DEFAULT 5",
    "CREATE TABLE other (id int PRIMARY KEY)",
    "CREATE UNLOGGED TABLE r3 PARTITION OF r FOR VALUES IN (3)",
    "CREATE TABLE new (id int PRIMARY KEY); ALTER PUBLICATION p ADD TABLE new",
    "ALTER TABLE t REPLICA IDENTITY FULL",
    "ALTER TABLE t REPLICA IDENTITY FULL; REINDEX TABLE t",
    "REINDEX TABLE CONCURRENTLY t; REINDEX TABLE coded",
    "ALTER TABLE t REPLICA IDENTITY USING INDEX t_pkey",
    "ALTER TABLE coded ADD UNIQUE (code); ALTER TABLE coded REPLICA IDENTITY FULL; "
    "ALTER TABLE coded REPLICA IDENTITY USING INDEX coded_code",
    "VACUUM FREEZE pg_publication_rel; VACUUM FULL pg_inherits; VACUUM FULL pg_depend",
    "VACUUM FULL deep; TRUNCATE deep1",
    "GRANT SELECT ON t, deep, deep1 TO public; COMMENT ON TABLE t IS 'x'",
    "CREATE SCHEMA elsewhere; ALTER TABLE t SET SCHEMA elsewhere; ALTER TABLE elsewhere.t SET SCHEMA public",
)


def test_changes_in_the_stream_and_changes_without_effect_on_mirrors_are_no_difference(watched: Watched) -> None:
    assert {done: seen for done in CARRIED if (seen := watched(done))} == {}


NOT_CARRIED: tuple[tuple[str, Seen], ...] = (
    ("ALTER TABLE t ADD added int", [("t", Difference.COLUMN_ADDED)]),
    ("ALTER TABLE t ADD added int DEFAULT 5", [("t", Difference.COLUMNS)]),
    ("ALTER TABLE t ADD added int DEFAULT 5; ALTER TABLE t ALTER added DROP DEFAULT",
     [("t", Difference.COLUMNS)]),
    ("ALTER TABLE t ADD added int DEFAULT 5; VACUUM FULL t", [("t", Difference.COLUMNS)]),
    ("ALTER TABLE t ADD added float8 DEFAULT random()", [("t", Difference.COLUMNS)]),
    ("ALTER TABLE t ADD added serial", [("t", Difference.COLUMNS)]),
    ("ALTER TABLE r ADD added int DEFAULT 5", [("r", Difference.COLUMNS)]),
    ("ALTER TABLE deep ADD added serial", [("deep", Difference.COLUMNS)]),
    ("ALTER TABLE r ADD added int", [("r", Difference.COLUMN_ADDED)]),
    ("ALTER TABLE t DROP n", [("t", Difference.COLUMNS)]),
    ("ALTER TABLE t RENAME n TO m", [("t", Difference.COLUMNS)]),
    ("ALTER TABLE t DROP n; ALTER TABLE t ADD n int",
     [("t", Difference.COLUMNS), ("t", Difference.COLUMN_ADDED)]),
    ("ALTER TABLE t ALTER n TYPE bigint",
     [("t", Difference.REWRITTEN), ("t", Difference.COLUMNS)]),
    ("ALTER TABLE t ALTER n TYPE int USING n + 1", [("t", Difference.REWRITTEN)]),
    ("ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (n)",
     [("t", Difference.KEY)]),
    ("ALTER TABLE t DROP CONSTRAINT t_pkey", [("t", Difference.KEY)]),
    ("ALTER TABLE keyless ADD PRIMARY KEY (id)", [("keyless", Difference.KEY)]),
    ("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id)", [("t", Difference.KEY)]),
    ("ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t DROP CONSTRAINT t_pkey; "
     "ALTER TABLE t ADD PRIMARY KEY (id); "
     "ALTER TABLE t REPLICA IDENTITY DEFAULT", [("t", Difference.KEY)]),
    ("ALTER TABLE coded REPLICA IDENTITY FULL; DROP INDEX coded_code; CREATE UNIQUE INDEX coded_code ON coded (code); "
     "ALTER TABLE coded REPLICA IDENTITY USING INDEX coded_code", [("coded", Difference.KEY)]),
    ("CREATE UNIQUE INDEX i ON t (id); ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY USING INDEX i",
     [("t", Difference.KEY)]),
    ("ALTER TABLE r DROP CONSTRAINT r_pkey; ALTER TABLE r ADD PRIMARY KEY (id, d)",
     [("r", Difference.KEY)]),
    ("CREATE TYPE mood AS ENUM ('sad', 'ok'); ALTER TABLE t ADD m mood[]; ALTER TYPE mood ADD VALUE 'fine'",
     [("t", Difference.COLUMN_ADDED)]),
    ("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, x text, n int); ALTER PUBLICATION p ADD TABLE t",
     [("t", Difference.RECREATED)]),
    ("ALTER PUBLICATION p DROP TABLE t; INSERT INTO t VALUES (1000); ALTER PUBLICATION p ADD TABLE t",
     [("t", Difference.REPUBLISHED)]),
    ("DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLE t",
     [("t", Difference.REPUBLISHED)]),
    ("ALTER PUBLICATION p DROP TABLE r; ALTER PUBLICATION p ADD TABLE r",
     [("r", Difference.REPUBLISHED)]),
    ("CREATE TABLE r3 PARTITION OF r FOR VALUES IN (3)", [("r", Difference.PARTITIONS)]),
    ("ALTER TABLE r DETACH PARTITION r1", [("r", Difference.PARTITIONS)]),
    ("ALTER TABLE r1 SET UNLOGGED", [("r", Difference.PARTITIONS)]),
    ("DROP TABLE r1; CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1)",
     [("r", Difference.PARTITIONS), ("r", Difference.PARTITIONS)]),
    ("ALTER TABLE r DETACH PARTITION r1; ALTER TABLE r ATTACH PARTITION r1 FOR VALUES IN (1)",
     [("r", Difference.PARTITIONS_UNTOLD)]),
    ("ALTER TABLE deep DETACH PARTITION branch; INSERT INTO branch VALUES (1, 1); "
     "ALTER TABLE deep ATTACH PARTITION branch FOR VALUES IN (1, 2)",
     [("deep", Difference.PARTITIONS_UNTOLD)]),
    ("ALTER TABLE deep1 SET UNLOGGED; INSERT INTO deep VALUES (1, 1); ALTER TABLE deep1 SET LOGGED",
     [("deep", Difference.NEW_FILES)]),
    ("ALTER TABLE r1 SET UNLOGGED; INSERT INTO r VALUES (1, 1); ALTER TABLE r1 SET LOGGED",
     [("r", Difference.NEW_FILES)]),
    ("TRUNCATE r1", [("r", Difference.NEW_FILES)]),
    ("ALTER TABLE detached ADD PRIMARY KEY (id, d); ALTER TABLE r ATTACH PARTITION detached FOR VALUES IN (4)",
     [("r", Difference.PARTITIONS)]),
)  # fmt: skip


def test_a_change_that_the_stream_does_not_contain_is_a_difference(watched: Watched) -> None:
    assert [(done, watched(done)) for done, _ in NOT_CARRIED] == list(NOT_CARRIED)


def test_operations_removed_from_the_publication_and_added_back_are_a_difference(watched: Watched) -> None:
    found = watched("ALTER PUBLICATION p SET (publish = 'insert'); ALTER PUBLICATION p SET (publish = "
                    "'insert, update, delete, truncate')")  # fmt: skip
    assert set(found) == {(name, Difference.REPUBLISHED) for name in ("t", "keyless", "r", "deep", "doubled", "coded")}


def test_a_column_that_is_no_longer_generated_is_a_difference(watched: Watched) -> None:
    """The column has values in older rows. PostgreSQL before 18 cannot publish generated columns, so these values were
    not published."""
    assert watched("ALTER TABLE doubled ALTER g DROP EXPRESSION; ALTER TABLE doubled ADD later int") == [
        ("doubled", Difference.COLUMNS), ("doubled", Difference.COLUMN_ADDED)
    ]  # fmt: skip


@pytest.mark.since(15, "row filters")
def test_a_new_row_filter_is_a_difference(watched: Watched) -> None:
    assert watched("ALTER PUBLICATION p SET TABLE t WHERE (id > 5), keyless, r, deep, doubled") == [
        ("t", Difference.REPUBLISHED)
    ]


@pytest.mark.since(15, "publications of schemas")
def test_a_schema_removed_from_the_publication_and_added_back_is_a_difference(database: Database) -> None:
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLES IN SCHEMA public")
        before = read_tables(conn, ["p"])
        user.execute("ALTER PUBLICATION p DROP TABLES IN SCHEMA public")
        user.execute("ALTER PUBLICATION p ADD TABLES IN SCHEMA public")
        assert [c.difference for c in changes(before, read_tables(conn, ["p"]))] == [Difference.REPUBLISHED]


def test_a_change_between_two_catalog_queries_is_seen_completely_or_not_at_all(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
        before = read_tables(conn, ["p"])
        read = PublicationRows.read

        def later(*args: Any) -> PublicationRows:
            user.execute("ALTER PUBLICATION p DROP TABLE t; ALTER PUBLICATION p ADD TABLE t")
            return read(*args)

        with monkeypatch.context() as patch:
            patch.setattr(PublicationRows, "read", later)
            assert changes(before, read_tables(conn, ["p"])) == []
        assert [change.difference for change in changes(before, read_tables(conn, ["p"]))] == [Difference.REPUBLISHED]


def test_a_renamed_enum_value_is_a_difference(database: Database) -> None:
    """The rename changes the value in every row that has it, without a message. An added value is in no row, so it is
    no difference."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE DOMAIN moods AS mood")
        for number, column in enumerate(("mood", "mood[]", "moods", "moods[]")):
            user.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY, m {column})".encode())
        user.execute("CREATE PUBLICATION p FOR TABLE t0, t1, t2, t3")
        before = read_tables(conn, ["p"])
        user.execute("ALTER TYPE mood ADD VALUE 'fine'")
        assert changes(before, read_tables(conn, ["p"])) == []
        user.execute("ALTER TYPE mood RENAME VALUE 'sad' TO 'down'")
        found = changes(before, read_tables(conn, ["p"]))
        assert [(one.table, one.difference) for one in found] == [(f"t{n}", Difference.VALUES) for n in range(4)]
        assert all("'sad'" in one.what for one in found)


MADE_OF = "CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TYPE pair AS (a int, m mood); CREATE TYPE deep AS (p pair[])"


COLUMNS_OF = ("pair", "pair[]", "pairs", "deep", "deep[]", "other", "other[]", "spans", "spans_m[]")
DONE_INSIDE = (
    "ALTER TYPE pair ADD ATTRIBUTE c int CASCADE",
    "ALTER TYPE pair DROP ATTRIBUTE a CASCADE",
    "ALTER TYPE pair ADD ATTRIBUTE c int CASCADE; ALTER TYPE pair DROP ATTRIBUTE c CASCADE",
    "ALTER TYPE pair DROP ATTRIBUTE a CASCADE; ALTER TYPE pair ADD ATTRIBUTE a int CASCADE",
    "ALTER TYPE mood RENAME VALUE 'sad' TO 'down'",
    "ALTER TYPE mood RENAME VALUE 'sad' TO 'x'; ALTER TYPE mood RENAME VALUE 'x' TO 'sad'",
)


def test_a_change_inside_a_column_type_is_a_difference(database: Database) -> None:
    """Covers composite types at any depth: row types of tables, domains, arrays and ranges, and enums inside of
    composite types."""
    with connect(database.conninfo) as conn, database.connect() as user:
        for done in DONE_INSIDE:
            user.execute(AFRESH)
            user.execute(MADE_OF.encode())
            user.execute("CREATE DOMAIN pairs AS pair; CREATE TABLE other (id int PRIMARY KEY, p pair)")
            user.execute("CREATE TYPE spans AS RANGE (subtype = pair, multirange_type_name = spans_m)")
            names = [f"t{number}" for number in range(len(COLUMNS_OF))]
            for name, column in zip(names, COLUMNS_OF, strict=True):
                user.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, c {column})".encode())
            user.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(names)}".encode())
            before = read_tables(conn, ["p"])
            user.execute("ALTER TYPE pair RENAME TO couple; ALTER TYPE couple RENAME ATTRIBUTE a TO b")
            user.execute("ALTER TYPE mood ADD VALUE 'fine'")
            assert changes(before, read_tables(conn, ["p"])) == []
            user.execute("ALTER TYPE couple RENAME ATTRIBUTE b TO a; ALTER TYPE couple RENAME TO pair")
            user.execute(done.encode())
            found = [(change.table, change.difference) for change in changes(before, read_tables(conn, ["p"]))]
            assert found == [(name, Difference.VALUES) for name in names], done


def test_a_column_added_to_a_row_type_is_a_difference(database: Database) -> None:
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TABLE inner_ (id int, b text); CREATE TABLE t (id int PRIMARY KEY, r inner_)")
        user.execute("CREATE PUBLICATION p FOR TABLE t")
        before = read_tables(conn, ["p"])
        user.execute("ALTER TABLE inner_ ADD c int")
        (change,) = changes(before, read_tables(conn, ["p"]))
        assert change.difference is Difference.VALUES
        assert "'inner_'" in change.what


@pytest.mark.parametrize("publication", ["FOR ALL TABLES", "FOR TABLES IN SCHEMA public"])
@pytest.mark.since(15, "publications of schemas")
def test_a_table_set_unlogged_and_logged_again_is_a_difference(database: Database, publication: str) -> None:
    """PostgreSQL refuses SET UNLOGGED only for a table that a publication lists by name. VACUUM FULL, TRUNCATE, CLUSTER
    and GRANT are no difference."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        user.execute(f"CREATE PUBLICATION p {publication}".encode())
        before = read_tables(conn, ["p"])
        for harmless in ("VACUUM FULL t", "TRUNCATE t", "CLUSTER t USING t_pkey", "GRANT SELECT ON t TO public"):
            user.execute(harmless.encode())
        assert changes(before, read_tables(conn, ["p"])) == []
        user.execute("ALTER TABLE t SET UNLOGGED; INSERT INTO t VALUES (1); ALTER TABLE t SET LOGGED")
        (change,) = changes(before, read_tables(conn, ["p"]))
        assert change.difference is Difference.NEW_FILES


@pytest.mark.parametrize("publication", ["FOR ALL TABLES", "FOR TABLES IN SCHEMA public"])
@pytest.mark.parametrize("done", ["ALTER TABLE t SET UNLOGGED; INSERT INTO t VALUES (1); ALTER TABLE t SET LOGGED",
                                  "TRUNCATE t", "VACUUM FULL t"])  # fmt: skip
@pytest.mark.since(15, "publications of schemas")
def test_new_files_of_a_table_without_toast_are_a_difference_if_no_publication_lists_its_name(
    database: Database, publication: str, done: str
) -> None:
    """If a table has no TOAST table, the catalog looks the same after each of these statements. Only SET UNLOGGED hides
    changes from the stream, but pgcdc must copy the table after each of them. The test's publications do not list the
    table by name. If one did, PostgreSQL would refuse SET UNLOGGED, and new files would be no difference."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY, v text)")
        user.execute(f"CREATE PUBLICATION p {publication}".encode())
        before = read_tables(conn, ["p"])
        user.execute("INSERT INTO t VALUES (7); ANALYZE t; GRANT SELECT ON t TO public; CREATE INDEX ON t (id)")
        assert changes(before, read_tables(conn, ["p"])) == []
        for statement in done.split("; "):
            user.execute(statement.encode())
        (change,) = changes(before, read_tables(conn, ["p"]))
        assert (change.table, change.difference) == ("t", Difference.NEW_FILES)
        assert "new files" in change.what


def test_a_truncated_leaf_that_is_published_via_its_root_is_a_difference(database: Database) -> None:
    """If a leaf is published via its root, PostgreSQL does not send a TRUNCATE of the leaf."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TABLE r (id int PRIMARY KEY, v text) PARTITION BY LIST (id)")
        user.execute("CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1)")
        user.execute("CREATE PUBLICATION p FOR TABLE r WITH (publish_via_partition_root = true)")
        before = read_tables(conn, ["p"])
        user.execute("INSERT INTO r VALUES (1, 'x'); ANALYZE r; GRANT SELECT ON r1 TO public")
        assert changes(before, read_tables(conn, ["p"])) == []
        user.execute("TRUNCATE r1")
        (change,) = changes(before, read_tables(conn, ["p"]))
        assert change.difference is Difference.NEW_FILES


@pytest.mark.parametrize("publication", ["FOR ALL TABLES", "FOR TABLE r"])
def test_a_table_that_lost_its_last_partition_is_still_published(database: Database, publication: str) -> None:
    """pg_publication_tables omits the table until the table has a partition again."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TABLE r (id int PRIMARY KEY) PARTITION BY LIST (id); "
                     "CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1)")  # fmt: skip
        user.execute(f"CREATE PUBLICATION p {publication}".encode())
        before = read_tables(conn, ["p"])
        user.execute("DROP TABLE r1")
        now = read_tables(conn, ["p"])
        assert [(change.table, change.what) for change in changes(before, now)] == [("r", "lost partition public.r1")]
        assert read_published(conn, ["p"]).keys() == {row[0] for row in read_beside_locks(conn, ["p"])}
        user.execute("CREATE TABLE r2 PARTITION OF r FOR VALUES IN (2)")
        (change,) = changes(now, read_tables(conn, ["p"]))
        assert (change.difference, change.what) == (Difference.PARTITIONS, "has a new partition public.r2")


@pytest.mark.parametrize("table", ["t", "listed"])
@pytest.mark.parametrize("done", ["TRUNCATE {}", "TRUNCATE {}; INSERT INTO {} VALUES (7)", "VACUUM FULL {}"])
def test_new_files_are_a_difference_if_truncate_is_not_published(database: Database, table: str, done: str) -> None:
    """A new relfilenode alone is usually no difference for a table with a TOAST table (t), or for a partition that the
    publication lists by name (listed). In this test, the new relfilenode may come from a TRUNCATE, which the stream
    does not contain."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE r (id int, v text) PARTITION BY LIST "
                     "(id); CREATE TABLE listed PARTITION OF r FOR VALUES IN (7)")  # fmt: skip
        user.execute("CREATE PUBLICATION p FOR TABLE t, listed WITH (publish = 'insert, update, delete')")
        before = read_tables(conn, ["p"])
        user.execute("INSERT INTO t VALUES (1); INSERT INTO r VALUES (7); ANALYZE; GRANT SELECT ON t, r TO public")
        assert changes(before, read_tables(conn, ["p"])) == []
        for statement in done.replace("{}", table).split("; "):
            user.execute(statement.encode())
        (change,) = changes(before, read_tables(conn, ["p"]))
        assert (change.table, change.difference) == (
            "t" if table == "t" else "r", Difference.NEW_FILES
        )  # fmt: skip


PUBLICATIONS = [f"{of} WITH (publish_via_partition_root = {via})" for of in ("FOR ALL TABLES", "FOR TABLE r, c")
                for via in ("false", "true")]  # fmt: skip
OUTSIDE = """
CREATE FUNCTION columnar(internal) RETURNS table_am_handler LANGUAGE internal AS 'heap_tableam_handler';
CREATE ACCESS METHOD columnar TYPE TABLE HANDLER columnar;
CREATE FOREIGN DATA WRAPPER w; CREATE SERVER far FOREIGN DATA WRAPPER w;
CREATE TABLE c (id int PRIMARY KEY) USING columnar;
CREATE TABLE r (id int) PARTITION BY LIST (id); ALTER TABLE r REPLICA IDENTITY FULL;
CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1); ALTER TABLE r1 REPLICA IDENTITY FULL
"""


@pytest.mark.parametrize("publication", PUBLICATIONS)
def test_leaves_that_are_not_decoded_are_not_part_of_the_mirror(database: Database, publication: str) -> None:
    """A new leaf that logical decoding does not cover, such as an UNLOGGED leaf, is no difference. A leaf that is SET
    LOGGED counts as a new partition of the table. A leaf that is SET UNLOGGED counts as a lost partition."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute(OUTSIDE)
        user.execute(f"CREATE PUBLICATION p {publication}".encode())
        before = read_tables(conn, ["p"])
        user.execute("CREATE FOREIGN TABLE r2 PARTITION OF r FOR VALUES IN (2) SERVER far; "
                     "CREATE UNLOGGED TABLE r3 PARTITION OF r FOR VALUES IN (3); "
                     "CREATE TABLE r4 PARTITION OF r FOR VALUES IN (4) USING columnar")  # fmt: skip
        now = read_tables(conn, ["p"])
        assert changes(before, now) == []
        itself, root = now
        assert refusal(itself) == (
            "it has the table access method columnar, which logical decoding does not cover: "
            "its rows are not replicated"
        )
        assert refusal(root) is None
        assert [leaf.name.name for leaf in root.leaves] == ["r1"]
        assert root.multiset, "a leaf that is not decoded does not affect the choice of the key"
        assert [(one.name.name, one.why) for one in root.outside] == [
            ("r2", "is a foreign table"), ("r3", "is UNLOGGED"),
            ("r4", "has the table access method columnar, which logical decoding does not cover"),
        ]  # fmt: skip
        findings = check_source(conn, Settings(source=database.conninfo, publication="p"))
        assert {one.what for one in findings if one.thing == "table public.r"} >= {str(one) for one in root.outside}
        assert set(stored_tables(conn, [root.oid])) == {root.oid, *(leaf.oid for leaf in root.leaves)}
        published = read_published(conn, ["p"], unread=True)
        refused = _without_identity(conn, published, read_relations(conn, published))
        assert {name.name for name in refused} == {"r4"}, "foreign and unlogged tables need no replica identity"
        snapshot = CatalogSnapshot.read(conn, ["p"], ())
        user.execute("ALTER TABLE r3 SET LOGGED; ALTER TABLE r3 REPLICA IDENTITY FULL")
        assert not snapshot.is_current(conn)
        (change,) = changes(before, read_tables(conn, ["p"]))
        assert (change.difference, change.what) == (Difference.PARTITIONS, "has a new partition public.r3")
        with_r3 = read_tables(conn, ["p"])
        user.execute("ALTER TABLE r3 SET UNLOGGED")
        (change,) = changes(with_r3, read_tables(conn, ["p"]))
        assert change.what == "lost partition public.r3, which is UNLOGGED"
        assert change.difference is (Difference.PARTITIONS_UNTOLD if root.via_root else Difference.PARTITIONS)


@pytest.mark.since(15, "publications of schemas")
def test_a_table_moved_out_of_the_published_schema_and_back_is_a_difference(database: Database) -> None:
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE SCHEMA s; CREATE SCHEMA elsewhere; CREATE TABLE s.t (id int PRIMARY KEY)")
        user.execute("CREATE TABLE s.r (id int PRIMARY KEY) PARTITION BY HASH (id); "
                     "CREATE TABLE s.r1 PARTITION OF s.r FOR VALUES WITH (MODULUS 1, REMAINDER 0)")  # fmt: skip
        user.execute("CREATE PUBLICATION p FOR TABLES IN SCHEMA s")
        before = read_tables(conn, ["p"])
        user.execute("GRANT ALL ON s.t TO public; ALTER TABLE s.t OWNER TO pg_monitor")
        user.execute("VACUUM FULL pg_depend")
        assert changes(before, read_tables(conn, ["p"])) == []
        for table in ("t", "r1"):
            user.execute(f"ALTER TABLE s.{table} SET SCHEMA elsewhere".encode())
            user.execute(f"ALTER TABLE elsewhere.{table} SET SCHEMA s".encode())
        found = changes(before, read_tables(conn, ["p"]))
        assert [(c.table, c.difference) for c in found] == [
            ("r", Difference.REPUBLISHED), ("t", Difference.REPUBLISHED)
        ]  # fmt: skip


@pytest.mark.parametrize("via_root", ["false", "true"])
def test_a_partition_whose_detach_was_interrupted_counts_as_lost(database: Database, via_root: str) -> None:
    """DETACH CONCURRENTLY has two steps. After the first step, queries of the root table do not see the partition's
    rows."""
    with connect(database.conninfo) as conn, database.connect() as user, database.connect() as reader:
        user.execute(START)
        user.execute(f"ALTER PUBLICATION p SET (publish_via_partition_root = {via_root})".encode())
        before = read_tables(conn, ["p"])
        reader.execute("BEGIN")
        reader.execute("SELECT FROM r")
        user.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            user.execute("ALTER TABLE r DETACH PARTITION r1 CONCURRENTLY")
        reader.execute("COMMIT")
        now = read_tables(conn, ["p"])
        assert [(c.table, c.difference) for c in changes(before, now)] == [
            ("r", Difference.PARTITIONS_UNTOLD if via_root == "true" else Difference.PARTITIONS)
        ]
        (r,) = (table for table in now if table.name.name == "r")
        assert [leaf.name.name for leaf in r.leaves] == ["r2"]
        assert {table.name.name for table in now} == {table.name.name for table in before}
        user.execute("ALTER TABLE r DETACH PARTITION r1 FINALIZE")
        assert changes(now, read_tables(conn, ["p"])) == []
