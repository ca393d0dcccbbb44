"""Takes a snapshot whose LSN is known exactly, and keeps it without a lock for as long as a copy takes.

Only the snapshot of a new replication slot comes with an exact LSN. So we create a temporary slot, import its snapshot
into a transaction of ours, export it again from this transaction, and drop the slot. Nothing is read under the snapshot
before :func:`_gate` has returned, which waits until this is safe.

The transaction that holds the snapshot locks no table. Otherwise a session that alters a table would wait for this
transaction, and the copy of the table would wait in the lock queue behind the session. This would be a deadlock that
PostgreSQL cannot detect, because only we know that the transaction waits for the copy.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, CopyOutdated, SourceUnavailable
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.blockers import OnWait
from pgcdc_assets.source.slot.slot import LOCK_SECONDS, create_slot
from pgcdc_assets.source.snapshot.reading import giving_way, import_snapshot
from pgcdc_assets.structure.differences import Difference, changes

_GATE_SECONDS = 60
"""The most seconds that :func:`_gate` waits. PostgreSQL sets a transaction's commit status microseconds after it writes
the commit record, so a wait of a minute has another cause."""
_GATE_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Snapshot:
    """An exported snapshot, which shows exactly the transactions with ``commit_lsn`` < ``consistent_point``. Tasks pass
    ``name`` to SET TRANSACTION SNAPSHOT, on this server and database, during the block of :func:`exported_snapshot`.
    ``holder`` is the connection whose open transaction keeps the snapshot. It holds no lock and reads nothing."""

    consistent_point: Lsn
    name: str
    conninfo: str = field(repr=False)
    holder: SourceConnection = field(repr=False)

    @contextmanager
    def reading(self) -> Iterator[SourceConnection]:
        """Opens a transaction under the snapshot, to read the catalog. Keep it short, because it takes locks."""
        with connect(self.conninfo, application_name=f"{APPLICATION}/snapshot") as conn:
            import_snapshot(conn, self.name)
            yield conn


@contextmanager
def exported_snapshot(
    conninfo: str, *, lock_seconds: float = LOCK_SECONDS, on_wait: OnWait | None = None
) -> Iterator[Snapshot]:
    """Exports a snapshot for the duration of the block. The snapshot locks no table. So each reading of a table checks
    whether the table is still as the snapshot shows it (:mod:`pgcdc_assets.source.snapshot.reading`).

    First waits for every open transaction of the cluster, at most ``lock_seconds`` for each. After that time, raises
    CopyBlocked, which names the blocking transactions. ``on_wait`` is called during the wait; without it, the wait is
    logged.
    """
    with (
        connect(conninfo, application_name=f"{APPLICATION}/snapshot") as holder,
        connect(conninfo, application_name=f"{APPLICATION}/watch") as observer,
    ):
        point = _take(conninfo, holder, observer, lock_seconds, on_wait)
        name = _scalar(holder, "SELECT pg_export_snapshot()")
        _gate(holder, observer)
        passed(FaultPoint.SNAPSHOT_EXPORTED)
        with giving_way(conninfo):
            yield Snapshot(point, name, conninfo, holder)
        if holder.closed:
            raise SourceUnavailable("the connection that held the snapshot was lost", thing=holder.endpoint)
        holder.execute("ROLLBACK")


def _take(
    conninfo: str, holder: SourceConnection, observer: SourceConnection, lock_seconds: float, on_wait: OnWait | None
) -> Lsn:
    """Creates a temporary slot and imports its snapshot, so that ``holder`` is in a transaction under the snapshot."""
    slot = f"pgcdc_copy_{secrets.token_hex(6)}"
    with ReplicationConnection.open(conninfo, application_name=f"{APPLICATION}/snapshot") as walsender:
        created = create_slot(walsender, observer, slot, temporary=True, lock_seconds=lock_seconds, on_wait=on_wait)
        passed(FaultPoint.COPY_SLOT_MADE)
        import_snapshot(holder, created.snapshot_name)
        # The holder has the snapshot now. The slot would retain WAL and dead rows, so it is dropped.
        # If this fails, the slot ends with its session.
        walsender.drop_slot(slot)
    return created.consistent_point


def _gate(holder: SourceConnection, observer: SourceConnection) -> None:
    """Waits until new snapshots, too, show as ended every transaction that this snapshot shows as ended.

    Slot creation may return its snapshot while a transaction that the snapshot shows as ended has written its commit
    record, but not yet set its commit status. A read under this snapshot would take the transaction for aborted, and
    set hint bits that say so. Then the source itself would lose the transaction's rows. PostgreSQL fixed this fault in
    2026, but many servers do not have the fix yet.
    """
    ours = _Xids.parse(_scalar(holder, "SELECT pg_current_snapshot()::text"))
    deadline = time.monotonic() + _GATE_SECONDS
    while not ours.agrees(_Xids.parse(_scalar(observer, "SELECT pg_current_snapshot()::text"))):
        if time.monotonic() > deadline:
            raise CopyBlocked(
                f"contains transactions that PostgreSQL still lists as running after {_GATE_SECONDS} s",
                thing="snapshot",
                do="run the command again; if this repeats, look for transactions that wait for a synchronous standby",
            )  # fmt: skip
        time.sleep(_GATE_POLL_SECONDS)


@dataclass(frozen=True)
class _Xids:
    """The parts of a pg_snapshot: ``xmax`` is the first xid not yet assigned, ``running`` the open xids below it."""

    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> _Xids:
        _, xmax, running = text.split(":")
        return cls(int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))

    def agrees(self, fresh: _Xids) -> bool:
        """Whether each transaction that has ended according to this snapshot has also ended according to ``fresh``, a
        snapshot that was taken later."""
        return fresh.xmax >= self.xmax and all(xid in self.running for xid in fresh.running if xid < self.xmax)


def _scalar(conn: SourceConnection, query: str) -> str:
    ((value,),) = conn.execute(query.encode())
    return str(value)


def shown_tables(
    snapshot: Snapshot, names: Sequence[TableName], publications: Sequence[str]
) -> tuple[dict[TableName, Table], dict[TableName, CopyOutdated | CopyBlocked]]:
    """Returns the tables of ``names`` that the snapshot shows as published, and an error for each table that cannot be
    copied under this snapshot.

    A table cannot be copied if it was altered after the snapshot, or if it is locked so that its row filter cannot be
    read. No lock keeps the tables unchanged, and some catalog functions ignore the snapshot and return the current
    state. So the catalog is read twice: under the snapshot, and as it is now. What both readings show in the same way
    has not changed between them.
    """
    blocked: dict[TableName, CopyBlocked] = {}
    with snapshot.reading() as conn:
        then = {table.name: table for table in read_tables(conn, publications, blocked=blocked)}
    with connect(snapshot.conninfo, application_name=f"{APPLICATION}/snapshot") as conn:
        now = {table.name: table for table in read_tables(conn, publications, blocked=blocked)}
    outdated: dict[TableName, CopyOutdated | CopyBlocked] = {}
    for name in names:
        table = then.get(name)
        if name in blocked:
            outdated[name] = blocked[name]
        elif table is None:
            outdated[name] = CopyOutdated("is no longer published, or was dropped", thing=f"table {name}")
        elif name not in now or any(c.difference is not Difference.COLUMN_ADDED for c in changes(table, now[name])):
            outdated[name] = CopyOutdated("was altered right after the snapshot", thing=f"table {name}",
                                          do="run the command again, which takes a new snapshot")  # fmt: skip
    return {name: then[name] for name in names if name in then}, outdated
