"""Snapshot copies within a run: one snapshot for all tables still to copy, each committed as it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.work import Work
from pgcdc_assets.lake.copy import CopyReport, copy_tables
from pgcdc_assets.source.catalog import read_catalog
from pgcdc_assets.source.snapshots import exported_snapshot


@dataclass(frozen=True)
class Copied:
    table: Table
    """As the snapshot's catalog had it."""
    report: CopyReport


def copy(work: Work, conninfo: str, names: Sequence[TableName], landed: Callable[[Copied], None]) -> None:
    """Copy the tables under one exported snapshot. Runs in a thread of its own, beside the turns.

    The state ``copying`` is durable before the first row is committed: a crash after a table's commit
    is told from one before it by the mirror's own ``snapshot_lsn``.
    """
    with exported_snapshot(conninfo, names) as snapshot:
        catalog = read_catalog(snapshot.conn, work.identity, work.catalog.publications, work.settings.tables)
        tables = [table for name in names if (table := catalog.table(name)) is not None]
        by_name = {table.name: table for table in tables}
        work.progress.copying(tables, snapshot.consistent_point)
        copy_tables(
            work.session(),
            conninfo,
            tables,
            work.layout,
            work.identity,
            snapshot,
            lambda report: landed(Copied(by_name[report.table], report)),
        )
