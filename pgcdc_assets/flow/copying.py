"""Snapshot copies within a run: one snapshot for all tables still to copy, each committed as it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.work import Work
from pgcdc_assets.lake.copy import CopyReport, copy_tables
from pgcdc_assets.source.catalog import read_catalog
from pgcdc_assets.source.holders import Holder
from pgcdc_assets.source.snapshots import exported_snapshot


@dataclass(frozen=True)
class Copied:
    table: Table
    """As the snapshot's catalog had it."""
    report: CopyReport


class GivenUp(Exception):
    """The run ends before its copies do."""


@dataclass(frozen=True)
class Beside:
    """What the copies' thread and the run's tell each other."""

    landed: queue.SimpleQueue[Copied] = field(default_factory=queue.SimpleQueue)
    notes: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    """For people."""
    given_up: threading.Event = field(default_factory=threading.Event)

    def go_on(self) -> None:
        if self.given_up.is_set():
            raise GivenUp

    def waiting(self, holders: Sequence[Holder]) -> None:
        """Transactions on the source hold the snapshot up."""
        self.go_on()
        self.notes.put(f"waits for {', '.join(str(holder) for holder in holders) or 'a transaction on the source'}")


def copy(work: Work, conninfo: str, names: Sequence[TableName], beside: Beside) -> None:
    """Copy the tables under one exported snapshot. Runs in a thread of its own, beside the turns.

    The state ``copying`` is durable before the first row is committed: a crash after a table's commit
    is told from one before it by the mirror's own ``snapshot_lsn``.
    """
    replication = work.settings.replication_connections
    with exported_snapshot(conninfo, names, on_wait=beside.waiting, replication=replication) as snapshot:
        catalog = read_catalog(snapshot.conn, work.identity, work.catalog.publications, work.settings.tables)
        tables = [table for name in names if (table := catalog.table(name)) is not None]
        by_name = {table.name: table for table in tables}
        work.progress.copying(tables, snapshot.consistent_point)
        session = work.session()
        beside.go_on()
        copy_tables(
            session,
            conninfo,
            tables,
            work.layout,
            work.identity,
            snapshot,
            lambda report: beside.landed.put(Copied(by_name[report.table], report)),
        )
