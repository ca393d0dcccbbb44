"""Makes snapshot copies in a run. One snapshot serves all tables that wait for a copy. Each copy is committed when it
is finished."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pgcdc_assets.core.catalog import Catalog, Table, relations_of
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import RightLacking
from pgcdc_assets.flow.commenting import unread_comments
from pgcdc_assets.flow.work import Work
from pgcdc_assets.mirror.target import CopyReport, Failures
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.setup.rights import lacking_rights
from pgcdc_assets.source.slot.blockers import Blocker
from pgcdc_assets.source.snapshot.export import exported_snapshot, shown_tables

_GRANTED = "then run again: it copies the table"


@dataclass(frozen=True)
class Copied:
    table: Table
    """The table as the snapshot's catalog has it."""
    report: CopyReport


class GivenUp(Exception):
    """Raised in the copies' thread if the run ends before its copies are finished."""


@dataclass(frozen=True)
class CopyChannel:
    """Messages between the copies' thread and the run's thread."""

    landed: queue.SimpleQueue[Copied] = field(default_factory=queue.SimpleQueue)
    notes: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    """Texts for people."""
    given_up: threading.Event = field(default_factory=threading.Event)

    def go_on(self) -> None:
        if self.given_up.is_set():
            raise GivenUp

    def waiting(self, holders: Sequence[Blocker]) -> None:
        """Report the transactions on the source for which the snapshot waits."""
        self.go_on()
        self.notes.put(f"waits for {', '.join(str(holder) for holder in holders) or 'a transaction on the source'}")


def copy(work: Work, conninfo: str, names: Sequence[TableName], channel: CopyChannel) -> Failures:
    """Copy the tables under one exported snapshot; returns the tables that were not copied, and why.

    Tables that our role may not read are left out before the snapshot is taken. This runs in its own thread while the
    turns go on. The state ``copying`` is durable before the first row is committed. So after a crash, the mirror's own
    ``snapshot_lsn`` shows whether the table's copy was committed.
    """
    lacking = _lacking_rights(work.catalog, conninfo, names)
    names = [name for name in names if name not in lacking]
    if not names:
        return lacking
    channel.notes.put(f"copying {len(names)} tables")
    with exported_snapshot(conninfo, on_wait=channel.waiting) as snapshot:
        shown, outdated = shown_tables(snapshot, names, work.catalog.publications)
        for leaf in (f"table {table.name}: {leaf}" for table in shown.values() for leaf in table.outside):
            channel.notes.put(leaf)
        work.progress.copying(shown.values(), snapshot.consistent_point)
        for name in sorted(name for name, table in shown.items() if not table.comments_read):
            channel.notes.put(unread_comments(name))
        # Spark takes seconds to start. The run may have ended when it has.
        work.session()
        channel.go_on()
        failed = work.target.copy(
            [table for name, table in shown.items() if name not in outdated],
            snapshot,
            lambda report: channel.landed.put(Copied(shown[report.table], report)),
        )
        return {**lacking, **outdated, **failed}


def _lacking_rights(catalog: Catalog, conninfo: str, names: Sequence[TableName]) -> Failures:
    """The tables that our role may not read. The last catalog check says which partitions a table has."""
    wanted = set(names)
    stored = {table.name: sorted(relations_of([table]) - {table.oid} if table.partitioned else {table.oid})
              for table in catalog.tables if table.name in wanted}  # fmt: skip
    with connect(conninfo, application_name=f"{APPLICATION}/snapshot") as conn:
        found = lacking_rights(conn, stored)
    return {name: RightLacking(what, thing=f"table {name}", do=_GRANTED) for name, what in found.items()}
