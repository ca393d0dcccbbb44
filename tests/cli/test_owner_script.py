"""``pgcdc setup --sql`` prints an SQL script for the owner of the tables. After the owner has run the script, a role
with only REPLICATION and SELECT can run ``pgcdc setup``."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from tests.cli.conftest import Shell


@pytest.fixture
def role(shell: Shell) -> Iterator[str]:
    """A role name that needs quotes. The role itself does not exist yet."""
    name = f'Plain "{secrets.token_hex(4)}'
    yield name
    with shell.database.connect() as conn:
        quoted = sql.Identifier(name)
        if conn.execute("SELECT FROM pg_roles WHERE rolname = %s", [name]).fetchone():
            conn.execute(sql.SQL("DROP OWNED BY {}; DROP ROLE {}").format(quoted, quoted))


@pytest.fixture
def conn(shell: Shell) -> Iterator[psycopg.Connection]:
    with shell.database.connect() as conn:
        conn.execute('CREATE SCHEMA hr; CREATE TABLE hr."Staff list" (id int PRIMARY KEY);'
                     "CREATE TABLE hr.keyless (v int);"
                     "CREATE TABLE hr.p (id int, PRIMARY KEY (id)) PARTITION BY RANGE (id);"
                     "CREATE TABLE hr.p1 PARTITION OF hr.p FOR VALUES FROM (0) TO (10)")  # fmt: skip
        yield conn


def traces(conn: psycopg.Connection) -> list[tuple[object, ...]]:
    return conn.execute("SELECT pubname FROM pg_publication UNION ALL SELECT slot_name FROM pg_replication_slots"
                        " WHERE database = current_database()").fetchall()  # fmt: skip


def as_role(shell: Shell, role: str) -> str:
    return psycopg.conninfo.make_conninfo(shell.database.conninfo, user=role)


def test_a_role_with_few_rights_can_run_setup_after_the_owner_ran_the_sql_script(
    shell: Shell, conn: psycopg.Connection, role: str
) -> None:
    before = shell.files()
    script = shell.pgcdc("setup", "--sql", "--role", role)
    assert (traces(conn), shell.files()) == ([], before), "setup --sql changes nothing"
    assert "..." not in script
    conn.execute(script.encode())
    shell.set(SOURCE=as_role(shell, role))
    said = shell.pgcdc("setup")
    assert "5 tables are published" in said
    assert "hr.keyless  (inserts only)" in said
    shell.pgcdc("status")
    assert "no statement remains that an owner must run" in shell.pgcdc("setup", "--sql")
    conn.execute("INSERT INTO hr.keyless VALUES (1); UPDATE hr.keyless SET v = 2; UPDATE hr.p SET id = 3")


def test_the_owner_must_run_a_new_sql_script_for_a_table_created_later(
    shell: Shell, conn: psycopg.Connection, role: str
) -> None:
    """Until the owner has run the new script, setup fails and says that the role does not own the table. The new script
    contains only statements for this table."""
    conn.execute(shell.pgcdc("setup", "--sql", "--role", role).encode())
    shell.set(SOURCE=as_role(shell, role))
    shell.pgcdc("setup")
    conn.execute("CREATE TABLE hr.later (id int PRIMARY KEY)")
    said = shell.pgcdc("setup", expect=1)
    assert "hr.later: not owned by role" in said
    assert "let the owner run the script of `pgcdc setup --sql`" in said
    script = shell.pgcdc("setup", "--sql")
    statements = [line for line in script.splitlines() if not line.startswith("--")]
    assert [line.split(" TO ")[0] for line in statements] == [
        "GRANT SELECT ON TABLE hr.later",
        f'ALTER PUBLICATION "s_{shell.database.name}" ADD TABLE ONLY "hr"."later";',
    ]
    conn.execute(script.encode())
    assert "hr.later" in shell.pgcdc("setup")


def test_the_role_needs_the_right_to_read_an_unlogged_partition(
    shell: Shell, conn: psycopg.Connection, role: str
) -> None:
    """If somebody sets the partition LOGGED, the next copy of the partitioned table reads the partition, too."""
    conn.execute(shell.pgcdc("setup", "--sql", "--role", role).encode())
    conn.execute("CREATE UNLOGGED TABLE hr.p2 PARTITION OF hr.p FOR VALUES FROM (10) TO (20)")
    shell.set(SOURCE=as_role(shell, role))
    said, script = shell.pgcdc("setup"), shell.pgcdc("setup", "--sql")
    assert "ALTER TABLE hr.p2 SET LOGGED" in said
    for text in (said, script):
        assert "GRANT SELECT ON TABLE hr.p2 TO" in text
    conn.execute(script.encode())
    assert "GRANT" not in shell.pgcdc("setup")


def test_a_role_with_few_rights_can_use_a_publication_that_the_owner_created_by_hand(
    shell: Shell, conn: psycopg.Connection, role: str
) -> None:
    """The owner has not run the script of ``pgcdc setup --sql``. The role needs only REPLICATION, and the rights to
    read the tables."""
    quoted = sql.Identifier(role)
    conn.execute(sql.SQL("CREATE ROLE {0} LOGIN REPLICATION; GRANT USAGE ON SCHEMA hr TO {0};"
                         'GRANT SELECT ON hr."Staff list" TO {0}; CREATE PUBLICATION theirs FOR TABLE hr."Staff list"')
                 .format(quoted))  # fmt: skip
    shell.set(SOURCE=as_role(shell, role), PUBLICATION="theirs")
    assert "1 table is published" in shell.pgcdc("setup")
    shell.pgcdc("status")


def test_teardown_keeps_publications_of_the_owner(shell: Shell, conn: psycopg.Connection, role: str) -> None:
    conn.execute(shell.pgcdc("setup", "--sql", "--role", role).encode())
    shell.set(SOURCE=as_role(shell, role))
    shell.pgcdc("setup")
    said = shell.pgcdc("teardown", "--yes")
    name = f"s_{shell.database.name}"
    assert f"removed slot {name}" in said
    assert f"publication {name} stays: its owner can drop it" in said
    assert sorted(traces(conn)) == [(name,), (f"{name}_inserts",)]
    shell.pgcdc("setup")


def test_the_sql_script_warns_of_patterns_that_match_no_table_and_of_existing_publications(shell: Shell) -> None:
    shell.pgcdc("setup")
    shell.set(TABLES='["hr.p", "hr.absent"]')
    script = shell.pgcdc("setup", "--sql")
    assert "-- pattern `hr.absent`: in the setting `tables` matches no table" in script
    assert "-- These publications exist. If another project uses them, choose other names" in script
    assert "DROP TABLE" in script
