"""Reads the facts about the lake: its log, the state and ``replay_lsn`` of each table, the feed of messages.
The newest consistent point gives the position of all streaming tables in one small read. In addition, each mirror is
checked for new commits of other writers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

from deltalake.exceptions import DeltaError

from pgcdc_assets.checks.health import (
    Facts,
    LeftFacts,
    LogFacts,
    MessageFacts,
    Problem,
    TableFacts,
    UntakenFacts,
    problem_of,
)  # fmt: skip
from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.retention import GRACE
from pgcdc_assets.errors import LakeError, PgcdcError
from pgcdc_assets.failures import contained
from pgcdc_assets.feed.messages import MessageFeed
from pgcdc_assets.flow import outcomes
from pgcdc_assets.flow.registration import RegisteredTables, place_of
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta.durability import change_since
from pgcdc_assets.mirror.delta.mirror import Mirror, Mirrors
from pgcdc_assets.mirror.delta.mirrorschema import refusal
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.points.states import StateRow, TableStates
from pgcdc_assets.points.untaken import UntakenLedger
from pgcdc_assets.settings import Settings
from pgcdc_assets.structure.record import TableState

_UNREADABLE = (PgcdcError, DeltaError, OSError)


def with_log(facts: Facts, layout: Layout) -> tuple[Facts, list[Problem]]:
    """Adds the positions of the change log, unless ``facts`` has them. Returns a problem if they cannot be read."""
    if facts.log is not None:
        return facts, []
    log = ChangeLog(layout)
    try:
        if not log.exists:
            return facts, []
        return replace(facts, log=LogFacts(log.identity, log.start, log.position(), _published(layout))), []
    except _UNREADABLE as error:
        return facts, [problem_of(error, "change log")]


def _published(layout: Layout) -> Lsn | None:
    """The LSN of the newest consistent point. Also None if points cannot be read, which :func:`with_lake` reports."""
    with suppress(*_UNREADABLE):
        newest = ConsistentPoints(layout).newest()
        return newest.replay_lsn if newest else None
    return None


def with_lake(facts: Facts, settings: Settings, *, thorough: bool = True) -> tuple[Facts, list[Problem]]:
    """Adds all facts about the lake. Returns problems for the facts that cannot be read."""
    layout, catalog = settings.layout, facts.catalog
    facts, unread = with_log(facts, layout)
    if catalog is not None:
        try:
            tables = tuple(read_tables(layout, catalog, settings.retention, thorough=thorough))
            untaken = tuple(read_untaken(layout, catalog))
            facts = replace(facts, tables=tables, left=read_left(layout, catalog), untaken=untaken)
        except _UNREADABLE as error:
            unread.append(problem_of(error, "lake"))
    if settings.registry:
        record = RegisteredTables.read(layout)
        facts = replace(facts, unregistered=record.failed if record.place == place_of(settings) else {})
    if settings.messages:
        facts = replace(facts, messages=_messages(layout, facts))
    try:
        facts = replace(facts, last=outcomes.read(layout))
    except LakeError as error:
        unread.append(replace(problem_of(error, "lake"), severity="warning"))
    return facts, unread


def _messages(layout: Layout, facts: Facts) -> MessageFacts:
    """The facts about the feed of messages. A feed without new messages has no new commits, so the newest consistent
    point says up to which LSN the feed is complete."""
    if facts.log is None:
        return MessageFacts()
    with contained() as failed:
        feed = MessageFeed(layout, facts.log.identity)
        newest = ConsistentPoints(layout).newest()
    if failed.reason is not None:
        return MessageFacts(failure=failed.reason)
    if newest is not None and newest.messages is not None:
        feed.known_to(newest.replay_lsn)
    return MessageFacts(feed.complete_to if feed.exists else None)


def read_tables(
    layout: Layout, catalog: Catalog, retention: timedelta = timedelta(0), *, thorough: bool = True
) -> Iterator[TableFacts]:
    """The facts about every table, in the catalog's order. ``retention``: of the change log. ``thorough``: see
    :func:`pgcdc_assets.checks.status.status`."""
    rows = TableStates(layout).all()
    points = ConsistentPoints(layout)
    newest = points.newest()
    log = ChangeLog(layout)
    for table in catalog.tables:
        row = rows.get(table.name)
        of = partial(TableFacts, table.name, updates_seen=table.updates_seen)
        if (reason := refusal(table)) is not None:
            yield of(TableState.SET_ASIDE, reason=reason, refused=True)
        elif row is None or row.table is None or row.table.oid != table.oid or row.state is TableState.MOVED:
            # The table was never copied under this name, was dropped and created again since its copy, or was renamed.
            yield of(TableState.WAITING)
        elif newest and table.name in newest.tables and _readable(row, newest):
            reason = row.reason or (_changed(layout, catalog, table, newest) if thorough else None)
            yield of(TableState.STREAMING, newest.replay_lsn, reason)
        else:
            with contained() as failed:
                mirror = Mirrors(layout, catalog.identity).open(table.name)
                facts = _behind(mirror, table, row, points)
                yield replace(facts, kept_until=_kept_until(mirror, facts, log, retention))
            if failed.reason is not None:
                yield of(TableState.SET_ASIDE, reason=failed.reason, lsn=row.lsn)


def _kept_until(mirror: Mirror, facts: TableFacts, log: ChangeLog, retention: timedelta) -> datetime | None:
    """See :attr:`TableFacts.kept_until`. The changes may stay longer, because only ``pgcdc maintain`` deletes them."""
    copied, lsn = mirror.snapshot_lsn, facts.replay_lsn
    if facts.state is not TableState.SET_ASIDE or copied is None or lsn is None:
        return None
    with suppress(PgcdcError, OSError):  # If the log cannot be read, status reports this as a separate problem.
        if log.exists and copied >= log.began and lsn >= log.start:
            written = (segment.written for segment in log.all_segments() if segment.batch_end > lsn)
            return min(written, default=datetime.now(UTC)) + max(retention, GRACE)
    return None


def read_left(layout: Layout, catalog: Catalog) -> dict[TableName, LeftFacts]:
    """Mirrors whose names are not in the catalog, because the table was dropped, renamed or removed from the
    publication."""
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
    """The new name of a table that the saved catalog shows under another name than its mirror has, if this mirror can
    still get the new name. Otherwise None."""
    oid = row.table.oid if row.table is not None and row.state.readable else None
    name = next((table.name for table in tables if table.oid == oid), None)
    there = rows.get(name) if name is not None else None
    # The mirror cannot get the new name if a mirror with this name exists, or if a copy under this name is pending.
    return name if there is None or there.state is TableState.MOVED else None


def read_untaken(layout: Layout, catalog: Catalog) -> Iterator[UntakenFacts]:
    """Rows in the log that were not applied to any mirror."""
    relations = {oid: table for table in catalog.tables for oid in (table.oid, *(leaf.oid for leaf in table.leaves))}
    for relation, rows in UntakenLedger(layout).all().items():
        table = relations.get(relation)
        if table is None:
            yield UntakenFacts(rows)
        else:
            yield UntakenFacts(rows, table.name, Mirrors(layout, catalog.identity).open(table.name).snapshot_lsn)


def _readable(row: StateRow, newest: Point) -> bool:
    """Whether the newest point lists the copy that the state ``row`` describes, and not an earlier copy."""
    return row.state is TableState.CATCHING_UP and row.lsn <= newest.replay_lsn


def _changed(layout: Layout, catalog: Catalog, table: Table, newest: Point) -> str | None:
    """How another writer has changed rows of the mirror since the newest point, as text. None if no row was changed."""
    with suppress(LakeError):  # The operations that need this mirror report that it cannot be read.
        return change_since(layout.mirror(table.name), catalog.identity.app_id(), newest.tables[table.name])
    return None


def _behind(mirror: Mirror, table: Table, row: StateRow, points: ConsistentPoints) -> TableFacts:
    """The facts about a table that the newest point does not list. The position comes from the mirror's own commits."""
    of = partial(TableFacts, table.name, updates_seen=table.updates_seen)
    copied = mirror.snapshot_lsn
    if row.state is TableState.COPYING and (copied is None or copied < row.lsn):
        # A stored reason means that the last copy could not read the table. The table then waits for the next copy.
        state = TableState.WAITING if row.reason else TableState.COPYING
        return of(state, reason=row.reason)
    replay_lsn = mirror.effective_replay_lsn(points)
    if row.state is TableState.SET_ASIDE:
        return of(row.state, replay_lsn, row.reason, row.lsn)
    return of(TableState.CATCHING_UP, replay_lsn, row.reason)
