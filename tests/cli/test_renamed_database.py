"""A database is identified by its OID: after a rename it is still the same database, but a clone with the same name is
not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from pgcdc_assets.cli.main import run
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings
from tests.cli.conftest import Shell
from tests.projectfiles import CATALOG_FILE


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
    """A project that was synced without Spark, and whose database was then renamed to ``<name>_new``."""
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
    assert saved.identity == log.identity, "what the lake holds is found under the name of its beginning"
    with psycopg.connect(renamed.database.server.conninfo_of(f"{name}_new"), autocommit=True) as conn:
        conn.execute("INSERT INTO a VALUES (1)")
    renamed.pgcdc("sync")
    assert log.position() > before


def test_a_clone_with_the_old_name_is_refused(renamed: Shell) -> None:
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
