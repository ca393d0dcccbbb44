"""Makes the databases: one per round of measurements, with its tables and its backlog."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer

HERE = Path(__file__).parent
PUBLICATION = "pgcdc"


@dataclass(frozen=True)
class Workload:
    """``tables`` are defined in workloads.sql. ``load`` writes the backlog and returns how many changed rows it has."""

    name: str
    tables: tuple[str, ...]
    load: Callable[[EmbeddedServer, str, float], int]


def program(server: EmbeddedServer, name: str, *args: str) -> float:
    """Run one of the server's own programs. Returns the seconds that it took."""
    started = time.monotonic()
    subprocess.run([str(server.bin / name), *args], check=True, capture_output=True)
    return time.monotonic() - started


def w1(server: EmbeddedServer, conninfo: str, scale: float) -> int:
    """Write 200,000 transactions, each with one update and one insert, from four clients."""
    each = int(200_000 * scale) // 4
    program(server, "pgbench", "-n", "-f", str(HERE / "w1.pgbench"), "--random-seed=42", "-c", "4", "-j", "2",
            "-t", str(each), "-d", conninfo)  # fmt: skip
    return each * 4 * 2


def w2(server: EmbeddedServer, conninfo: str, scale: float) -> int:
    """Insert 1,000,000 rows with 12 columns, 1,000 rows in each transaction."""
    rows = int(1_000_000 * scale)
    run(conninfo, f"CALL w2({rows}, 1000)")
    return rows


def w3(server: EmbeddedServer, conninfo: str, scale: float) -> int:
    """Write one transaction with 2,000,000 small rows."""
    rows = int(2_000_000 * scale)
    run(conninfo, f"INSERT INTO small SELECT g, g % 1000, md5(g::text) FROM generate_series(1, {rows}) g")
    return rows


WORKLOADS = {
    "W1": Workload("W1", ("accounts", "history"), w1),
    "W2": Workload("W2", ("wide",), w2),
    "W3": Workload("W3", ("small",), w3),
}
_TABLES = ("accounts", "history", "wide", "small", "snap")


def run(conninfo: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run the statements. Returns the rows of the last statement."""
    rows: list[tuple[Any, ...]] = []
    with psycopg.connect(conninfo, autocommit=True) as conn:
        for statement in statements:
            cursor = conn.execute(statement.encode())
            rows = cursor.fetchall() if cursor.description else []
    return rows


def flushed(conninfo: str) -> Lsn:
    """Wait until the backlog is on disk. Returns the LSN at its end."""
    run(conninfo, "CHECKPOINT")
    return Lsn.parse(str(run(conninfo, "SELECT pg_current_wal_flush_lsn()")[0][0]))


@contextmanager
def database(server: EmbeddedServer, name: str, tables: tuple[str, ...]) -> Iterator[str]:
    """A new database with these tables, for the duration of the block. It is then dropped with its slots, so that no
    slot keeps WAL."""
    admin = server.conninfo_of("postgres")
    run(admin, f'CREATE DATABASE "{name}"')
    conninfo = server.conninfo_of(name)
    run(conninfo, (HERE / "workloads.sql").read_text())
    run(conninfo, *(f"DROP TABLE {table} CASCADE" for table in _TABLES if table not in tables))
    try:
        yield conninfo
    finally:
        run(conninfo, *(f"DROP SUBSCRIPTION {sub}" for (sub,) in run(conninfo, "SELECT subname FROM pg_subscription "
                        "JOIN pg_database d ON d.oid = subdbid AND datname = current_database()")))  # fmt: skip
        run(admin, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
            f"WHERE database = '{name}' AND NOT active", f'DROP DATABASE "{name}" WITH (FORCE)')  # fmt: skip


def make_slot(conninfo: str, name: str) -> str:
    run(conninfo, f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    return name
