"""What no LSN shows, each by doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.source.catalog import read_tables
from pgcdc_assets.source.connection import connect
from pgcdc_assets.source.published import PublicationRows
from pgcdc_assets.source.watch import Action, Kind, changes
from tests.fix_postgres import Database

Seen = list[tuple[str, Kind, Action]]
Watched = Callable[[str], Seen]

START = """
CREATE TABLE t (id int PRIMARY KEY, x text, n int); INSERT INTO t SELECT i, 'x', i FROM generate_series(1, 100) AS i;
CREATE TABLE keyless (id int); ALTER TABLE keyless REPLICA IDENTITY FULL;
CREATE TABLE r (id int, d int, PRIMARY KEY (id, d)) PARTITION BY LIST (d);
CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1); CREATE TABLE r2 PARTITION OF r FOR VALUES IN (2);
CREATE TABLE detached (id int NOT NULL, d int NOT NULL);
CREATE PUBLICATION p FOR TABLE t, keyless, r
"""


@pytest.fixture
def watched(database: Database) -> Watched:
    def do(sql: str) -> Seen:
        with connect(database.conninfo) as conn, database.connect() as user:
            if not read_tables(conn, ["p"]):
                user.execute(START)
            before: tuple[Table, ...] = read_tables(conn, ["p"])
            for statement in sql.split(";"):
                user.execute(statement.encode())
            return [(c.table.name, c.kind, c.action) for c in changes(before, read_tables(conn, ["p"]))]

    return do


@pytest.mark.parametrize(
    "harmless",
    [
        "INSERT INTO t VALUES (1000); UPDATE t SET id = -id; DELETE FROM r",
        "TRUNCATE t, r",
        "VACUUM FULL t",
        "CLUSTER t USING t_pkey",
        "ANALYZE",
        "ALTER TABLE t ALTER x SET STATISTICS 100",
        "CREATE INDEX ON t (x)",
        "ALTER TABLE t ALTER n SET DEFAULT 5",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "VACUUM FREEZE pg_publication_rel",
    ],
)
def test_what_the_stream_carries_is_no_change(watched: Watched, harmless: str) -> None:
    assert watched(harmless) == []


@pytest.mark.parametrize(
    ("done", "seen"),
    [
        ("ALTER TABLE t ADD added int", [("t", Kind.COLUMNS, Action.FOLLOW)]),
        ("ALTER TABLE t ADD added int DEFAULT 5", [("t", Kind.COLUMNS, Action.SET_ASIDE)]),
        ("ALTER TABLE t ADD added int DEFAULT 5; ALTER TABLE t ALTER added DROP DEFAULT",
         [("t", Kind.COLUMNS, Action.SET_ASIDE)]),
        ("ALTER TABLE t ADD added int DEFAULT 5; VACUUM FULL t", [("t", Kind.COLUMNS, Action.SET_ASIDE)]),
        ("ALTER TABLE t ADD added float8 DEFAULT random()", [("t", Kind.COLUMNS, Action.SET_ASIDE)]),
        ("ALTER TABLE t ADD added serial", [("t", Kind.COLUMNS, Action.SET_ASIDE)]),
        ("ALTER TABLE t DROP n", [("t", Kind.COLUMNS, Action.SET_ASIDE)]),
        ("ALTER TABLE t RENAME n TO m", [("t", Kind.COLUMNS, Action.SET_ASIDE)]),
        ("ALTER TABLE t DROP n; ALTER TABLE t ADD n int",
         [("t", Kind.COLUMNS, Action.SET_ASIDE), ("t", Kind.COLUMNS, Action.FOLLOW)]),
        ("ALTER TABLE t ALTER n TYPE bigint",
         [("t", Kind.REWRITTEN, Action.SET_ASIDE), ("t", Kind.COLUMNS, Action.SET_ASIDE)]),
        ("ALTER TABLE t ALTER n TYPE int USING n + 1", [("t", Kind.REWRITTEN, Action.SET_ASIDE)]),
        ("ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (n)",
         [("t", Kind.KEY, Action.SET_ASIDE)]),
        ("ALTER TABLE t DROP CONSTRAINT t_pkey", [("t", Kind.KEY, Action.SET_ASIDE)]),
        ("ALTER TABLE keyless ADD PRIMARY KEY (id)", [("keyless", Kind.KEY, Action.SET_ASIDE)]),
        ("CREATE TYPE mood AS ENUM ('sad', 'ok'); ALTER TABLE t ADD m mood[]; ALTER TYPE mood ADD VALUE 'fine'",
         [("t", Kind.COLUMNS, Action.FOLLOW)]),
        ("DROP TABLE t", [("t", Kind.UNPUBLISHED, Action.NONE)]),
        ("ALTER PUBLICATION p DROP TABLE t", [("t", Kind.UNPUBLISHED, Action.NONE)]),
        ("CREATE TABLE new (id int PRIMARY KEY); ALTER PUBLICATION p ADD TABLE new",
         [("new", Kind.NEW, Action.NONE)]),
        ("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, x text, n int); ALTER PUBLICATION p ADD TABLE t",
         [("t", Kind.RECREATED, Action.COPY)]),
        ("ALTER PUBLICATION p DROP TABLE t; INSERT INTO t VALUES (1000); ALTER PUBLICATION p ADD TABLE t",
         [("t", Kind.REPUBLISHED, Action.COPY)]),
        ("DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLE t",
         [("keyless", Kind.UNPUBLISHED, Action.NONE), ("r", Kind.UNPUBLISHED, Action.NONE),
          ("t", Kind.REPUBLISHED, Action.COPY)]),
        ("ALTER PUBLICATION p DROP TABLE r; ALTER PUBLICATION p ADD TABLE r", [("r", Kind.REPUBLISHED, Action.COPY)]),
        ("CREATE TABLE r3 PARTITION OF r FOR VALUES IN (3)", [("r", Kind.PARTITIONS, Action.COPY)]),
        ("ALTER TABLE r DETACH PARTITION r1", [("r", Kind.PARTITIONS, Action.COPY)]),
        ("DROP TABLE r1; CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1)",
         [("r", Kind.PARTITIONS, Action.COPY), ("r", Kind.PARTITIONS, Action.COPY)]),
        ("ALTER TABLE detached ADD PRIMARY KEY (id, d); ALTER TABLE r ATTACH PARTITION detached FOR VALUES IN (4)",
         [("r", Kind.PARTITIONS, Action.COPY)]),
    ],
)  # fmt: skip
def test_what_it_does_not_carry_is_seen(watched: Watched, done: str, seen: Seen) -> None:
    assert watched(done) == seen


def test_operations_taken_out_and_put_back(watched: Watched) -> None:
    found = watched("ALTER PUBLICATION p SET (publish = 'insert'); ALTER PUBLICATION p SET (publish = "
                    "'insert, update, delete, truncate')")  # fmt: skip
    assert set(found) == {(name, Kind.REPUBLISHED, Action.COPY) for name in ("t", "keyless", "r")}


@pytest.mark.since(15, "row filters")
def test_a_row_filter_that_came(watched: Watched) -> None:
    assert watched("ALTER PUBLICATION p SET TABLE t WHERE (id > 5), keyless, r") == [
        ("t", Kind.REPUBLISHED, Action.COPY)
    ]


@pytest.mark.since(15, "publications of schemas")
def test_the_schema_publication_that_came_and_went(database: Database) -> None:
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLES IN SCHEMA public")
        before = read_tables(conn, ["p"])
        user.execute("ALTER PUBLICATION p DROP TABLES IN SCHEMA public")
        user.execute("ALTER PUBLICATION p ADD TABLES IN SCHEMA public")
        assert [c.action for c in changes(before, read_tables(conn, ["p"]))] == [Action.COPY]


def test_a_change_between_two_queries_is_seen_whole_or_not_at_all(
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
        assert [change.kind for change in changes(before, read_tables(conn, ["p"]))] == [Kind.REPUBLISHED]


@pytest.mark.parametrize("column", ["mood", "mood[]", "moods", "moods[]"])
def test_a_renamed_value_of_an_enum(database: Database, column: str) -> None:
    """In every row that holds it, without a word in the stream; a value that was added is in none."""
    with connect(database.conninfo) as conn, database.connect() as user:
        user.execute("CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE DOMAIN moods AS mood")
        user.execute(f"CREATE TABLE t (id int PRIMARY KEY, m {column}); CREATE PUBLICATION p FOR TABLE t".encode())
        before = read_tables(conn, ["p"])
        user.execute("ALTER TYPE mood ADD VALUE 'fine'")
        assert changes(before, read_tables(conn, ["p"])) == []
        user.execute("ALTER TYPE mood RENAME VALUE 'sad' TO 'down'")
        (change,) = changes(before, read_tables(conn, ["p"]))
        assert (change.kind, change.action) == (Kind.LABELS, Action.COPY)
        assert "'sad'" in change.what
