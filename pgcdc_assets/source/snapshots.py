"""A snapshot with an exact LSN, held for as long as a copy takes.

A slot's snapshot has one. So a temporary slot is made, its snapshot imported into a transaction of our
own, exported again from there, and the slot dropped. Then, before the first read, the gate. Without
replication connections a lock gives it: :mod:`pgcdc_assets.source.share`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, SourceUnavailable, UnknownTable
from pgcdc_assets.source import share
from pgcdc_assets.source.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.creation import LOCK_SECONDS, TELL_SECONDS, OnWait, create_slot, log_waiting
from pgcdc_assets.source.failures import of_exception
from pgcdc_assets.source.holders import Holder, lockers, waiting_for, writers
from pgcdc_assets.source.replication import ReplicationConnection

_GATE_SECONDS = 60
"""The gap between commit record and commit status is one of microseconds; a minute means another fault."""
_GATE_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Snapshot:
    """Exactly the transactions with ``commit_lsn`` < ``consistent_point``, of the tables that it was asked for.

    ``name``: for SET TRANSACTION SNAPSHOT in tasks, while the ``with`` block lasts, on this server and
    database. ``conn`` is the holding transaction itself, for reading the catalog under the snapshot.
    """

    consistent_point: Lsn
    name: str
    conn: SourceConnection

    def check(self) -> None:
        """SourceUnavailable when the holding transaction is gone, and the snapshot with it."""
        self.conn.execute("SELECT 1")


class _GiveWay(Exception):
    """Somebody for whom we wait waits for us, or may soon. ``holders``: who they are, where that is known."""

    def __init__(self, why: str, holders: Sequence[Holder] = ()) -> None:
        self.why = why
        self.holders = list(holders)


@contextmanager
def exported_snapshot(
    conninfo: str, tables: Sequence[Table | TableName], *, lock_seconds: float = LOCK_SECONDS,
    on_wait: OnWait | None = None, replication: bool = True,
) -> Iterator[Snapshot]:  # fmt: skip
    """A snapshot of these tables, which nobody can truncate or rewrite until the block ends.

    Waits for every open transaction of the cluster; without ``replication`` connections for a moment in which no
    transaction has written these tables. ``lock_seconds`` bounds each wait, and CopyBlocked names who is in the way.
    ``on_wait`` hears of it meanwhile (a log line by default).
    """
    names = [table.name if isinstance(table, Table) else table for table in tables]
    told = on_wait or log_waiting

    def take() -> Lsn:
        if replication:
            return _take(conninfo, holder, observer, names, lock_seconds, told)
        return _take_by_lock(holder, observer, names)

    with (
        connect(conninfo, application_name=f"{APPLICATION}/copy", row_security=False) as holder,
        connect(conninfo, application_name=f"{APPLICATION}/watch") as observer,
    ):
        point = _patiently(take, holder, lock_seconds, told)
        name = _scalar(holder, "SELECT pg_export_snapshot()")
        _gate(holder, observer)
        passed(FaultPoint.SNAPSHOT_EXPORTED)
        yield Snapshot(point, name, holder)
        if holder.closed:
            raise SourceUnavailable("the connection that held the snapshot was lost", thing=holder.endpoint)
        holder.execute("ROLLBACK")


def _patiently(take: Callable[[], Lsn], holder: SourceConnection, lock_seconds: float, told: OnWait) -> Lsn:
    """Again after each time that we gave way, which lets go of all locks."""
    deadline = time.monotonic() + lock_seconds
    tell_at = time.monotonic() + TELL_SECONDS
    while True:
        try:
            return take()
        except _GiveWay as way:
            holder.execute("ROLLBACK")
            now = time.monotonic()
            if now > deadline:
                raise CopyBlocked(way.why, thing="snapshot", do="run again when they are through") from None
            if now > tell_at:
                tell_at = now + TELL_SECONDS
                told(way.holders)
            time.sleep(1)


def _take_by_lock(holder: SourceConnection, observer: SourceConnection, names: Sequence[TableName]) -> Lsn:
    """Locks and snapshot. Afterwards ``holder`` stands in a transaction under the snapshot."""
    tables = _oids(observer, names)
    try:
        return share.still_point(holder, observer, tables)
    except share.Written:
        found = writers(observer, list(tables.values()))
        who = ", ".join(str(writer) for writer in found) or "transactions that have just ended"
        raise _GiveWay(f"no moment was found in which nobody writes these tables, last for {who}", found) from None


def _take(
    conninfo: str, holder: SourceConnection, observer: SourceConnection, names: Sequence[TableName],
    lock_seconds: float, on_wait: OnWait,
) -> Lsn:  # fmt: skip
    """Locks, temporary slot, import. Afterwards ``holder`` stands in a transaction under the snapshot.

    Slot creation waits for transactions with an xid, and one that wants to truncate or alter a table
    waits, with its xid, for our lock: a deadlock that PostgreSQL cannot see. We give way to it.
    """
    holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    _lock(holder, observer, names, lock_seconds)
    pid = holder.info.backend_pid

    def check() -> None:
        if waiting_for(observer, pid):
            raise _GiveWay("transactions that change these tables' definition left no gap")

    slot = f"pgcdc_copy_{secrets.token_hex(6)}"
    with ReplicationConnection.open(conninfo, application_name=f"{APPLICATION}/copy") as walsender:
        created = create_slot(
            walsender, observer, slot, temporary=True, lock_seconds=lock_seconds, on_wait=on_wait, check=check
        )
        passed(FaultPoint.COPY_SLOT_MADE)
        holder.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(created.snapshot_name))
        # Under the snapshot from here on; the slot held back WAL and the horizon, and goes with its session.
        walsender.drop_slot(slot)
    return created.consistent_point


def _lock(
    holder: SourceConnection, observer: SourceConnection, names: Sequence[TableName], lock_seconds: float
) -> None:
    """ACCESS SHARE, partitions included. LOCK takes no snapshot, so one can still be imported after it."""
    if not names:
        return
    oids = _oids(observer, names)
    holder.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(int(lock_seconds * 1000)))
    listed = sql.SQL(", ").join(sql.Identifier(name.schema, name.name) for name in names)
    try:
        holder.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(listed))
    except psycopg.errors.LockNotAvailable:
        who = ", ".join(str(other) for other in lockers(observer, list(oids.values()))) or "somebody who has just left"
        raise CopyBlocked(
            f"cannot be read, for it is locked by {who}", thing=", ".join(str(name) for name in names[:3]),
            do="end that transaction, then run again",
        ) from None  # fmt: skip
    except psycopg.Error as error:
        raise of_exception(error).typed("source") from None


def _oids(observer: SourceConnection, names: Sequence[TableName]) -> dict[TableName, int]:
    """UnknownTable for one that does not exist."""
    known = observer.execute(
        "SELECT n.nspname::text, c.relname::text, c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN unnest(%s::text[], %s::text[]) AS w (s, t) ON n.nspname = w.s AND c.relname = w.t",
        [[name.schema for name in names], [name.name for name in names]],
    )
    oids = {TableName(schema, table): oid for schema, table, oid in known}
    for name in names:
        if name not in oids:
            raise UnknownTable("does not exist on the source", thing=f"table {name}")
    return oids


def _gate(holder: SourceConnection, observer: SourceConnection) -> None:
    """Wait until every transaction that the snapshot shows as ended is seen so by new snapshots too.

    Slot creation may hand out a snapshot while a transaction stands between its commit record and its
    commit status. A read under it would then set hint bits for "aborted", and the row would be gone for
    good in the source itself. Fixed upstream in 2026, not in the servers at large.
    """
    ours = _Xids.parse(_scalar(holder, "SELECT pg_current_snapshot()::text"))
    deadline = time.monotonic() + _GATE_SECONDS
    while not ours.agrees(_Xids.parse(_scalar(observer, "SELECT pg_current_snapshot()::text"))):
        if time.monotonic() > deadline:
            raise CopyBlocked(
                f"transactions that the snapshot shows as ended are not, after {_GATE_SECONDS} s", thing="snapshot",
                do="run again; if it stays so, look for transactions that wait for a synchronous standby",
            )  # fmt: skip
        time.sleep(_GATE_POLL_SECONDS)


@dataclass(frozen=True)
class _Xids:
    """pg_snapshot: ``xmax`` the first xid not yet given out, ``running`` those under way below it."""

    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> _Xids:
        _, xmax, running = text.split(":")
        return cls(int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))

    def agrees(self, fresh: _Xids) -> bool:
        """Whether ``fresh`` is as late, and shows nothing as running that we show as ended."""
        return fresh.xmax >= self.xmax and all(xid in self.running for xid in fresh.running if xid < self.xmax)


def _scalar(conn: SourceConnection, query: str) -> str:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return str(row[0])
