"""Tests the journal and the chronicle: two records of the source's changes, from which other tests compute the rows
that a mirror must have at an LSN."""

from __future__ import annotations

from collections import Counter

from tests.fix_postgres import Database
from tests.history.structure.chronicle import Chronicle
from tests.journal import Journal
from tests.oracle import Rows, source_rows


def test_the_journal_returns_the_rows_of_each_table_at_every_commit(database: Database) -> None:
    with database.connect() as conn, database.connect() as left, database.connect() as right:
        conn.execute(
            "CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, v text, f float8,"
            " d int GENERATED ALWAYS AS (id * 2) STORED);"
            "CREATE TABLE part (id int, region text) PARTITION BY LIST (region);"
            "CREATE TABLE \"Odd.leaf\" PARTITION OF part FOR VALUES IN ('n');"
            "CREATE TABLE south (region text, id int); ALTER TABLE part ATTACH PARTITION south FOR VALUES IN ('s');"
            "INSERT INTO t SELECT g, 'old', g / 7.0 FROM generate_series(1, 5) g; INSERT INTO part VALUES (1, 'n')"
        )
        journal = Journal.keep(conn, "public.t", "public.part")
        states: list[tuple[Rows, Rows]] = []
        # Statements of two connections alternate. So transactions overlap, and commit in another order than they began.
        # The transaction of ``right`` also rolls back to a savepoint.
        left.execute("BEGIN; UPDATE t SET id = -id; INSERT INTO part VALUES (2, 's'), (2, 's')")
        right.execute(
            "BEGIN; INSERT INTO t VALUES (100, NULL, 'NaN'); SAVEPOINT a; INSERT INTO t VALUES (101, 'gone', 1)"
        )
        right.execute("ROLLBACK TO a; INSERT INTO t VALUES (102, E'quote '' \" , ( \\\\', 1e300)")
        for connection, statements in (
            (right, "COMMIT"),
            (left, "COMMIT"),
            (conn, "UPDATE part SET region = 's' WHERE id = 1"),
            (conn, "INSERT INTO part VALUES (7, 'n'); TRUNCATE part; INSERT INTO part VALUES (8, 'n')"),
            (conn, "INSERT INTO part VALUES (9, 's'); TRUNCATE \"Odd.leaf\""),
            (conn, "DELETE FROM t WHERE v = 'old'"),
            (conn, "TRUNCATE t, part RESTART IDENTITY; INSERT INTO t VALUES (1, 'new', 'infinity')"),
        ):
            connection.execute(statements.encode())
            states.append((source_rows(conn, "public", "t")[1], source_rows(conn, "public", "part")[1]))
        commits = journal.commits()
        lsns = sorted(int(high, 16) << 32 | int(low, 16) for high, low in (lsn.split("/") for lsn in commits.values()))
        assert len(lsns) == len(states)
        for lsn, before, (t, part) in zip(lsns, [states[0], *states], states, strict=False):
            assert (journal.rows_at("public.t", lsn + 1)[1], journal.rows_at("public.part", lsn + 1)[1]) == (t, part)
            if lsn != lsns[0]:
                assert journal.rows_at("public.t", lsn)[1] == before[0]


# The chronicle: expected rows in tests that also change the schema ----------------------------------


def test_chronicle_returns_the_rows_of_each_table_at_every_lsn(database: Database) -> None:
    with database.connect() as conn, database.connect() as writer:
        conn.execute("CREATE SCHEMA app; CREATE TABLE app.t (id int PRIMARY KEY, v text)")
        conn.execute("INSERT INTO app.t VALUES (1, 'before')")
        chronicle = Chronicle.begin(conn, ["app"])

        def transaction(*statements: str) -> None:
            writer.execute("BEGIN")
            for statement in statements:
                writer.execute(statement.encode())
            chronicle.announce(writer)
            writer.execute("COMMIT")
            chronicle.committed(["app"])

        transaction("INSERT INTO app.t VALUES (2, NULL)")
        transaction("ALTER TABLE app.t RENAME v TO w", "ALTER TABLE app.t RENAME TO u")
        chronicle.announce(writer)
        chronicle.committed(["app"])
        before = chronicle.announced
        writer.execute("TRUNCATE app.u")
        chronicle.announce(writer)
        chronicle.committed(["app"], since=before)
        commits = chronicle.commits()

    def at(lsn: int) -> list[list[tuple[str, tuple[str, ...], int]]]:
        return [[(title, table.columns, table.rows.total()) for title, table in known.items()]
                for known in chronicle.at(lsn, commits)]  # fmt: skip

    assert sorted(commits) == [0, 1, 2, 3, 4]
    first, second, third, fourth = (commits[number] for number in (1, 2, 3, 4))
    assert at(first) == [[("app.t", ("id", "v"), 1)]], "a boundary at a commit record lies before it"
    assert at(first + 1) == at(second) == [[("app.t", ("id", "v"), 2)]]
    assert at(second + 1) == at(third) == [[("app.u", ("id", "w"), 2)]]
    within = at(third + 1)
    assert within == at(fourth) == [[("app.u", ("id", "w"), 0)], [("app.u", ("id", "w"), 2)]], "nobody knows when"
    assert at(fourth + 1) == [[("app.u", ("id", "w"), 0)]]
    assert chronicle.at(second, commits)[0]["app.t"].rows == Counter({("1", "before"): 1, ("2", None): 1})
