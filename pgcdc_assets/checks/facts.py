"""Reads the facts that the health rules check. The source is read by plain SQL on one short connection. In the lake,
the newest consistent point gives the position of all streaming tables in one small read. In addition, each mirror is
checked for new commits of other writers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

from deltalake.exceptions import DeltaError

from pgcdc_assets.checks.health import (
    Backend,
    Facts,
    LeftFacts,
    LogFacts,
    MessageFacts,
    Problem,
    PublicationFacts,
    SourceFacts,
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
from pgcdc_assets.projectsource import refuse_other_identity
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.pgclass import CatalogRelation, read_leaves, read_relations
from pgcdc_assets.source.catalog.published import Published, read_published
from pgcdc_assets.source.connect.connection import SourceConnection
from pgcdc_assets.source.setup.publications import made_by_us, read_publication
from pgcdc_assets.source.setup.selection import meant_tables, wanted_tables
from pgcdc_assets.source.slot.blockers import transactions
from pgcdc_assets.source.slot.slot import SlotStatus, flush_lsn, identity
from pgcdc_assets.structure.record import TableState

_SETTINGS = """
SELECT current_setting('wal_level'), nullif(pg_size_bytes(current_setting('max_slot_wal_keep_size')), -1),
       current_setting('synchronous_standby_names'),
       extract(epoch FROM coalesce(current_setting('idle_replication_slot_timeout', true), '0')::interval)::float8
"""
_HOLDER = "SELECT pid, application_name::text FROM pg_catalog.pg_stat_activity WHERE pid = %s"
_PUBLICATIONS = """
SELECT pubname::text, pubinsert, pubupdate, pubdelete, pubtruncate
FROM pg_catalog.pg_publication WHERE pubname = ANY(%s)
"""
_UNREADABLE = (PgcdcError, DeltaError, OSError)


def read_source(
    conn: SourceConnection, settings: Settings, status: SlotStatus | None, catalog: Catalog | None
) -> SourceFacts:
    """The facts about the source. The caller must have read the log's position before (see
    :attr:`SourceFacts.flush_lsn`). Raises WrongSource if the server is not the source that the project was set up
    with."""
    found = identity(conn, settings.slot)
    refuse_other_identity(settings, found)
    names = catalog.publications if catalog else (settings.publication,)
    [(wal_level, keep_bytes, standby_names, idle_seconds)] = conn.execute(_SETTINGS)
    entries = read_published(conn, names, unread=True)
    relations = read_relations(conn, entries)
    published = {}
    for name, *operations in conn.execute(_PUBLICATIONS, [list(names)]):
        listed = frozenset(one.name for oid, one in relations.items() if name in entries[oid].publications)
        published[name] = PublicationFacts(name, listed, *operations)
    publication = read_publication(conn, settings.publication)
    ours = publication is not None and made_by_us(publication, settings.slot)
    called = _mirrored(conn, relations)
    limited = catalog is not None and not all(table.updates_seen for table in catalog.tables)
    wanted = wanted_tables(conn, settings.tables) if limited and ours else []
    return SourceFacts(
        identity=found,
        flush_lsn=flush_lsn(conn),
        wal_level=wal_level,
        max_slot_wal_keep_bytes=keep_bytes,
        synchronous_standby_names=standby_names,
        idle_slot_timeout=timedelta(seconds=idle_seconds),
        holder=_holder(conn, status),
        oldest=next(iter(transactions(conn)), None),
        publications={name: published.get(name) for name in names},
        mirrored=frozenset(called.values()),
        called=called,
        meant=frozenset(meant_tables(conn, settings.tables)),
        ours=ours,
        followable=frozenset(item.table for item in wanted if item.follows_updates),
        without_identity=_without_identity(conn, entries, relations),
    )


def _holder(conn: SourceConnection, status: SlotStatus | None) -> Backend | None:
    """The session that reads the slot. Also None if pgcdc's role lacks the rights of pg_read_all_stats, because the
    application name of another role's session is then NULL."""
    if status is None or status.active_pid is None:
        return None
    row = conn.execute(_HOLDER, [status.active_pid]).fetchone()
    return None if row is None or row[1] is None else Backend(*row)


def _mirrored(conn: SourceConnection, relations: Mapping[int, CatalogRelation]) -> dict[int, TableName]:
    """The tables to whose mirrors the rows of these relations belong. Rows of a leaf are in the mirror of its root. But
    a partition that is partitioned and published by its own name has its own mirror."""
    tables = {one.root if one.root and not one.partitioned else oid for oid, one in relations.items()}
    known = {**relations, **read_relations(conn, tables - relations.keys())}
    return {oid: known[oid].name for oid in tables & known.keys()}


def _without_identity(
    conn: SourceConnection, entries: Mapping[int, Published], relations: Mapping[int, CatalogRelation]
) -> frozenset[TableName]:
    """Relations whose updates or deletes PostgreSQL refuses. For a partitioned table, the replica identities of its
    leaf partitions decide."""
    sent = {oid: one for oid, one in relations.items() if entries[oid].updates or entries[oid].deletes}
    leaves = read_leaves(conn, [oid for oid, relation in sent.items() if relation.partitioned])
    sent |= read_relations(conn, {leaf for group in leaves.values() for leaf in group} - sent.keys())
    return frozenset(one.name for one in sent.values() if not one.partitioned and one.refuses_updates)


# The lake ---------------------------------------------------------------------------------------


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
        elif (
            newest and table.name in newest.tables
            and row.state is TableState.CATCHING_UP and row.lsn <= newest.replay_lsn
        ):  # fmt: skip
            # The point lists the copy that the state describes, and not an earlier copy.
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


def lowest_replayed(tables: Iterable[TableFacts]) -> Lsn | None:
    """``replay_lsn`` of the lake: the lowest position of the followed tables."""
    return min((t.replay_lsn for t in tables if t.state.readable and t.replay_lsn is not None), default=None)
