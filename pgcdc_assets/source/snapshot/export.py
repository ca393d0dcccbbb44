"""Takes a snapshot with an exact LSN, and holds it for as long as a copy takes, but holds nothing else.

A slot's snapshot has such an LSN. So a temporary slot is made, its snapshot is imported into a transaction of our own
and exported again from there, and the slot is dropped. Before the first read comes the gate. Without replication
connections, a lock that is held for a moment serves instead: :mod:`pgcdc_assets.source.snapshot.bylock`.

The transaction that holds the snapshot has no lock on any table. If it had, whoever alters a table would wait for it as
long as the copy takes, everybody else would wait behind that, and so would the copy itself: a deadlock that PostgreSQL
cannot see.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, SourceUnavailable
from pgcdc_assets.source.connect.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.blockers import Blocker, writers
from pgcdc_assets.source.slot.creation import LOCK_SECONDS, TELL_SECONDS, OnWait, create_slot, log_waiting
from pgcdc_assets.source.snapshot import bylock
from pgcdc_assets.source.snapshot.reading import import_snapshot
from pgcdc_assets.source.snapshot.waiters import giving_way

_GATE_SECONDS = 60
"""The gap between commit record and commit status lasts microseconds; a minute means another fault."""
_GATE_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Snapshot:
    """Shows exactly the transactions with ``commit_lsn`` < ``consistent_point``, for the tables that it is exact for.

    ``name`` is for SET TRANSACTION SNAPSHOT in tasks, while the ``with`` block lasts, on this server and database.
    ``holder`` is the connection whose transaction keeps the snapshot. It has no lock on anything, and reads nothing.
    """

    consistent_point: Lsn
    name: str
    conninfo: str = field(repr=False)
    holder: SourceConnection = field(repr=False)
    exact_for: frozenset[int] | None = None
    """Oids of these tables; None: all tables of the database."""

    @contextmanager
    def reading(self) -> Iterator[SourceConnection]:
        """A transaction of its own under the snapshot, to read the catalog. Keep it brief: it locks what it reads."""
        with connect(self.conninfo, application_name=f"{APPLICATION}/snapshot") as conn:
            import_snapshot(conn, self.name)
            yield conn

    def shows(self, table: Table) -> bool:
        """Whether the snapshot is exact for this table."""
        return self.exact_for is None or table.oid in self.exact_for


class _Written(Exception):
    """No moment without writers was found yet. ``holders``: the writers, as far as they are known."""

    def __init__(self, why: str, holders: Sequence[Blocker] = ()) -> None:
        self.why = why
        self.holders = list(holders)


@contextmanager
def exported_snapshot(
    conninfo: str, tables: Sequence[Table | TableName], *, lock_seconds: float = LOCK_SECONDS,
    on_wait: OnWait | None = None, replication_connections: bool = True,
) -> Iterator[Snapshot]:  # fmt: skip
    """Export a snapshot, while the block lasts, for :mod:`pgcdc_assets.source.snapshot.reading` to read these tables.

    It keeps nobody off the tables: each reading checks itself whether its table is still as the snapshot shows it.

    Waits for every open transaction of the cluster; without ``replication_connections``, for a moment in which no open
    transaction has written those of the tables that exist. ``lock_seconds`` bounds each wait; then CopyBlocked names
    who is in the way. ``on_wait`` is called meanwhile (by default, a log line is written).
    """
    names = [table.name if isinstance(table, Table) else table for table in tables]
    told = on_wait or log_waiting
    with (
        connect(conninfo, application_name=f"{APPLICATION}/snapshot") as holder,
        connect(conninfo, application_name=f"{APPLICATION}/watch") as observer,
    ):
        exact_for: frozenset[int] | None = None
        if replication_connections:
            point = _take(conninfo, holder, observer, lock_seconds, told)
        else:
            point, exact_for = _patiently(lambda: _take_by_lock(holder, observer, names), holder, lock_seconds, told)
        name = _scalar(holder, "SELECT pg_export_snapshot()")
        _gate(holder, observer)
        passed(FaultPoint.SNAPSHOT_EXPORTED)
        with giving_way(conninfo):
            yield Snapshot(point, name, conninfo, holder, exact_for)
        if holder.closed:
            raise SourceUnavailable("the connection that held the snapshot was lost", thing=holder.endpoint)
        holder.execute("ROLLBACK")


def _take(
    conninfo: str, holder: SourceConnection, observer: SourceConnection, lock_seconds: float, on_wait: OnWait
) -> Lsn:
    """Make a temporary slot and import its snapshot. Afterwards ``holder`` is in a transaction under the snapshot."""
    slot = f"pgcdc_copy_{secrets.token_hex(6)}"
    with ReplicationConnection.open(conninfo, application_name=f"{APPLICATION}/snapshot") as walsender:
        created = create_slot(walsender, observer, slot, temporary=True, lock_seconds=lock_seconds, on_wait=on_wait)
        passed(FaultPoint.COPY_SLOT_MADE)
        import_snapshot(holder, created.snapshot_name)
        # The holder is under the snapshot from here on. The slot, which holds back WAL and the horizon, goes with its
        # session.
        walsender.drop_slot(slot)
    return created.consistent_point


_Taken = tuple[Lsn, frozenset[int]]


def _patiently(take: Callable[[], _Taken], holder: SourceConnection, lock_seconds: float, told: OnWait) -> _Taken:
    """Call ``take`` again whenever somebody was writing."""
    deadline = time.monotonic() + lock_seconds
    tell_at = time.monotonic() + TELL_SECONDS
    while True:
        try:
            return take()
        except _Written as written:
            holder.execute("ROLLBACK")
            now = time.monotonic()
            if now > deadline:
                raise CopyBlocked(written.why, thing="snapshot", do="run again when they are through") from None
            if now > tell_at:
                tell_at = now + TELL_SECONDS
                told(written.holders)
            time.sleep(1)


def _take_by_lock(holder: SourceConnection, observer: SourceConnection, names: Sequence[TableName]) -> _Taken:
    """Find a moment without writers. Afterwards ``holder`` is in a transaction under the snapshot."""
    tables = _oids(observer, names)
    try:
        return bylock.still_point(holder, observer, tables), frozenset(tables.values())
    except bylock.Written:
        found = writers(observer, list(tables.values()))
        who = ", ".join(str(writer) for writer in found) or "transactions that have just ended"
        raise _Written(f"no moment was found in which nobody writes these tables, last for {who}", found) from None


def _oids(observer: SourceConnection, names: Sequence[TableName]) -> dict[TableName, int]:
    """The oids of those tables that exist."""
    known = observer.execute(
        "SELECT n.nspname::text, c.relname::text, c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN unnest(%s::text[], %s::text[]) AS w (s, t) ON n.nspname = w.s AND c.relname = w.t",
        [[name.schema for name in names], [name.name for name in names]],
    )
    return {TableName(schema, table): oid for schema, table, oid in known}


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
