"""Takes a snapshot with an exact LSN, and holds it for as long as a copy takes, but holds nothing else.

A slot's snapshot has such an LSN. So a temporary slot is made, its snapshot is imported into a transaction of our own
and exported again from there, and the slot is dropped. Before the first read comes the gate.

The transaction that holds the snapshot has no lock on any table. If it had, whoever alters a table would wait for it as
long as the copy takes, everybody else would wait behind that, and so would the copy itself: a deadlock that PostgreSQL
cannot see.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import CopyBlocked, SourceUnavailable
from pgcdc_assets.source.connect.connection import APPLICATION, SourceConnection, connect
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from pgcdc_assets.source.slot.creation import LOCK_SECONDS, OnWait, create_slot
from pgcdc_assets.source.snapshot.reading import import_snapshot
from pgcdc_assets.source.snapshot.waiters import giving_way

_GATE_SECONDS = 60
"""The gap between commit record and commit status lasts microseconds; a minute means another fault."""
_GATE_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Snapshot:
    """Shows exactly the transactions with ``commit_lsn`` < ``consistent_point``.

    ``name`` is for SET TRANSACTION SNAPSHOT in tasks, while the ``with`` block lasts, on this server and database.
    ``holder`` is the connection whose transaction keeps the snapshot. It has no lock on anything, and reads nothing.
    """

    consistent_point: Lsn
    name: str
    conninfo: str = field(repr=False)
    holder: SourceConnection = field(repr=False)

    @contextmanager
    def reading(self) -> Iterator[SourceConnection]:
        """A transaction of its own under the snapshot, to read the catalog. Keep it brief: it locks what it reads."""
        with connect(self.conninfo, application_name=f"{APPLICATION}/snapshot") as conn:
            import_snapshot(conn, self.name)
            yield conn


@contextmanager
def exported_snapshot(
    conninfo: str, *, lock_seconds: float = LOCK_SECONDS, on_wait: OnWait | None = None
) -> Iterator[Snapshot]:
    """Export a snapshot, while the block lasts, for :mod:`pgcdc_assets.source.snapshot.reading` to read tables.

    It keeps nobody off the tables: each reading checks itself whether its table is still as the snapshot shows it.

    Waits for every open transaction of the cluster. ``lock_seconds`` bounds the wait for each; then CopyBlocked names
    who is in the way. ``on_wait`` is called during the wait (by default, a log line is written).
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
