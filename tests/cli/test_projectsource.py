"""A project works only with the source that it was set up with, even if PGCDC_SOURCE in the shell names a different
source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
import yaml
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgcdc_assets.cli.main import run
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo import shop
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import load_catalog, save_catalog
from pgcdc_assets.settings import STATE_FOLDER, Settings
from tests.cli.conftest import Shell, traces
from tests.fix_postgres import Database, fresh_database
from tests.projectfiles import CATALOG_FILE

COMMANDS = (
    ["status"], ["status", "--json"], ["setup"], ["setup", "--sql"], ["sync"], ["follow"], ["verify"],
    ["snapshot", "a"], ["heal", "a"], ["repair", "a", "--range", "0/1..0/2"], ["maintain"], ["up"],
    ["teardown", "--yes"],
)  # fmt: skip


@pytest.fixture
def other(database: Database) -> Iterator[Database]:
    with fresh_database(database.server) as other:
        with other.connect() as conn:
            conn.execute("CREATE TABLE elsewhere (id int PRIMARY KEY)")
        yield other


def test_a_command_without_the_setting_source_stops_and_changes_nothing(shell: Shell) -> None:
    shell.pgcdc("setup")
    Path("pgcdc.yaml").unlink()
    shell.set(SOURCE=None)
    before = shell.files()
    for arguments in COMMANDS:
        said = shell.pgcdc(*arguments, expect=2)
        assert "neither PGCDC_SOURCE nor `source`" in said
        assert f"set up for postgres@{shell.database.server.socket_folder}:5432/{shell.database.name}" in said
        assert len(said.strip().splitlines()) == 2
        assert shell.files() == before, arguments


def test_every_command_refuses_another_source_before_it_writes(shell: Shell, other: Database) -> None:
    shell.pgcdc("setup")
    before = shell.files()
    shell.set(SOURCE=other.conninfo)
    for arguments in COMMANDS:
        said = shell.pgcdc(*arguments, expect=2)
        assert f"is database {other.name} of system" in said
        assert f"this project was set up for postgres@{shell.database.server.socket_folder}" in said
        assert "pgcdc teardown --forget" in said
        assert len(said.strip().splitlines()) == 2
        assert (shell.files(), traces(other)) == (before, []), arguments


def test_a_source_with_the_same_database_name_and_another_system_identifier_is_refused(shell: Shell) -> None:
    shell.pgcdc("setup")
    saved = load_catalog(CATALOG_FILE)
    assert saved is not None
    save_catalog(replace(saved, identity=replace(saved.identity, system_identifier="1")), CATALOG_FILE)
    assert "this project was set up for database" in shell.pgcdc("status", expect=2)
    assert "of system 1;" in shell.pgcdc("setup", expect=2)


def test_a_lake_of_another_source_is_refused(shell: Shell, other: Database) -> None:
    """The lake is refused even if the project itself was never set up."""
    shell.pgcdc("setup")
    saved = load_catalog(CATALOG_FILE)
    assert saved is not None
    ChangeLog(Settings.load().layout).create(saved.identity, Lsn(16), 1)
    CATALOG_FILE.unlink()
    shell.set(SOURCE=other.conninfo)
    assert f"the lake {shell.folder / 'lake'} was set up for" in shell.pgcdc("setup", expect=2)
    assert traces(other) == []


def test_the_embedded_server_is_refused_for_a_project_of_another_source(shell: Shell) -> None:
    shell.pgcdc("setup")
    before = shell.files()
    shell.set(SOURCE="embedded")
    assert "embedded PostgreSQL: does not exist yet, but this project was set up" in shell.pgcdc("setup", expect=2)
    assert shell.files() == before


def test_without_source_and_setup_the_error_offers_a_database_or_the_embedded_server(shell: Shell) -> None:
    shell.set(SOURCE=None)
    for arguments in COMMANDS:
        said = shell.pgcdc(*arguments, expect=2)
        assert "PGCDC_SOURCE='host=" in said
        assert "or to `embedded`" in said
        assert shell.files() == {}, arguments


def test_setup_writes_the_source_into_the_settings_file(shell: Shell) -> None:
    """The rest of the file, with the user's comments, is not changed. A later shell does not need the variable
    PGCDC_SOURCE."""
    Path("pgcdc.yaml").write_text("# ours\nbatch_seconds: 2  # small\n")
    shell.set(SOURCE=f"{shell.database.conninfo} password=geheim sslpassword=secret2")
    said = shell.pgcdc("setup")
    assert "pgcdc.yaml: now contains the source, without its password; put the password into PGPASSWORD" in said
    text = Path("pgcdc.yaml").read_text()
    assert text.startswith("# ours\nbatch_seconds: 2  # small\nsource: ")
    assert not {"geheim", "secret2"} & set(text.replace("=", " ").split())
    shell.set(SOURCE=None)
    assert "nothing is wrong" in shell.pgcdc("status")
    assert "pgcdc.yaml" not in shell.pgcdc("setup")
    assert Path("pgcdc.yaml").read_text() == text


def test_a_url_with_a_password_is_written_without_the_password(shell: Shell) -> None:
    given = conninfo_to_dict(shell.database.conninfo)
    host = str(given["host"]).replace("/", "%2F")
    shell.set(SOURCE=f"postgresql://postgres:geheim@{host}:{given['port']}/{given['dbname']}")
    shell.pgcdc("setup")
    assert "geheim" not in b"".join(shell.files().values()).decode(errors="replace")
    assert conninfo_to_dict(yaml.safe_load(Path("pgcdc.yaml").read_text())["source"]) == given


def test_a_settings_file_in_yaml_flow_style_is_not_changed(shell: Shell) -> None:
    Path("pgcdc.yaml").write_text("{batch_seconds: 2}\n")
    said = shell.pgcdc("setup")
    assert "write this line into it: source: " in said
    assert Path("pgcdc.yaml").read_text() == "{batch_seconds: 2}\n"


def test_a_source_with_the_same_system_identifier_under_another_host_name_is_accepted(
    shell: Shell, tmp_path: Path
) -> None:
    """The server moved, or a standby was promoted. The system identifier decides whether the source is the same."""
    shell.pgcdc("setup")
    moved = tmp_path / "moved"
    moved.symlink_to(shell.database.server.socket_folder)
    shell.set(SOURCE=make_conninfo(shell.database.conninfo, host=str(moved)))
    assert "nothing is wrong" in shell.pgcdc("status")
    shell.pgcdc("setup")
    assert f"host={moved}" in Path("pgcdc.yaml").read_text()


def test_after_teardown_forget_a_project_can_use_another_source(shell: Shell, other: Database) -> None:
    """``--forget`` is for a source that no longer exists. So this teardown does not connect to the old source."""
    shell.pgcdc("setup")
    saved = load_catalog(CATALOG_FILE)
    assert saved is not None
    ChangeLog(Settings.load().layout).create(saved.identity, Lsn(16), 1)
    shell.set(SOURCE=other.conninfo)
    said = shell.pgcdc("teardown", "--forget", "--yes")
    assert "kept the change log, under the new name" in said
    assert f"belongs to database {shell.database.name}" in shell.pgcdc("setup", expect=1)
    shell.set(SLOT=f"s_{other.name}")
    shell.pgcdc("setup")
    assert Path("pgcdc.yaml").read_text().count("source:") == 1
    shell.set(SOURCE=None)
    assert "public.elsewhere" in shell.pgcdc("status")


@pytest.mark.long
def test_the_embedded_server_is_used_if_the_project_was_set_up_with_it(shell: Shell) -> None:
    shell.set(SOURCE="embedded", SLOT=None, PUBLICATION=None)
    server = shop.server(STATE_FOLDER)
    try:
        shell.pgcdc("setup")
        assert Path("pgcdc.yaml").read_text() == "source: embedded\n"
        Path("pgcdc.yaml").unlink()
        shell.set(SOURCE=None)
        assert "nothing is wrong" in shell.pgcdc("status"), "an older project has no source in its settings file"
        with psycopg.connect(conninfo_of(server.psql)) as conn:
            assert conn.execute("SELECT count(*) > 0 FROM orders").fetchone() == (True,)
        server.stop()
        said = shell.pgcdc("status", expect=1)
        assert "embedded PostgreSQL is not running; `pgcdc sync`" in said
        assert not server.running
    finally:
        server.stop()


def conninfo_of(psql: str) -> str:
    """Returns the conninfo of a psql command line, without the quotes that a shell would remove."""
    program, conninfo = psql.split(" ", 1)
    assert os.access(program, os.X_OK)
    return conninfo.strip("'")


# A database is identified by its OID ----------------------------------------------------------------


@contextmanager
def as_admin(shell: Shell) -> Iterator[psycopg.Connection]:
    with psycopg.connect(shell.database.server.conninfo_of("postgres"), autocommit=True) as conn:
        yield conn


def rename(shell: Shell, old: str, new: str) -> None:
    with as_admin(shell) as conn:
        conn.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [old])
        conn.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(old), sql.Identifier(new)))


@pytest.fixture
def renamed(shell: Shell) -> Iterator[Shell]:
    """A project whose database was renamed to ``<name>_new`` after a sync. This sync only received changes, so it
    started no Spark."""
    name = shell.database.name
    for command in ("setup", "pause apply", "sync"):
        shell.pgcdc(*command.split())
    rename(shell, name, f"{name}_new")
    yield shell
    rename(shell, f"{name}_new", name)


@pytest.mark.long
def test_a_project_continues_after_its_database_was_renamed(renamed: Shell) -> None:
    name = renamed.database.name
    log = ChangeLog(Settings.load().layout).open()
    before = log.position()
    assert "if it was renamed, set the new name" in renamed.pgcdc("sync", expect=1)
    renamed.set(SOURCE=renamed.database.server.conninfo_of(f"{name}_new"))
    assert "belongs to" not in renamed.pgcdc("status", expect=None)
    renamed.pgcdc("setup")
    assert f"{name}_new" in Path("pgcdc.yaml").read_text()
    saved = load_catalog(CATALOG_FILE)
    assert saved is not None
    assert saved.identity == log.identity, "the identity of the lake keeps the database's earlier name"
    with psycopg.connect(renamed.database.server.conninfo_of(f"{name}_new"), autocommit=True) as conn:
        conn.execute("INSERT INTO a VALUES (1)")
    renamed.pgcdc("sync")
    assert log.position() > before


def test_a_clone_that_has_the_old_name_of_a_renamed_database_is_refused(renamed: Shell) -> None:
    name = renamed.database.name
    with as_admin(renamed) as conn:
        old, new = sql.Identifier(name), sql.Identifier(f"{name}_new")
        conn.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(old, new))
        try:
            oids = dict(conn.execute("SELECT datname::text, oid::text FROM pg_database").fetchall())
            for command in ("status", "sync", "setup", "teardown --yes"):
                said = renamed.pgcdc(*command.split(), expect=2)
                assert f"is database {name} of system" in said
                assert f"(OID {oids[name]}), but this project was set up for" in said
                assert f"database {name} (OID {oids[f'{name}_new']}) of system" in said
            renamed.set(SOURCE=renamed.database.server.conninfo_of(f"{name}_new"))
            assert run(["setup"]) == 0
            renamed.set(SOURCE=renamed.database.conninfo)
            said = renamed.pgcdc("status", expect=2)
            assert f"/{name}_new (database {name} (OID {oids[f'{name}_new']})" in said
        finally:
            conn.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [name])
            conn.execute(sql.SQL("DROP DATABASE {}").format(old))
