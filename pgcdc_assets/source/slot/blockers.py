"""Finds the open and prepared transactions on the source for which pgcdc waits, so that errors and log lines can name
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg

from pgcdc_assets.source.connect.connection import log_waiting

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
# Selects the transactions that hold one of these locks on a table or its children, or queue for such a lock. A new
# request waits for both kinds of transactions. A prepared transaction has no pid in pg_locks. The lock on its own xid
# identifies it.
_LOCKING = """
WITH RECURSIVE t AS (SELECT r AS oid FROM unnest(%s::oid[]) AS r
                     UNION SELECT i.inhrelid FROM pg_catalog.pg_inherits i JOIN t ON i.inhparent = t.oid)
SELECT DISTINCT coalesce(a.backend_xid, x.transaction)::text::int8, 0, l.pid, x.gid, d.datname::text,
       a.application_name, clock_timestamp() - coalesce(a.xact_start, x.prepared)
FROM pg_catalog.pg_locks l
JOIN pg_catalog.pg_database d ON d.oid = l.database AND d.datname = current_database()
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_catalog.pg_locks own ON l.pid IS NULL AND own.pid IS NULL AND own.locktype = 'transactionid'
  AND own.virtualtransaction = l.virtualtransaction
LEFT JOIN pg_catalog.pg_prepared_xacts x ON x.transaction = own.transactionid
WHERE l.locktype = 'relation' AND l.mode = ANY(%s)
  AND l.relation IN (SELECT oid FROM t)
"""
_ALTERING = [
    "ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock",
]  # fmt: skip


@dataclass(frozen=True)
class Blocker:
    """A transaction for which pgcdc waits. ``age``: how long it has been open; None if our role may not see this
    (pg_read_all_stats)."""

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


def transactions(conn: psycopg.Connection[Any]) -> list[Blocker]:
    """Returns the open and prepared transactions of the whole cluster that have an xid, oldest first."""
    return [_holder(row) for row in conn.execute(_WITH_XID)]


def lockers(conn: psycopg.Connection[Any], tables: Sequence[int]) -> list[Blocker]:
    """Returns the transactions that hold or wait for ACCESS EXCLUSIVE on these tables. Readers queue behind them."""
    return [_holder(row) for row in conn.execute(_LOCKING, [list(tables), ["AccessExclusiveLock"]])]


def alterers(conn: psycopg.Connection[Any], tables: Sequence[int]) -> list[Blocker]:
    """Returns the transactions that hold or wait for a lock of DDL, VACUUM or an index build on one of these tables."""
    return [_holder(row) for row in conn.execute(_LOCKING, [list(tables), _ALTERING])]


def _holder(row: tuple[Any, ...]) -> Blocker:
    xid, _, pid, gid, database, application, age = row
    return Blocker(xid, pid, gid, database, application or None, age)


def log_blockers(blockers: list[Blocker]) -> None:
    log_waiting(", ".join(str(blocker) for blocker in blockers) or "unknown sessions")


OnWait = Callable[[list[Blocker]], None]
