"""Every role can emit logical messages, until its rights are revoked with the statements in docs/operations.md."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.fix_postgres import Database

OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
EMIT = ("true, 'app', 'text'", "false, 'app', 'text'", "true, 'app', '\\x00'::bytea")
FLUSHED = ("false, 'app', 'text', true", "false, 'app', '\\x00'::bytea, true")


@pytest.fixture
def roles(database: Database) -> Iterator[tuple[str, str]]:
    names = (f"app_{secrets.token_hex(4)}", f"any_{secrets.token_hex(4)}")
    with database.connect() as conn:
        for name in names:
            conn.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
        yield names
        for name in names:
            conn.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


def may_emit(conn: psycopg.Connection, role: str, arguments: str) -> bool:
    with conn.transaction(force_rollback=True):
        conn.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(role)))
        try:
            conn.execute(f"SELECT pg_logical_emit_message({arguments})".encode())
        except psycopg.errors.InsufficientPrivilege:
            return False
    return True


def test_after_the_documented_statement_only_the_application_may_emit(
    database: Database, roles: tuple[str, str], pg_version: int
) -> None:
    application, other = roles
    (block,) = [text for text in re.findall(r"```sql\n(.*?)```", OPERATIONS, re.DOTALL) if "REVOKE EXECUTE" in text]
    every = (*EMIT, *(FLUSHED if pg_version >= 17 else ()))
    with database.connect() as conn:
        assert all(may_emit(conn, other, arguments) for arguments in every)
        conn.execute(block.replace("application", application).encode())
        assert [may_emit(conn, application, arguments) for arguments in every] == [True] * len(every)
        assert [may_emit(conn, other, arguments) for arguments in every] == [False] * len(every)
