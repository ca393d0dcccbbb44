"""Transactions that hold something up on the source: open or prepared, in any of its databases."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg

# Slot creation waits for every transaction with an xid, in the whole cluster.
_WITH_XID = """
SELECT a.backend_xid::text::int8, age(a.backend_xid), a.pid, NULL, a.datname::text, a.application_name,
       clock_timestamp() - a.xact_start
FROM pg_catalog.pg_stat_activity a WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_backend_pid()
UNION ALL
SELECT p.transaction::text::int8, age(p.transaction), NULL, p.gid, p.database::text, NULL,
       clock_timestamp() - p.prepared
FROM pg_catalog.pg_prepared_xacts p
ORDER BY 2 DESC
"""
# pg_blocking_pids says 0 for a prepared transaction. Holders of the lock and those in front of us count alike.
_BLOCKING = """
SELECT a.backend_xid::text::int8, 0, b.pid, NULL, a.datname::text, a.application_name,
       clock_timestamp() - a.xact_start
FROM unnest(pg_catalog.pg_blocking_pids(%(pid)s)) AS b (pid)
JOIN pg_catalog.pg_stat_activity a ON a.pid = b.pid
UNION ALL
SELECT p.transaction::text::int8, 0, NULL, p.gid, p.database::text, NULL, clock_timestamp() - p.prepared
FROM pg_catalog.pg_prepared_xacts p WHERE 0 = ANY(pg_catalog.pg_blocking_pids(%(pid)s))
"""


@dataclass(frozen=True)
class Holder:
    """One transaction. ``age`` is None where the server does not tell it to us (pg_read_all_stats)."""

    xid: int | None
    pid: int | None
    gid: str | None
    database: str | None
    application: str | None
    age: timedelta | None

    def __str__(self) -> str:
        who = f"prepared transaction {self.gid!r}" if self.gid else f"pid {self.pid}"
        application = f" ({self.application})" if self.application else ""
        where = f" in database {self.database}" if self.database else ""
        age = f", open for {int(self.age.total_seconds())} s" if self.age is not None else ""
        return f"{who}{application}{where}{age}"


def transactions(conn: psycopg.Connection[Any]) -> list[Holder]:
    """Open and prepared transactions that have an xid, oldest first."""
    return [_holder(row) for row in conn.execute(_WITH_XID)]


def blockers(conn: psycopg.Connection[Any], pid: int) -> list[Holder]:
    """Whom the session ``pid`` waits for, asked from another session; empty when it does not wait."""
    return [_holder(row) for row in conn.execute(_BLOCKING, {"pid": pid})]


def _holder(row: tuple[Any, ...]) -> Holder:
    xid, _, pid, gid, database, application, age = row
    return Holder(xid, pid, gid, database, application or None, age)
