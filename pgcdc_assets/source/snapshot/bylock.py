"""Finds the LSN of a snapshot without a slot: takes it while no transaction that wrote the tables is under way.

SHARE locks keep writers out for the moment in which the snapshot and the source's insert position are read. A
transaction that wrote these tables before has committed below that position, and is seen: it keeps its locks until
every new snapshot sees it as ended. One that writes them later commits above it. So the position is exact for these
tables, though not for others.

For the same reason it does no harm if a slot is older than its decoder's first whole transaction (as on servers before
the minors of August 2024, if it was made without a snapshot): a transaction that was under way then and wrote one of
these tables has ended below the copy's position, and is left out of what the log brings to the tables.

Nobody on the source may suffer from it:

- the locks are taken and released in one message to the server, even if we are gone meanwhile;
- we wait for one table's lock alone, with no other lock in hand, and then take all others at once or none.
  While we wait we hold no lock, so others only queue behind us; PostgreSQL can reorder that queue, and need not end
  anybody for a deadlock;
- a writer that comes meanwhile waits half a second at most, and only if the writers before it were seen to be brief.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg import sql

from pgcdc_assets.core.endpos import DELAYS_UNTIL_FLUSHED
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import SourceNotReady, SourceUnavailable
from pgcdc_assets.source.connect.connection import SourceConnection
from pgcdc_assets.source.connect.failures import of_exception
from pgcdc_assets.source.positions import RECORD_END, flush_lsn, wal_writer_delay
from pgcdc_assets.source.slot.blockers import writing

WAIT_SECONDS = 0.5
"""Seconds that a writer waits behind our lock at most; we wait for open transactions no longer than that."""
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 10.0
"""Seconds to wait for a flush on a busy disk."""

_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE; SAVEPOINT still; SET LOCAL lock_timeout = {wait};"
"""A read-only transaction may not take this lock; ours becomes read-only once it has."""
_LOCK = "LOCK TABLE ONLY {first} IN SHARE MODE; LOCK TABLE {all} IN SHARE MODE NOWAIT;"
"""ONLY, because a table's partitions would be locked one by one, each waited for with the locks on those before."""
_LET_GO = "; ROLLBACK TO SAVEPOINT still; RELEASE SAVEPOINT still;"
_LOCKED = "; SELECT ARRAY[{names}]::regclass[]::oid[]"
"""The OIDs that the names stood for: tables may have changed names since."""
_END = "SET TRANSACTION READ ONLY"


class Written(Exception):
    """Somebody writes these tables, and has not committed yet."""


def still_point(holder: SourceConnection, observer: SourceConnection, tables: dict[TableName, int]) -> Lsn:
    """Begin ``holder``'s transaction, which keeps no lock; returns the LSN at which its snapshot is exact for
    ``tables``.

    ``tables``: oid by name. Raises Written, or SourceNotReady if this role or this server cannot take such a lock; then
    the caller must roll the transaction back.
    """
    before = writing(observer, list(tables.values()))
    if before:
        time.sleep(WAIT_SECONDS)
        if before.keys() & writing(observer, list(tables.values())).keys():
            raise Written
    # We can wait for one table only: the one with most writers.
    busy = sorted(tables, key=lambda name: -sum(tables[name] in written for written in before.values()))
    try:
        point, locked = _locked(holder, busy)
    except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        raise Written from None
    except (psycopg.errors.ReadOnlySqlTransaction, psycopg.errors.FeatureNotSupported):
        raise SourceNotReady(
            "is a standby, where no table can be locked for a moment, as a copy without a replication connection "
            "needs it", thing=holder.endpoint, do="copy from its primary, or set `replication_connections: true`",
        ) from None  # fmt: skip
    except psycopg.Error as error:
        raise of_exception(error).typed("source") from None
    if locked != [tables[name] for name in busy]:
        raise Written
    _until_flushed(observer, point)
    return point


def _locked(holder: SourceConnection, names: Sequence[TableName]) -> tuple[Lsn, list[int]]:
    """The LSN of the snapshot, and the oids of what was locked. All in one message, so that the locks are released even
    if we are gone."""
    listed = [sql.Identifier(name.schema, name.name) for name in names]
    literals = [sql.Literal(one.as_string(None)) for one in listed]
    text = [_BEGIN, _LOCK if names else "", RECORD_END, _LOCKED, _LET_GO, _END]
    message = sql.SQL("".join(text)).format(
        wait=int(WAIT_SECONDS * 1000), first=sql.SQL("").join(listed[:1]), all=sql.SQL(", ").join(listed),
        names=sql.SQL(", ").join(literals),
    )  # fmt: skip
    results = holder.execute(message)
    (point,), (oids,) = [row for _ in _described(results) for row in results]
    return Lsn.parse(point), oids


def _described(results: psycopg.Cursor[Any]) -> Iterator[None]:
    """Moves the cursor to each result that has rows."""
    more: bool | None = True
    while more:
        if results.description is not None:
            yield
        more = results.nextset()


def _until_flushed(observer: SourceConnection, point: Lsn) -> None:
    """Wait until the source is durable up to ``point``. An asynchronous commit is seen before it is durable: a crash of
    the source would take it back from its own tables, but not from the copy.

    A commit of our own flushes all WAL before it; a source at rest may leave that undone for minutes.
    """
    deadline = time.monotonic() + DELAYS_UNTIL_FLUSHED * wal_writer_delay(observer) + _PATIENCE_SECONDS
    observer.execute("SELECT pg_current_xact_id()")
    while flush_lsn(observer) < point:
        if time.monotonic() > deadline:
            raise SourceUnavailable("does not write its WAL to disk", thing=observer.endpoint, lsn=point)
        time.sleep(_POLL_SECONDS)
