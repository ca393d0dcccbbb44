"""Reads the facts about the source, by plain SQL on one short connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from pgcdc_assets.checks.health import Backend, PublicationFacts, SourceFacts
from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.names import TableName
from pgcdc_assets.projectsource import refuse_other_identity
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.pgclass import read_leaves, read_relations
from pgcdc_assets.source.catalog.published import Published, read_published
from pgcdc_assets.source.connect.connection import SourceConnection
from pgcdc_assets.source.setup.publications import made_by_us, read_publication
from pgcdc_assets.source.setup.selection import meant_tables, wanted_tables
from pgcdc_assets.source.slot.blockers import transactions
from pgcdc_assets.source.slot.slot import SlotStatus, flush_lsn, identity

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
# Rows of a leaf are in the mirror of its root. But a partition that is partitioned and published by its own name has
# its own mirror.
_MIRRORED = """
SELECT DISTINCT c.oid, n.nspname::text, c.relname::text
FROM pg_catalog.pg_class p JOIN pg_catalog.pg_class c ON c.oid = CASE WHEN p.relispartition AND p.relkind <> 'p'
  THEN pg_catalog.pg_partition_root(p.oid)::oid ELSE p.oid END
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE p.oid = ANY(%s)
"""
_NAMED = """
SELECT c.oid, n.nspname::text, c.relname::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY(%s)
"""


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
    published = _published_tables(conn, names, entries)
    mirrored = {oid: TableName(schema, name) for oid, schema, name in conn.execute(_MIRRORED, [list(entries)])}
    publication = read_publication(conn, settings.publication)
    ours = publication is not None and made_by_us(publication, settings.slot)
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
        mirrored=frozenset(mirrored.values()),
        called=mirrored,
        meant=frozenset(meant_tables(conn, settings.tables)),
        ours=ours,
        followable=frozenset(item.table for item in wanted if item.follows_updates),
        without_identity=_without_identity(conn, entries),
    )


def _holder(conn: SourceConnection, status: SlotStatus | None) -> Backend | None:
    """The session that reads the slot. Also None if pgcdc's role lacks the rights of pg_read_all_stats, because the
    application name of another role's session is then NULL."""
    if status is None or status.active_pid is None:
        return None
    row = conn.execute(_HOLDER, [status.active_pid]).fetchone()
    return None if row is None or row[1] is None else Backend(*row)


def _published_tables(
    conn: SourceConnection, names: Sequence[str], entries: Mapping[int, Published]
) -> dict[str, PublicationFacts]:
    named = [(oid, TableName(schema, name)) for oid, schema, name in conn.execute(_NAMED, [list(entries)])]
    return {
        name: PublicationFacts(name, frozenset(t for oid, t in named if name in entries[oid].publications), *operations)
        for name, *operations in conn.execute(_PUBLICATIONS, [list(names)])
    }


def _without_identity(conn: SourceConnection, entries: Mapping[int, Published]) -> frozenset[TableName]:
    """Relations whose updates or deletes PostgreSQL refuses. For a partitioned table, the replica identities of its
    leaf partitions decide."""
    published = {oid: entry for oid, entry in entries.items() if entry.updates or entry.deletes}
    relations = read_relations(conn, published)
    leaves = read_leaves(conn, [oid for oid, relation in relations.items() if relation.partitioned])
    relations |= read_relations(conn, {leaf for group in leaves.values() for leaf in group} - relations.keys())
    storage = (relation for relation in relations.values() if not relation.partitioned)
    return frozenset(relation.name for relation in storage if relation.refuses_updates)
