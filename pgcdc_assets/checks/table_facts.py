"""Reads the facts about tables: state and effective ``replay_lsn`` of each table, from the lake alone.

The newest consistent point has the position of each streaming table. So hundreds of streaming tables cost one small
read, and for each mirror a check for new commits of other writers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from pgcdc_assets.checks.facts import LeftFacts, TableFacts, UntakenFacts
from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.retention import GRACE
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import LakeError, PgcdcError
from pgcdc_assets.failures import contained
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta.foreigncommits import change_since
from pgcdc_assets.mirror.delta.mirror import Mirror, Mirrors
from pgcdc_assets.mirror.delta.mirrorschema import refusal
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.points.states import StateRow, TableStates
from pgcdc_assets.points.untaken import UntakenLedger


def read_tables(layout: Layout, catalog: Catalog, retention: timedelta = timedelta(0)) -> Iterator[TableFacts]:
    """The facts about every table, in the catalog's order. ``retention`` is the retention of the change log."""
    rows = TableStates(layout).all()
    points = ConsistentPoints(layout)
    newest = points.newest()
    log = ChangeLog(layout)
    for table in catalog.tables:
        row = rows.get(table.name)
        if (reason := refusal(table)) is not None:
            yield TableFacts(
                table.name, TableState.SET_ASIDE, reason=reason, updates_seen=table.updates_seen, refused=True
            )
        elif row is None or row.table is None or row.table.oid != table.oid or row.state is TableState.MOVED:
            # The table was never copied under this name, or was dropped and created again since its copy, or its mirror
            # still has the table's earlier name.
            yield TableFacts(table.name, TableState.WAITING, updates_seen=table.updates_seen)
        elif newest and table.name in newest.tables and _readable(row, newest):
            reason = row.reason or _changed(layout, catalog, table, newest)
            yield TableFacts(
                table.name, TableState.STREAMING, newest.replay_lsn, reason, updates_seen=table.updates_seen
            )
        else:
            with contained() as failed:
                mirror = Mirrors(layout, catalog.identity).open(table.name)
                facts = _behind(mirror, table, row, points)
                yield replace(facts, kept_until=_kept_until(mirror, facts, log, retention))
            if failed.reason is not None:
                yield TableFacts(table.name, TableState.SET_ASIDE, None, failed.reason, row.lsn, table.updates_seen)


def _kept_until(mirror: Mirror, facts: TableFacts, log: ChangeLog, retention: timedelta) -> datetime | None:
    """See :attr:`TableFacts.kept_until`. Only maintenance deletes data, and it may run later than this time."""
    copied, lsn = mirror.snapshot_lsn, facts.replay_lsn
    if facts.state is not TableState.SET_ASIDE or copied is None or lsn is None:
        return None
    with suppress(PgcdcError, OSError):  # Status reports a log that cannot be read as a problem of its own.
        if log.exists and copied >= log.began and lsn >= log.start:
            written = (segment.written for segment in log.all_segments() if segment.batch_end > lsn)
            return min(written, default=datetime.now(UTC)) + max(retention, GRACE)
    return None


def read_left(layout: Layout, catalog: Catalog) -> dict[TableName, LeftFacts]:
    """Mirrors that are no longer followed: their tables were dropped, renamed or taken out of the publication."""
    known = {table.name for table in catalog.tables}
    rows = TableStates(layout).all()
    left: dict[TableName, LeftFacts] = {}
    for name, row in rows.items():
        if name in known:
            continue
        mirror = Mirrors(layout, catalog.identity).open(name)
        if (lsn := mirror.replay_lsn or mirror.snapshot_lsn) is not None:
            moved = row.reason if row.state is TableState.MOVED else None
            left[name] = LeftFacts(lsn, moved, _goes_on_as(row, catalog.tables, rows))
    return left


def _goes_on_as(row: StateRow, tables: Sequence[Table], rows: Mapping[TableName, StateRow]) -> TableName | None:
    """The new name of a renamed table, if a run has seen the new name and the mirror does not have it yet."""
    oid = row.table.oid if row.table is not None and row.state.readable else None
    name = next((table.name for table in tables if table.oid == oid), None)
    there = rows.get(name) if name is not None else None
    # If the new name already has a mirror or a pending copy, this mirror does not go on under that name.
    return name if there is None or there.state is TableState.MOVED else None


def read_untaken(layout: Layout, catalog: Catalog) -> Iterator[UntakenFacts]:
    """Rows in the log that no mirror took."""
    relations = {oid: table for table in catalog.tables for oid in (table.oid, *(leaf.oid for leaf in table.leaves))}
    for relation, rows in UntakenLedger(layout).all().items():
        table = relations.get(relation)
        if table is None:
            yield UntakenFacts(rows)
        else:
            yield UntakenFacts(rows, table.name, Mirrors(layout, catalog.identity).open(table.name).snapshot_lsn)


def _readable(row: StateRow, newest: Point) -> bool:
    """Whether the point lists the copy that the row describes, and not an earlier copy."""
    return row.state is TableState.CATCHING_UP and row.lsn <= newest.replay_lsn


def _changed(layout: Layout, catalog: Catalog, table: Table, newest: Point) -> str | None:
    """A message if another writer has changed rows of the mirror since the point; None otherwise."""
    with suppress(LakeError):  # The operations that need this mirror report that it cannot be read.
        return change_since(layout.mirror(table.name), catalog.identity.app_id(), newest.tables[table.name])
    return None


def _behind(mirror: Mirror, table: Table, row: StateRow, points: ConsistentPoints) -> TableFacts:
    """The facts about a table that the newest point does not list. Its position is read from its own Delta commits."""
    copied = mirror.snapshot_lsn
    if row.state is TableState.COPYING and (copied is None or copied < row.lsn):
        # A reason means that the last copy could not read the table. The table then waits for the next copy.
        state = TableState.WAITING if row.reason else TableState.COPYING
        return TableFacts(table.name, state, reason=row.reason, updates_seen=table.updates_seen)
    replay_lsn = mirror.effective_replay_lsn(points)
    if row.state is TableState.SET_ASIDE:
        return TableFacts(table.name, row.state, replay_lsn, row.reason, row.lsn, table.updates_seen)
    return TableFacts(table.name, TableState.CATCHING_UP, replay_lsn, row.reason, updates_seen=table.updates_seen)
