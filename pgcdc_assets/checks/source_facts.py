"""Reads the facts about the source, by plain SQL on one short connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from pgcdc_assets.checks.health import Backend, PublicationFacts, SourceFacts
from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.pgclass import read_leaves, read_relations
from pgcdc_assets.source.catalog.published import Published, read_published
from pgcdc_assets.source.connect.connection import SourceConnection
from pgcdc_assets.source.setup.publications import made_by_us, read_publication
from pgcdc_assets.source.setup.selection import meant_tables, wanted_tables
from pgcdc_assets.source.slot.blockers import transactions
from pgcdc_assets.source.slot.positions import flush_lsn
from pgcdc_assets.source.slot.slot import SlotStatus, identity

# The values are in the units that pg_settings names. The units differ between versions.
_SETTINGS = "SELECT name::text, setting, coalesce(unit, '') FROM pg_catalog.pg_settings WHERE name = ANY(%s)"
_NAMES = ["wal_level", "max_slot_wal_keep_size", "synchronous_standby_names", "idle_replication_slot_timeout"]
_BYTES = {"": 1, "B": 1, "kB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}

_HOLDER = "SELECT pid, application_name::text FROM pg_catalog.pg_stat_activity WHERE pid = %s"
_PUBLICATIONS = """
SELECT pubname::text, pubinsert, pubupdate, pubdelete, pubtruncate
FROM pg_catalog.pg_publication WHERE pubname = ANY(%s)
"""
# The rows of a leaf go into the mirror of its root. A partition that itself has partitions and is published under its
# own name has its own mirror.
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


@dataclass(frozen=True)
class _Settings:
    rows: dict[str, tuple[str, str]]

    def text(self, name: str) -> str:
        return self.rows[name][0] if name in self.rows else ""

    def bytes(self, name: str) -> int | None:
        """The setting in bytes. None means no limit (-1)."""
        value, unit = self.rows[name]
        return None if value == "-1" else int(value) * _BYTES[unit]

    def span(self, name: str) -> timedelta:
        value, unit = self.rows.get(name, ("0", ""))
        return timedelta(seconds=int(value) * _SECONDS[unit])


def read_source(conn: SourceConnection, slot: str, status: SlotStatus | None, names: Sequence[str]) -> SourceFacts:
    """The facts about the source. ``names``: the publications that we read. Call this after the log's position was
    read."""
    settings = _Settings({name: (value, unit) for name, value, unit in conn.execute(_SETTINGS, [_NAMES])})
    entries = read_published(conn, names, unread=True)
    published = _published_tables(conn, names, entries)
    return SourceFacts(
        identity=identity(conn, slot),
        flush_lsn=flush_lsn(conn),
        wal_level=settings.text("wal_level"),
        max_slot_wal_keep_bytes=settings.bytes("max_slot_wal_keep_size"),
        synchronous_standby_names=settings.text("synchronous_standby_names"),
        idle_slot_timeout=settings.span("idle_replication_slot_timeout"),
        holder=_holder(conn, status),
        oldest=next(iter(transactions(conn)), None),
        publications={name: published.get(name) for name in names},
        without_identity=_without_identity(conn, entries),
    )


def with_settings(conn: SourceConnection, facts: SourceFacts, settings: Settings, *, limited: bool) -> SourceFacts:
    """``facts``, with the tables that are mirrored and the tables that the settings select. ``limited``: some table is
    published for inserts only."""
    publication = read_publication(conn, settings.publication)
    ours = publication is not None and made_by_us(publication, settings.slot)
    wanted = wanted_tables(conn, settings.tables) if limited and ours else []
    rows = conn.execute(_MIRRORED, [list(read_published(conn, list(facts.publications), unread=True))]).fetchall()
    return replace(
        facts,
        mirrored=frozenset(TableName(schema, name) for _, schema, name in rows),
        called={oid: TableName(schema, name) for oid, schema, name in rows},
        meant=frozenset(meant_tables(conn, settings.tables)),
        ours=ours,
        followable=frozenset(item.table for item in wanted if item.follows_updates),
    )


def renamed(conn: SourceConnection, tables: Sequence[Table]) -> list[TableName]:
    """The saved names of the tables that now have another name on the source."""
    named = {oid: TableName(schema, name) for oid, schema, name in conn.execute(_NAMED, [[t.oid for t in tables]])}
    return [table.name for table in tables if named.get(table.oid, table.name) != table.name]


def _holder(conn: SourceConnection, status: SlotStatus | None) -> Backend | None:
    """The session that holds the slot. Without the rights of pg_read_all_stats, the application name of another role's
    session is NULL. The session is then not known, and this returns None."""
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
    """Relations whose updates or deletes PostgreSQL refuses. PostgreSQL checks the replica identity of the leaf, not of
    the root."""
    published = {oid: entry for oid, entry in entries.items() if entry.updates or entry.deletes}
    relations = read_relations(conn, published)
    leaves = read_leaves(conn, [oid for oid, relation in relations.items() if relation.partitioned])
    relations |= read_relations(conn, {leaf for group in leaves.values() for leaf in group} - relations.keys())
    storage = (relation for relation in relations.values() if not relation.partitioned)
    return frozenset(relation.name for relation in storage if relation.refuses_updates)
