"""Decides which tables the settings select, and how each table can be published so that no write on the source fails.

PostgreSQL refuses UPDATE and DELETE on a table without a usable replica identity if a publication publishes them. So
such a table is published for inserts and truncates only."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from pgcdc_assets.core.encoding import marked
from pgcdc_assets.core.names import TableName
from pgcdc_assets.source.catalog.pgclass import CatalogRelation, followable, mirror_key, read_leaves, read_relations
from pgcdc_assets.source.catalog.published import GENERATED_SINCE
from pgcdc_assets.source.catalog.tables import TablePatterns

# Partitions are not selected here, because they are selected with their root tables. The last column says whether the
# table belongs to an extension. Such a table is selected only if the patterns include it, and not if they only exclude
# other tables.
_USER_TABLES = """
SELECT c.oid, n.nspname::text, c.relname::text,
       EXISTS (SELECT FROM pg_catalog.pg_depend d
               WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT c.relispartition
  AND pg_catalog.pg_relation_is_publishable(c.oid)
  AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
  AND (%(only)s::oid IS NULL OR c.oid = %(only)s)
"""

NO_PARTITION: Final = "no primary key, and no partition yet"


@dataclass(frozen=True)
class Planned:
    """A selected table, and its relations that a publication of ours should list: the table itself, or its leaves.
    ``reason``: why the table can be published for inserts only; None if its updates can be published too."""

    oid: int
    table: TableName
    relations: tuple[CatalogRelation, ...]
    reason: str | None = None

    @property
    def follows_updates(self) -> bool:
        return self.reason is None


def meant_tables(
    conn: psycopg.Connection[Any], patterns: Sequence[str], only: int | None = None
) -> dict[TableName, int]:
    """Returns the existing tables that the patterns select, with their OIDs. Leaves out tables whose names are not
    valid text in the source's encoding."""
    chosen = TablePatterns.parse(patterns)
    names = [(oid, name, owned) for oid, name, owned in _user_tables(conn, only) if not marked(str(name))]
    return {name: oid for oid, name, owned in names if (chosen.names(name) if owned else chosen.match(name))}


def unread_tables(conn: psycopg.Connection[Any]) -> list[str]:
    """Returns the tables whose names are not valid text in the source's encoding."""
    return [str(name) for _, name, _ in _user_tables(conn, None) if marked(str(name))]


def _user_tables(conn: psycopg.Connection[Any], only: int | None) -> list[tuple[int, TableName, bool]]:
    found = conn.execute(_USER_TABLES, {"only": only})
    return [(oid, TableName(schema, name), owned) for oid, schema, name, owned in found]


def wanted_tables(
    conn: psycopg.Connection[Any], patterns: Sequence[str], only: int | None = None, kept: Container[int] = ()
) -> list[Planned]:  # fmt: skip
    """Returns the tables that the patterns select, sorted by name, with the relations that our publications should
    list. ``only``: the OID of the one table to return. ``kept``: OIDs of relations that are listed now. If leaves of a
    partitioned table are among them, the leaves stay listed, and the table itself is not listed instead."""
    oids = list(meant_tables(conn, patterns, only).values())
    relations = read_relations(conn, oids)
    leaves = read_leaves(conn, [oid for oid, relation in relations.items() if relation.partitioned])
    storage = read_relations(conn, [leaf for group in leaves.values() for leaf in group])
    version = conn.info.server_version
    named = {oid: leaf for oid, leaf in storage.items() if not marked(str(leaf.name))}
    groups = {oid: [named[leaf] for leaf in leaves.get(oid, ()) if leaf in named] for oid in relations}
    made = [_kept(relation, groups[oid], kept) or _wanted(relation, groups[oid], version)
            for oid, relation in relations.items()]  # fmt: skip
    return sorted(made, key=lambda wanted: wanted.table)


def _kept(relation: CatalogRelation, leaves: Sequence[CatalogRelation], kept: Container[int]) -> Planned | None:
    if relation.oid in kept or all(leaf.oid not in kept for leaf in leaves):
        return None
    listed = [leaf for leaf in leaves if not leaf.outside and (leaf.oid in kept or leaf.identity.publishable)]
    return Planned(relation.oid, relation.name, tuple(listed))


def _wanted(relation: CatalogRelation, leaves: Sequence[CatalogRelation], version: int) -> Planned:
    if not relation.partitioned:
        return Planned(relation.oid, relation.name, (relation,), _unfollowed(relation, [relation], version))
    stored = [leaf for leaf in leaves if not leaf.outside]
    reason = _unfollowed(relation, stored, version)
    if reason:
        return Planned(relation.oid, relation.name, (relation,), reason)
    key = mirror_key(relation.identity, [leaf.identity for leaf in stored], _published(relation, version))
    if key and key == relation.identity.primary:
        return Planned(relation.oid, relation.name, (relation,))
    # If the root is listed, later partitions are published too. A later partition has a replica identity from its start
    # only if the root has a primary key. Otherwise updates of this partition would fail on the source, so the leaves
    # are listed one by one.
    return Planned(relation.oid, relation.name, tuple(stored))


def _unfollowed(relation: CatalogRelation, senders: Sequence[CatalogRelation], version: int) -> str | None:
    """Returns why updates of this table are not published: the mirror could not apply them, or they would fail on the
    source. None if they are published."""
    lacking = [sender.name for sender in senders if not sender.identity.publishable]
    if lacking and lacking != [relation.name]:
        return f"partition {lacking[0]} has no usable replica identity"
    if lacking:
        return "no usable replica identity"
    if not followable(relation.identity, [sender.identity for sender in senders], _published(relation, version)):
        return "no key that all its partitions share" if relation.partitioned else "its key is not published"
    if not senders and not relation.identity.primary:
        return NO_PARTITION
    return None


def _published(relation: CatalogRelation, version: int) -> list[str]:
    """Returns the columns that our publications publish. Stored generated columns are published since PostgreSQL 18,
    and virtual columns never."""
    shown = ("", "s") if version >= GENERATED_SINCE else ("",)
    return [column.name for column in relation.columns if column.generated in shown]


def stored_tables(conn: psycopg.Connection[Any], tables: Iterable[int], *, later: bool = False) -> list[int]:
    """Returns these tables, and all leaves of partitioned tables. A copy reads each leaf separately, and needs the
    right to read each leaf. ``later`` includes leaves that an ALTER TABLE could make replicable, such as UNLOGGED
    leaves."""
    relations = read_relations(conn, tables)
    roots = [oid for oid, relation in relations.items() if relation.partitioned]
    leaves = {leaf for group in read_leaves(conn, roots).values() for leaf in group}
    relations |= read_relations(conn, leaves - relations.keys())
    return sorted(oid for oid, relation in relations.items() if relation.root is None or not relation.outside
                  or (later and relation.kind != "f"))  # fmt: skip
