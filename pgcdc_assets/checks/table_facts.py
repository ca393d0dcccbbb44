"""Reads the tables' side of the facts: state and effective ``replay_lsn`` of each, from the lake alone.

A table that the newest consistent point lists needs no look at its mirror, so that hundreds of
streaming tables cost one small read.
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
from pgcdc_assets.mirror.delta.mirror import Mirror
from pgcdc_assets.mirror.delta.mirrorschema import refusal
from pgcdc_assets.mirror.delta.othercommits import change_since
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.points.states import StateRow, TableStates
from pgcdc_assets.points.untaken import UntakenLedger


def read_tables(layout: Layout, catalog: Catalog, retention: timedelta = timedelta(0)) -> Iterator[TableFacts]:
    """Every table of the catalog, in its order. ``retention``: of the change log."""
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
            # The table was never copied under this name, or was dropped and made anew since, or its mirror is under
            # another yet.
            yield TableFacts(table.name, TableState.WAITING, updates_seen=table.updates_seen)
        elif newest and table.name in newest.tables and _readable(row, newest):
            reason = row.reason or _changed(layout, catalog, table, newest)
            yield TableFacts(
                table.name, TableState.STREAMING, newest.replay_lsn, reason, updates_seen=table.updates_seen
            )
        else:
            mirror = Mirror(layout, catalog.identity, table.name)
            with contained() as failed:
                facts = _behind(mirror, table, row, points)
                yield replace(facts, kept_until=_kept_until(mirror, facts, log, retention))
            if failed.reason is not None:
                yield TableFacts(table.name, TableState.SET_ASIDE, None, failed.reason, row.lsn, table.updates_seen)


def _kept_until(mirror: Mirror, facts: TableFacts, log: ChangeLog, retention: timedelta) -> datetime | None:
    """See :attr:`TableFacts.kept_until`. Nothing is deleted but by a maintenance, which may come later."""
    copied, lsn = mirror.snapshot_lsn, facts.replay_lsn
    if facts.state is not TableState.SET_ASIDE or copied is None or lsn is None:
        return None
    with suppress(PgcdcError, OSError):  # A log that cannot be read is reported by itself.
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
        mirror = Mirror(layout, catalog.identity, name)
        if (lsn := mirror.replay_lsn or mirror.snapshot_lsn) is not None:
            moved = row.reason if row.state is TableState.MOVED else None
            left[name] = LeftFacts(lsn, moved, _goes_on_as(row, catalog.tables, rows))
    return left


def _goes_on_as(row: StateRow, tables: Sequence[Table], rows: Mapping[TableName, StateRow]) -> TableName | None:
    """The new name of a followed table, if a run has seen it and has not let the mirror go on under it yet."""
    oid = row.table.oid if row.table is not None and row.state.readable else None
    name = next((table.name for table in tables if table.oid == oid), None)
    there = rows.get(name) if name is not None else None
    # A mirror that stands there, or a copy that is to come, is not replaced.
    return name if there is None or there.state is TableState.MOVED else None


def read_untaken(layout: Layout, catalog: Catalog) -> Iterator[UntakenFacts]:
    """Rows that came through the log and that no mirror took, as far back as the log goes."""
    relations = {oid: table for table in catalog.tables for oid in (table.oid, *(leaf.oid for leaf in table.leaves))}
    for relation, rows in UntakenLedger(layout).all().items():
        table = relations.get(relation)
        if table is None:
            yield UntakenFacts(rows)
        else:
            yield UntakenFacts(rows, table.name, Mirror(layout, catalog.identity, table.name).snapshot_lsn)


def _readable(row: StateRow, newest: Point) -> bool:
    """Whether the point lists the copy that the row describes, and not the copy before."""
    return row.state is TableState.CATCHING_UP and row.lsn <= newest.replay_lsn


def _changed(layout: Layout, catalog: Catalog, table: Table, newest: Point) -> str | None:
    """That another writer has changed rows since the point, in words, if no run has seen it yet."""
    with suppress(LakeError):  # Whoever needs what cannot be read here reports it.
        return change_since(layout.mirror(table.name), catalog.identity.app_id(), newest.tables[table.name])
    return None


def _behind(mirror: Mirror, table: Table, row: StateRow, points: ConsistentPoints) -> TableFacts:
    """A table that no point lists: its own Delta commits say where it stands."""
    copied = mirror.snapshot_lsn
    if row.state is TableState.COPYING and (copied is None or copied < row.lsn):
        # A reason means that the last copy could not read the table, and that it waits for the next copy.
        state = TableState.WAITING if row.reason else TableState.COPYING
        return TableFacts(table.name, state, reason=row.reason, updates_seen=table.updates_seen)
    replay_lsn = mirror.effective_replay_lsn(points)
    if row.state is TableState.SET_ASIDE:
        return TableFacts(table.name, row.state, replay_lsn, row.reason, row.lsn, table.updates_seen)
    return TableFacts(table.name, TableState.CATCHING_UP, replay_lsn, row.reason, updates_seen=table.updates_seen)
