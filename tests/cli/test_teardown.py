"""Teardown removes what setup made. It keeps publications that another project reads, and slots and publications of
other owners, and reports what it keeps."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgcdc_assets.project import load_note
from pgcdc_assets.settings import STATE_FOLDER
from tests.cli.conftest import Shell
from tests.projectfiles import NOTE_FILE


@pytest.fixture
def conn(shell: Shell) -> Iterator[psycopg.Connection]:
    with shell.database.connect() as conn:
        yield conn


@pytest.fixture
def role(shell: Shell, conn: psycopg.Connection) -> Iterator[str]:
    """A role that may replicate and read, but may not create publications."""
    name = f"plain_{secrets.token_hex(4)}"
    conn.execute(
        f"CREATE ROLE {name} LOGIN REPLICATION; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}".encode()
    )
    yield name
    conn.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


def left(conn: psycopg.Connection) -> set[str]:
    rows = conn.execute(
        "SELECT 'publication ' || pubname FROM pg_publication UNION ALL SELECT 'slot ' || slot_name"
        " FROM pg_replication_slots WHERE database = current_database()"
    ).fetchall()
    return {name for (name,) in rows}


def as_role(shell: Shell, role: str) -> None:
    shell.set(SOURCE=make_conninfo(shell.database.conninfo, user=role))


def test_teardown_removes_our_slot_and_keeps_a_publication_that_the_owner_of_the_tables_made(
    shell: Shell, conn: psycopg.Connection, role: str
) -> None:
    """Teardown knows from the project's own record that the slot is ours. Nothing on the source shows it."""
    conn.execute("CREATE PUBLICATION theirs FOR TABLE a")
    as_role(shell, role)
    shell.set(PUBLICATION="theirs")
    shell.pgcdc("setup")
    slot = f"slot s_{shell.database.name}"
    assert left(conn) == {"publication theirs", slot}
    asked = shell.pgcdc("teardown", expect=2)
    assert slot in asked
    assert "theirs" not in asked
    said = shell.pgcdc("teardown", "--yes")
    assert f"removed {slot}" in said
    assert "publication theirs stays: setup did not create it" in said
    assert left(conn) == {"publication theirs"}
    again = shell.pgcdc("teardown", "--yes", "--lake")
    assert again.startswith("removed nothing from the source\nthere is no lake ")


def test_a_slot_that_the_project_did_not_record_is_kept_and_reported(
    shell: Shell, conn: psycopg.Connection, role: str
) -> None:
    """The project's record is deleted before teardown. The statement that teardown advises then drops the slot."""
    conn.execute("CREATE PUBLICATION theirs FOR TABLE a")
    as_role(shell, role)
    shell.set(PUBLICATION="theirs")
    shell.pgcdc("setup")
    NOTE_FILE.unlink()
    said = shell.pgcdc("teardown", "--yes")
    slot = f"s_{shell.database.name}"
    statement = f"SELECT pg_drop_replication_slot('{slot}')"
    assert f"slot {slot} stays: setup did not create it; if it is not needed: {statement}" in said
    conn.execute(statement.encode())
    assert left(conn) == {"publication theirs"}


def test_a_slot_is_recorded_before_it_is_created(shell: Shell, conn: psycopg.Connection, role: str) -> None:
    """If setup is killed while it waits for its slot, the project's record names every slot that exists."""
    conn.execute("CREATE PUBLICATION theirs FOR TABLE a")
    as_role(shell, role)
    shell.set(PUBLICATION="theirs")
    noted: list[tuple[str, ...]] = []

    def dies(*arguments: object, **options: object) -> None:
        noted.append(load_note(STATE_FOLDER).made)
        raise KeyboardInterrupt

    with shell.patch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("pgcdc_assets.source.setup.setup.create_slot", dies)
        shell.pgcdc("setup", expect=1)
    assert noted == [(f"slot s_{shell.database.name}",)]


def test_teardown_exits_with_code_1_if_it_cannot_remove_something_that_setup_made(
    shell: Shell, conn: psycopg.Connection, role: str
) -> None:
    shell.pgcdc("setup")
    as_role(shell, role)
    name = f"s_{shell.database.name}"
    said = shell.pgcdc("teardown", "--yes", expect=1)
    assert f"publication {name} stays: its owner can drop it" in said
    assert left(conn) == {f"publication {name}", f"publication {name}_inserts"}
    shell.set(SOURCE=shell.database.conninfo)
    shell.pgcdc("teardown", "--yes")
    assert left(conn) == set()
    assert not NOTE_FILE.exists()


@pytest.fixture
def sharing(shell: Shell, conn: psycopg.Connection) -> tuple[Path, Path]:
    """Two projects of one database. The second project reads the publication that the first project made."""
    first, second = shell.folder, shell.folder.with_name("second")
    shell.pgcdc("setup")
    second.mkdir()
    shell.patch.chdir(second)
    shell.set(SLOT=f"second_{shell.database.name}")
    shell.pgcdc("setup")
    return first, second


def in_project(shell: Shell, folder: Path, slot: str) -> None:
    shell.patch.chdir(folder)
    shell.set(SLOT=f"{slot}_{shell.database.name}")


def test_setup_creates_nothing_if_no_table_of_the_owners_publication_is_selected(
    shell: Shell, conn: psycopg.Connection
) -> None:
    conn.execute("CREATE PUBLICATION theirs FOR TABLE a")
    shell.set(PUBLICATION="theirs", TABLES='["public.b"]')
    said = shell.pgcdc("setup", expect=1)
    assert "publication theirs: lists no table that the setting `tables` selects" in said
    assert left(conn) == {"publication theirs"}


def test_a_publication_that_another_project_reads_is_not_dropped(
    shell: Shell, conn: psycopg.Connection, sharing: tuple[Path, Path]
) -> None:
    first, second = sharing
    in_project(shell, first, "s")
    before, traces = shell.files(), left(conn)
    said = shell.pgcdc("teardown", "--yes", expect=2)
    name = shell.database.name
    assert f"publication s_{name}: is used by slot second_{name} of another project" in said
    assert (shell.files(), left(conn)) == (before, traces)
    in_project(shell, second, "second")
    said = shell.pgcdc("teardown", "--yes")
    assert f"publication s_{name} stays: another project made it, for slot s_{name}" in said
    in_project(shell, first, "s")
    shell.pgcdc("teardown", "--yes")
    assert left(conn) == set()


@pytest.fixture
def alike(shell: Shell) -> tuple[Path, Path]:
    """Two projects with the same slot name. The second project is not set up yet."""
    shell.pgcdc("setup")
    second = shell.folder.with_name("second")
    second.mkdir()
    return shell.folder, second


def test_teardown_of_a_project_that_made_nothing_removes_nothing(
    shell: Shell, conn: psycopg.Connection, alike: tuple[Path, Path]
) -> None:
    first, second = alike
    shell.patch.chdir(second)
    name, before = f"s_{shell.database.name}", left(conn)
    for _ in range(2):
        asked = shell.pgcdc("teardown", expect=2)
        assert name not in asked
        said = shell.pgcdc("teardown", "--yes")
        for thing in (f"slot {name}", f"publication {name}", f"publication {name}_inserts"):
            assert f"{thing} stays: this project did not create it; if no other project needs it, run " in said
        assert left(conn) == before
        # In the first pass of the loop, the second project is not set up yet when teardown runs. In the second pass it
        # is.
        said = shell.pgcdc("setup")
        assert f"warning: slot {name}: exists, but this project did not create it" in said
    shell.patch.chdir(first)
    assert "did not create it" not in shell.pgcdc("setup")
    shell.pgcdc("teardown", "--yes")
    assert left(conn) == set()


def test_setup_does_not_change_the_publications_of_another_project(
    shell: Shell, conn: psycopg.Connection, alike: tuple[Path, Path]
) -> None:
    first, second = alike
    listed = "SELECT pubname, schemaname, tablename FROM pg_publication_tables ORDER BY 1, 2, 3"
    before = conn.execute(listed).fetchall()
    shell.patch.chdir(second)
    shell.set(TABLES='["a"]')
    said = shell.pgcdc("setup", expect=1)
    assert f"slot s_{shell.database.name}: belongs to another project: setup would change the tables of its" in said
    assert conn.execute(listed).fetchall() == before
    shell.patch.chdir(first)
    assert "1 table is published" in shell.pgcdc("setup")


def test_teardown_with_the_option_shared_removes_what_another_project_made(
    shell: Shell, conn: psycopg.Connection, alike: tuple[Path, Path]
) -> None:
    shell.patch.chdir(alike[1])
    shell.pgcdc("teardown", "--yes", "--shared")
    assert left(conn) == set()


def test_teardown_drops_our_publications_even_if_somebody_changed_their_comment(
    shell: Shell, conn: psycopg.Connection
) -> None:
    shell.pgcdc("setup")
    for name in ("", "_inserts"):
        publication = sql.Identifier(f"s_{shell.database.name}{name}")
        conn.execute(sql.SQL("COMMENT ON PUBLICATION {} IS 'do not touch'").format(publication))
    shell.pgcdc("teardown", "--yes")
    assert left(conn) == set()


def test_publications_are_recorded_before_the_slot_is_created(shell: Shell, conn: psycopg.Connection) -> None:
    """If setup is killed while it waits for its slot, the project's record names every publication that it made."""

    def dies(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with shell.patch.context() as patch:
        patch.setattr("pgcdc_assets.source.setup.publications.OwnPair._settle", dies)
        shell.pgcdc("setup", expect=1)
    assert left(conn)
    shell.pgcdc("teardown", "--yes")
    assert left(conn) == set()


def test_status_advises_teardown_only_once_if_one_of_two_publications_is_missing(
    shell: Shell, conn: psycopg.Connection
) -> None:
    conn.execute("CREATE TABLE keyless (v int)")
    shell.pgcdc("setup")
    conn.execute(sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(f"s_{shell.database.name}_inserts")))
    said = shell.pgcdc("status", expect=1)
    assert said.count("run `pgcdc teardown`, then `pgcdc setup` and") == 1
    assert "; run `pgcdc setup`" not in said
