"""Reads the tables as a snapshot shows them, and finds the tables that were altered during the reading."""

from __future__ import annotations

from collections.abc import Sequence

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, CopyOutdated
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.snapshot.export import Snapshot
from pgcdc_assets.structure.differences import Difference, changes


def shown_tables(
    snapshot: Snapshot, names: Sequence[TableName], publications: Sequence[str]
) -> tuple[dict[TableName, Table], dict[TableName, CopyOutdated | CopyBlocked]]:
    """Returns the tables of ``names`` that the snapshot shows as published, and the errors of tables that cannot be
    read under the snapshot.

    A table cannot be read if it was altered after the snapshot, or if it is locked so that its row filter cannot be
    read. No lock keeps the tables unchanged, and some catalog functions return the current state under any snapshot. So
    the catalog is read twice. A fact that is the same in the snapshot and a moment later was the same in between.
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
            outdated[name] = CopyOutdated("is not published any more, or was dropped", thing=f"table {name}")
        elif name not in now or _altered(table, now[name]):
            outdated[name] = CopyOutdated("was altered right after the snapshot", thing=f"table {name}",
                                          do="run again: it takes a new one")  # fmt: skip
    return {name: then[name] for name in names if name in then}, outdated


def _altered(then: Table, now: Table) -> bool:
    return any(change.difference is not Difference.COLUMN_ADDED for change in changes(then, now))
