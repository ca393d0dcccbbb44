"""Copies of tables in pieces: every row is copied exactly once, and every block is CSV of whole rows."""

from __future__ import annotations

import csv
import io
import secrets
from collections.abc import Sequence

import pytest

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.errors import SourceNotReady
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.snapshot.export import exported_snapshot
from pgcdc_assets.source.snapshot.pieces import Piece, pieces
from pgcdc_assets.source.snapshot.reading import copy_blocks
from tests.fix_postgres import Database
from tests.waiting import wait_for

MIB = 1 << 20


def cut(database: Database, target: int, block: int = 1 << 16) -> dict[str, list[tuple[Piece, list[bytes]]]]:
    """Returns all pieces of each table of publication p, by table name. Each piece is returned with its blocks."""
    found: dict[str, list[tuple[Piece, list[bytes]]]] = {}
    with exported_snapshot(database.conninfo) as snapshot:
        with snapshot.reading() as conn:
            planned = {table.name.name: pieces(conn, table, target) for table in read_tables(conn, ["p"])}
        for name, cut_up in planned.items():
            found[name] = [
                (piece, list(copy_blocks(database.conninfo, snapshot.name, piece, block))) for piece in cut_up
            ]
    return found


def rows(blocks: Sequence[bytes]) -> list[list[str]]:
    return list(csv.reader(io.StringIO(b"".join(blocks).decode(), newline="")))


def test_pieces_contain_every_row_once_even_with_empty_pages_and_toast(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, x text, big text); CREATE PUBLICATION p FOR TABLE t")
        conn.execute("ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
        conn.execute("INSERT INTO t SELECT i, repeat('x', 500), CASE WHEN i % 100 = 0 THEN repeat('y', 20000) END "
                     "FROM generate_series(1, 10000) AS i")  # fmt: skip
        conn.execute("DELETE FROM t WHERE id BETWEEN 3000 AND 5000; ANALYZE t")
    parts = cut(database, MIB)["t"]
    assert 6 <= len(parts) <= 12
    ids = [int(row[0]) for _, blocks in parts for row in rows(blocks)]
    assert sorted(ids) == [*range(1, 3000), *range(5001, 10001)]
    assert len(set(ids)) == len(ids)
    assert parts[0][0].condition.count("ctid <") == 1
    assert "ctid <" not in parts[-1][0].condition, "the last piece has no upper limit"
    assert sum(piece.bytes_estimate for piece, _ in parts) > 6 * MIB


def test_blocks_are_whole_rows_and_null_differs_from_the_empty_string(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, x text); CREATE PUBLICATION p FOR TABLE t")
        conn.execute("INSERT INTO t SELECT i, E'line\\nbreak \"quoted\", ☃' || i FROM generate_series(1, 5000) AS i;"
                     "INSERT INTO t VALUES (5001, NULL), (5002, '')")  # fmt: skip
    ((_, blocks),) = cut(database, 1 << 30, block=1000)["t"]
    assert len(blocks) > 100
    assert all(1000 <= len(block) < 1200 for block in blocks[:-1])
    assert all(block.startswith(b'"') and block.endswith(b"\n") for block in blocks)
    assert sum(len(rows([block])) for block in blocks) == 5002
    assert b'"5001",\n' in b"".join(blocks)
    assert b'"5002",""\n' in b"".join(blocks)


def test_empty_tables_and_tables_without_columns_are_copied(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE empty (id int PRIMARY KEY); CREATE TABLE bare (); INSERT INTO bare DEFAULT VALUES")
        conn.execute("ALTER TABLE bare REPLICA IDENTITY FULL; CREATE PUBLICATION p FOR TABLE empty, bare")
    found = cut(database, MIB)
    assert [blocks for _, blocks in found["empty"]] == [[]]
    assert [blocks for _, blocks in found["bare"]] == [[b"\n"]]


@pytest.mark.since(15, "row filters and column lists")
def test_only_published_rows_and_columns_are_copied(database: Database) -> None:
    """Covers column lists, row filters, generated columns, and child tables (INHERITS)."""
    with database.connect() as conn:
        conn.execute(
            "CREATE TABLE cut (id int PRIMARY KEY, secret text, shown text); INSERT INTO cut VALUES (1, 's', 'x');"
            'CREATE TABLE filtered (id int PRIMARY KEY, "{}%s" text);'
            "INSERT INTO filtered SELECT i, '{}%s' FROM generate_series(1, 10) AS i;"
            "CREATE TABLE made (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED);"
            "INSERT INTO made VALUES (4);"
            "CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child () INHERITS (parent);"
            "INSERT INTO parent VALUES (1); INSERT INTO child VALUES (2);"
            "CREATE PUBLICATION p FOR TABLE cut (id, shown), made, ONLY parent,"
            "filtered WHERE (\"{}%s\" = '{}%s' AND id > 7 OR id = 1)"
        )
        version = conn.info.server_version
    found = {name: rows(parts[0][1]) for name, parts in cut(database, MIB).items()}
    assert found["cut"] == [["1", "x"]]
    assert [row[0] for row in found["filtered"]] == ["1", "8", "9", "10"]
    assert found["made"] == [["4"]]
    assert found["parent"] == [["1"]]
    if version >= 180000:
        with database.connect() as conn:
            conn.execute("ALTER PUBLICATION p SET (publish_generated_columns = stored)")
        assert rows(cut(database, MIB)["made"][0][1]) == [["4", "8"]]


@pytest.mark.since(15, "row filters")
def test_a_row_filter_applies_to_every_piece(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, x text);"
                     "INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series(1, 5000) AS i;"
                     "CREATE PUBLICATION p FOR TABLE t WHERE (id < 10 OR id > 4990)")  # fmt: skip
    parts = cut(database, MIB // 2)["t"]
    assert len(parts) > 2
    assert [int(row[0]) for _, blocks in parts for row in rows(blocks)] == [*range(1, 10), *range(4991, 5001)]


@pytest.mark.parametrize("via_root", [False, True])
def test_partitions_are_copied_leaf_by_leaf(database: Database, via_root: bool) -> None:
    with database.connect() as conn:
        conn.execute(
            "CREATE TABLE r (id int, d int, PRIMARY KEY (id, d)) PARTITION BY LIST (d);"
            "CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1);"
            "CREATE TABLE r2 (x int, d int NOT NULL, id int NOT NULL); ALTER TABLE r2 DROP x;"
            "ALTER TABLE r ATTACH PARTITION r2 FOR VALUES IN (2); INSERT INTO r VALUES (7, 1), (8, 2), (9, 2);"
        )
        conn.execute(f"CREATE PUBLICATION p FOR TABLE r WITH (publish_via_partition_root = {via_root})".encode())
    parts = cut(database, MIB)["r"]
    assert {piece.leaf.name: rows(blocks) for piece, blocks in parts if piece.leaf} == {
        "r1": [["7", "1"]], "r2": [["8", "2"], ["9", "2"]],
    }  # fmt: skip


def test_a_copy_fails_if_row_level_security_would_hide_rows(database: Database) -> None:
    role = f"reader_{secrets.token_hex(4)}"
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (i int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 11);"
                     "ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON t USING (i <= 6);"
                     "CREATE PUBLICATION p FOR TABLE t")  # fmt: skip
        conn.execute(f"CREATE ROLE {role} LOGIN; GRANT SELECT ON t TO {role}".encode())
        try:
            with exported_snapshot(database.conninfo) as snapshot:
                table: Table = read_tables(conn, ["p"])[0]
                (piece,) = pieces(conn, table, MIB)
                assert len(rows(list(copy_blocks(database.conninfo, snapshot.name, piece, MIB)))) == 11
                with pytest.raises(SourceNotReady, match="row-level security"):
                    list(copy_blocks(f"{database.conninfo} user={role}", snapshot.name, piece, MIB))
        finally:
            conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_a_copy_that_is_stopped_early_leaves_no_session_on_the_server(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("CREATE TABLE t (i int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 200000);"
                     "CREATE PUBLICATION p FOR TABLE t")  # fmt: skip
        with exported_snapshot(database.conninfo) as snapshot:
            (piece,) = pieces(conn, read_tables(conn, ["p"])[0], 1 << 30)
            blocks = copy_blocks(database.conninfo, snapshot.name, piece, 1000)
            next(blocks)
            blocks.close()  # type: ignore[attr-defined]
            copying = (
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgcdc_assets/copy' AND datname = %s"
            )
            wait_for(lambda: conn.execute(copying, [database.name]).fetchone() == (0,), what="the session's end")
