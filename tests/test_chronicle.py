"""Tests the oracle of histories with schema changes: compares its results with the known contents of tables."""

from __future__ import annotations

from collections import Counter

from tests.fix_postgres import Database
from tests.history.structure.chronicle import Chronicle


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
