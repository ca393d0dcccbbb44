"""Tables change their names and places while `pgcdc follow` runs: at the end each is equal, or told."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tests.end_to_end.command import Project, wait_for
from tests.fix_postgres import Database
from tests.journal import published
from tests.oracle import assert_equal

pytestmark = [pytest.mark.process, pytest.mark.long]

_MAKE = """
CREATE SCHEMA other;
CREATE TABLE renamed (id int PRIMARY KEY, v text);
CREATE TABLE moved (id int PRIMARY KEY, v text);
CREATE TABLE one (id int PRIMARY KEY, v text);
CREATE TABLE two (id int PRIMARY KEY, v text);
CREATE TABLE quiet (id int PRIMARY KEY, v text);
CREATE TABLE parts (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1);
CREATE TABLE parts_2 PARTITION OF parts FOR VALUES IN (2);
INSERT INTO renamed VALUES (1, 'a'); INSERT INTO moved VALUES (1, 'a'); INSERT INTO quiet VALUES (1, 'a');
INSERT INTO one VALUES (1, 'one'); INSERT INTO two VALUES (1, 'two'), (2, 'two');
INSERT INTO parts VALUES (1, 1, 'a'), (1, 2, 'b');
"""
_SWAP = "ALTER TABLE one RENAME TO x; ALTER TABLE two RENAME TO one; ALTER TABLE x RENAME TO two"
TABLES = ("renamed", "moved", "one", "two", "quiet", "parts")
MOVES = {
    "renamed away, written, renamed back": (
        "ALTER TABLE renamed RENAME TO away", "INSERT INTO away VALUES ({0}, 'away'); UPDATE away SET v = 'w{0}'",
        "ALTER TABLE away RENAME TO renamed",
    ),
    "detached, written, attached": (
        "ALTER TABLE parts DETACH PARTITION parts_1", "INSERT INTO parts_1 VALUES ({0}, 1, 'alone')",
        "DELETE FROM parts_1 WHERE id = 1", "ALTER TABLE parts ATTACH PARTITION parts_1 FOR VALUES IN (1)",
    ),
    "names swapped": (
        f"BEGIN; {_SWAP}; COMMIT", "INSERT INTO one VALUES ({0}, 'in one'); DELETE FROM two WHERE id = 1",
    ),
    "another schema for a while": (
        "ALTER TABLE moved SET SCHEMA other", "INSERT INTO other.moved VALUES ({0}, 'other')",
        "ALTER TABLE other.moved SET SCHEMA public",
    ),
}  # fmt: skip
"""Statements of transactions of their own, ``{0}`` a number that is new."""


@pytest.mark.timeout(1800)
def test_structure_moves_while_the_command_follows(database: Database, tmp_path: Path) -> None:
    project = Project(tmp_path, {"PGCDC_SOURCE": database.conninfo, "PGCDC_SLOT": f"s_{database.name}"[:60],
                                 "PGCDC_RANGE_SECONDS": "2", "PGCDC_TABLES": '["public.*"]'})  # fmt: skip
    with database.connect() as conn:
        conn.execute(_MAKE.encode())
        project.run("setup")
        project.run("sync")
        with project.running("follow") as follow:
            # Both within one look at the catalog, and with looks between the steps.
            for number, waits in ((100, False), (200, True)):
                for statements in MOVES.values():
                    for statement in statements:
                        conn.execute(statement.format(number).encode())
                        if waits:
                            _goes_on(project, conn)
                _goes_on(project, conn)
            assert follow.poll() is None, project.log("follow")
            told = _told(project)
            report = project.run("verify", "--json", expect=None).json
            assert follow.poll() is None, project.log("follow")
        counts = ("missing", "extra", "different")
        wrong = {table["name"] for table in report["tables"] if any(table[count] for count in counts)}
        assert wrong <= told | _told(project), f"not equal, and status says nothing of it: {wrong}, {report}"
        _back(project, conn)


def _goes_on(project: Project, conn: psycopg.Connection) -> None:
    """The run publishes what was written last, of a table that nobody moves."""
    conn.execute("UPDATE quiet SET v = v || '!'")
    row = conn.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    assert row is not None
    written = row[0]
    wait_for(lambda: published(project.lake)[-1][0] >= written, what="a point behind the last write")


def _told(project: Project) -> set[str]:
    """Tables of which status says that they are not served as they should be."""
    status = project.run("status", "--json", expect=None).json
    states = {table["name"] for table in status["tables"] if table["state"] != "streaming"}
    problems = " ".join(problem["what"] for problem in status["problems"])
    return states | {f"public.{table}" for table in TABLES if f"table public.{table} " in problems}


def _back(project: Project, conn: psycopg.Connection) -> None:
    """By the ways out that status names."""
    project.run("setup")
    aside = [table["name"] for table in project.run("status", "--json", expect=None).json["tables"]
             if table["state"] == "set_aside"]  # fmt: skip
    project.run(*(("snapshot", *aside) if aside else ("sync",)))
    assert_equal(conn, project.lake, *(f"public.{table}" for table in TABLES))
    assert project.run("verify", "--json").json["ok"]
