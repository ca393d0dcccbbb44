"""The embedded PostgreSQL server: one server per session, a new database per test. ``PGCDC_TEST_PG`` chooses the major
version: 18 by default, down to 14 (see tests/servers.py)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from tests.servers import new_server


@dataclass(frozen=True)
class Database:
    server: EmbeddedServer
    name: str

    @property
    def conninfo(self) -> str:
        return self.server.conninfo_of(self.name)

    def connect(self, **kwargs: Any) -> psycopg.Connection:
        return psycopg.connect(self.conninfo, **{"autocommit": True, **kwargs})


@pytest.fixture(scope="session")
def pg_version() -> int:
    return int(os.environ.get("PGCDC_TEST_PG", "18"))


@pytest.fixture(autouse=True)
def _new_enough(request: pytest.FixtureRequest, pg_version: int) -> None:
    """``@pytest.mark.since(15, "row filters")`` skips a test on older versions."""
    for marker in request.node.iter_markers("since"):
        version, what = marker.args
        if pg_version < version:
            pytest.skip(f"PostgreSQL {pg_version} has no {what} (since {version})")


@pytest.fixture(scope="session")
def server(pg_version: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    folder: Path = tmp_path_factory.mktemp("postgres") / "server"
    with new_server(folder, pg_version, settings=TEST_SETTINGS) as server:
        yield server


TEST_SETTINGS = {
    "max_prepared_transactions": "10",
    "wal_writer_delay": "50ms",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    # The following settings are not the defaults, because our code must not depend on a server's defaults.
    "TimeZone": "Asia/Kathmandu",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
}


@pytest.fixture
def database(server: EmbeddedServer) -> Iterator[Database]:
    with fresh_database(server) as database:
        yield database


@contextmanager
def fresh_database(server: EmbeddedServer, encoding: str = "UTF8") -> Iterator[Database]:
    """A new database. At the end it is dropped with its slots, even if a session still holds a slot."""
    name = f"t_{secrets.token_hex(5)}"
    with psycopg.connect(server.conninfo_of("postgres"), autocommit=True) as admin:
        made = "CREATE DATABASE {} TEMPLATE template0 ENCODING {} LC_COLLATE 'C' LC_CTYPE 'C'"
        made = "CREATE DATABASE {}" if encoding == "UTF8" else made
        admin.execute(sql.SQL(made).format(sql.Identifier(name), sql.Literal(encoding)))
    try:
        yield Database(server, name)
    finally:
        if server.running:
            _drop(server, name)


def _drop(server: EmbeddedServer, name: str) -> None:
    with psycopg.connect(server.conninfo_of("postgres"), autocommit=True) as admin:
        prepared = admin.execute("SELECT gid FROM pg_prepared_xacts WHERE database = %s", [name]).fetchall()
        if prepared:
            with psycopg.connect(server.conninfo_of(name), autocommit=True) as inside:
                for (gid,) in prepared:
                    inside.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        admin.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [name])
        admin.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", [name]
        )
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def inside(conn: psycopg.Connection[Any]) -> Lsn:
    """Returns the insert position plus 1. This LSN is inside the next WAL record. If nothing else is written, this
    record is the commit of the open transaction. Tests wait for a commit boundary above this LSN, which
    includes the transaction.

    Two simpler positions are wrong. The insert position after the commit may be above a record of the server itself (a
    checkpoint, running transactions). The server sends nothing for such a record, so a test could wait for ever. The
    insert position before the commit may be a commit boundary that does not include the transaction.
    """
    return Lsn(Lsn.parse(str(conn.execute("SELECT pg_current_wal_insert_lsn()").fetchall()[0][0])) + 1)


def committed(conn: psycopg.Connection[Any]) -> Lsn:
    """Commits the open transaction. Returns an LSN within the record of this commit, see `inside`."""
    at = inside(conn)
    conn.execute("COMMIT")
    return at
