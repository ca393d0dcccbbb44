"""Findings of ``setup`` on the selected tables, and on a publication that somebody else made. Some findings are on rows
that a query of a table returns but its mirror lacks, or on rows that may change although the stream shows nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import psycopg

from pgcdc_assets.core.catalog import Table, relations_of
from pgcdc_assets.core.names import TableName, nearest
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.catalog.pgclass import CatalogRelation, read_leaves, read_relations
from pgcdc_assets.source.catalog.pgtypes import PgTypes
from pgcdc_assets.source.catalog.published import Published, read_published
from pgcdc_assets.source.catalog.tables import TablePatterns, read_tables
from pgcdc_assets.source.setup.findings import Finding, identity_full, named
from pgcdc_assets.source.setup.publications import OwnPublication, read_publication
from pgcdc_assets.source.setup.selection import NO_PARTITION, Planned, meant_tables, unread_tables

NONE_SELECTED: Final = "lists no table that the setting `tables` selects", "add tables to it, or change `tables`"
"""The finding on a publication without a table to mirror, and what to do."""
_WHOLE_OLD_IMAGES_SINCE = 150000
_TOASTABLE = """
SELECT DISTINCT attrelid FROM pg_catalog.pg_attribute
WHERE attrelid = ANY(%s) AND attnum > 0 AND NOT attisdropped AND attstorage IN ('x', 'e', 'm')
"""
# Partitions do not appear here: their parent is a partitioned table (relkind p).
_CHILDREN = """
SELECT p.oid, array_agg(format('%%s.%%s', n.nspname, c.relname) ORDER BY n.nspname, c.relname)
FROM pg_catalog.pg_inherits i
JOIN pg_catalog.pg_class p ON p.oid = i.inhparent AND p.relkind = 'r'
JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE p.oid = ANY(%s) GROUP BY p.oid
"""
_LISTED = "SELECT prrelid FROM pg_catalog.pg_publication_rel WHERE prrelid = ANY(%s)"


def pattern_findings(conn: psycopg.Connection[Any], settings: Settings, *, needed: bool) -> list[Finding]:
    """Returns a warning for each pattern that matches no existing table. ``needed``: whether no table is selected at
    all; these findings are then errors."""
    idle = [text for text in settings.tables if not meant_tables(conn, [text.removeprefix("-")])]
    there = list(meant_tables(conn, ())) if idle or needed else []
    found = []
    for text in idle:
        near = nearest(text.split(".")[-1], there)
        others = f"the tables are {named([str(name) for name in there])}" if there else ""
        do = f"did you mean {near}?" if near else others
        found.append(Finding("error" if needed else "warning", f"pattern `{text}`",
                             "in the setting `tables` matches no table", do))  # fmt: skip
    if needed and not idle:
        do = "change the setting `tables`, which excludes all tables" if there else "create one"
        found.append(Finding("error", "source", "has no table to mirror", do))
    return found


def unread_findings(conn: psycopg.Connection[Any]) -> list[Finding]:
    names = unread_tables(conn)
    return [Finding("warning", named(names), "is not mirrored: the name is not valid text in the source's encoding",
                    "rename it on the source")] if names else []  # fmt: skip


def identity_findings(wanted: Sequence[Planned]) -> list[Finding]:
    """Returns findings on tables whose updates cannot be published. There is one finding for each reason, with all its
    tables, because hundreds of tables may have no key."""
    tables: dict[tuple[str, bool], list[TableName]] = {}
    for item in wanted:
        if item.reason:
            tables.setdefault((item.reason, item.relations[0].partitioned), []).append(item.table)
    return [_unfollowed(reason, found, partitioned) for (reason, partitioned), found in tables.items()]


def _unfollowed(reason: str, tables: Sequence[TableName], partitioned: bool) -> Finding:
    each, thing, whose, one = "it", f"table {tables[0]}", "its", str(tables[0])
    if len(tables) > 1:
        each, thing, whose, one = "each", f"tables {named([str(table) for table in tables])}", "their", "..."
    if reason == NO_PARTITION:
        what = (
            f"{reason}: {whose} updates are replicated once {each} has a partition that can be published with updates"
        )
        return Finding("info", thing, what)
    return Finding(
        "warning", thing, f"{reason}: {whose} updates and deletes are not replicated",
        f"give {each} a primary key, or {identity_full(one, partitioned=partitioned)}; then run `pgcdc setup`",
    )  # fmt: skip


def key_findings(wanted: Sequence[Planned]) -> list[Finding]:
    """Returns a finding that says what happens if a table loses its key. One finding covers all tables, because nearly
    every table has a key, and a key is rarely dropped."""
    keyed = sum(item.follows_updates for item in wanted)
    if not keyed:
        return []
    number = "1 table replicates" if keyed == 1 else f"{keyed} tables replicate"
    return [
        Finding(
            "info", "keys", f"{number} updates and deletes: if such a table loses its key or replica identity, "
            "PostgreSQL refuses UPDATE and DELETE on it",
            "if you drop a key, add the new key in the same transaction, or set REPLICA IDENTITY FULL first",
        )
    ]  # fmt: skip


def foreign_findings(conn: psycopg.Connection[Any], name: str, patterns: TablePatterns) -> list[Finding]:
    """Returns findings on a publication that somebody else made: what it leaves out of each table, and which writes on
    the source fail because of it."""
    thing, maker = f"publication {name}", (read_publication(conn, name) or OwnPublication(name)).maker
    published = read_published(conn, [name])
    relations = read_relations(conn, published)
    found = [Finding("info", thing, f"{maker}, and is used unchanged")]
    selected = [table for table in read_tables(conn, [name]) if patterns.match(table.name)]
    if not published:
        found.append(Finding("error", thing, "lists no table", "add tables to it"))
    elif not selected:
        found.append(Finding("error", thing, *NONE_SELECTED))
    toastable = {oid for (oid,) in conn.execute(_TOASTABLE, [list(published)])}
    for oid, entry in published.items():
        if oid in relations:
            found += _relation_findings(relations[oid], entry, toastable=oid in toastable)
    via_root = {
        oid: relation for oid, relation in relations.items() if relation.partitioned and published[oid].via_root
    }
    found += _partition_findings(conn, via_root)
    whole = {oid for oid, entry in published.items() if entry.updates and entry.deletes}
    for table in selected:
        sent = not whole.isdisjoint(relations_of([table]))
        found += _table_findings(table, name, conn.info.server_version, sent=sent)
    return found


def _relation_findings(relation: CatalogRelation, entry: Published, *, toastable: bool) -> Iterator[Finding]:
    thing = f"table {relation.name}"
    if not entry.inserts:
        yield Finding("warning", thing, "is published without insert: inserts are not replicated",
                      "let the publication publish insert")  # fmt: skip
    elif not (entry.updates and entry.deletes):
        yield Finding("warning", thing, "is published without update or delete: its mirror does not get these changes",
                      "let the publication publish update and delete")  # fmt: skip
    if not entry.truncates:
        yield Finding("warning", thing, "is published without truncate: it is copied again after TRUNCATE, "
                      "VACUUM FULL or CLUSTER", "let the publication publish truncate")  # fmt: skip
    if (entry.updates or entry.deletes) and relation.refuses_updates:
        yield Finding("warning", thing, "has no usable replica identity, so UPDATE and DELETE fail on the source",
                      f"give it a primary key, or run ALTER TABLE {relation.name} REPLICA IDENTITY FULL")  # fmt: skip
    if entry.row_filter and entry.updates and toastable and relation.replica_identity != "f":
        yield Finding(
            "warning", thing, "has a row filter and columns that may be stored out of line: an update that makes a row "
            "match the filter may arrive without the values of these columns; pgcdc then stops following the table",
            f"ALTER TABLE {relation.name} REPLICA IDENTITY FULL",
        )  # fmt: skip


def _partition_findings(conn: psycopg.Connection[Any], roots: Mapping[int, CatalogRelation]) -> Iterator[Finding]:
    """Yields findings on tables that are published via their root. For such a table, the Relation message has the
    root's replica identity, but an old row in the stream has the key columns of its leaf's replica identity."""
    for root, leaves in read_leaves(conn, roots).items():
        own = roots[root].identity
        stored = [leaf for leaf in read_relations(conn, leaves).values() if not leaf.outside]
        others = [leaf for leaf in stored
                  if (leaf.replica_identity, leaf.identity.carried) != (own.replica_identity, own.carried)]  # fmt: skip
        for leaf in others:
            yield Finding("warning", f"table {roots[root].name}",
                          f"partition {leaf.name} has another replica identity than its root: its updates and deletes "
                          "are sent with other key columns than the root's",
                          "give both the same replica identity, or set publish_via_partition_root = false "
                          "for the publication")  # fmt: skip
        yield Finding("info", f"table {roots[root].name}", "is published with publish_via_partition_root: the "
                      "stream does not show TRUNCATE, ATTACH, DETACH or DROP of a single partition, so pgcdc may have "
                      "to copy the table again after such a command")  # fmt: skip


def _table_findings(table: Table, publication: str, server_version: int, *, sent: bool) -> Iterator[Finding]:
    """``sent``: whether the table's updates and deletes are published."""
    if sent and not table.updates_seen:
        yield Finding(
            "warning", f"table {table.name}", "PostgreSQL refuses UPDATE and DELETE on it, because publication "
            f"{publication} publishes them, but not all columns of the table's replica identity",
            "publish the columns of its primary key; or remove the column list, and set REPLICA IDENTITY FULL",
        )  # fmt: skip
    if server_version < _WHOLE_OLD_IMAGES_SINCE and table.via_root and table.updates_seen and not table.key:
        yield Finding("warning", f"table {table.name}", "has no key and is published with "
                      "publish_via_partition_root: before PostgreSQL 15, an UPDATE or DELETE of a row that is older "
                      "than a column with a default sends NULL as the old value of this column; pgcdc then stops "
                      "following the table", "set publish_via_partition_root = false for the "
                      "publication, or give the table a primary key")  # fmt: skip


def outside_findings(conn: psycopg.Connection[Any], tables: Iterable[int]) -> Iterator[Finding]:
    """Yields a finding for each leaf whose rows logical decoding never sends. ``tables``: OIDs of published tables and
    leaves."""
    relations = read_relations(conn, tables)
    roots = {relation.root or oid for oid, relation in relations.items() if relation.root or relation.partitioned}
    leaves = read_leaves(conn, roots)
    known = relations | read_relations(conn, {*roots, *(leaf for group in leaves.values() for leaf in group)})
    for root in sorted(leaves.keys() & known.keys(), key=lambda oid: known[oid].name):
        for leaf in (known[oid].outside for oid in leaves[root] if oid in known):
            if leaf is not None:
                yield Finding("warning", f"table {known[root].name}", f"{leaf}", leaf.do)


def child_findings(conn: psycopg.Connection[Any], tables: Iterable[int]) -> Iterator[Finding]:
    """Yields a finding for each table that other tables inherit from."""
    children = dict(conn.execute(_CHILDREN, [list(tables)]).fetchall())
    relations = read_relations(conn, children)
    for relation in sorted(relations.values(), key=lambda relation: relation.name):
        yield Finding(
            "warning", f"table {relation.name}", f"is the parent of {named(children[relation.oid])} by INHERITS: its "
            "mirror does not contain the rows of its children; each published child has its own mirror",
            "to get all rows, read the mirrors of the children too",
        )  # fmt: skip


def trace_findings(conn: psycopg.Connection[Any], tables: Iterable[int], *, own_publication: bool) -> list[Finding]:
    """Returns findings on tables and leaves whose rows may change without a trace in the stream: at most one finding of
    each kind. ``own_publication``: whether our publications publish the tables. Our publications list by name all
    tables that are not leaves."""
    relations = list(read_relations(conn, tables).values())
    listed = {oid for (oid,) in conn.execute(_LISTED, [[relation.oid for relation in relations]])}
    listed |= {relation.oid for relation in relations if own_publication and relation.root is None}
    unlisted = [relation for relation in relations if relation.oid not in listed]
    return [*_object_names(conn, relations), *_rewritten(unlisted)]


def _object_names(conn: psycopg.Connection[Any], relations: list[CatalogRelation]) -> list[Finding]:
    types = PgTypes.read(conn, {oid for relation in relations for oid in relation.types})
    columns = sorted(
        f"{relation.name}.{column.name}"
        for relation in relations if relation.root is None
        for column in relation.columns if types.naming([column.type.oid])
    )  # fmt: skip
    if not columns:
        return []
    return [
        Finding(
            "warning", f"columns {named(columns)}", "contain names of database objects (regclass and similar types): "
            "if an object is renamed, its name in older rows changes too, but the stream does not show this, so "
            "mirrors keep the earlier name",
            "after a rename, run `pgcdc snapshot` for the tables with these columns",
        )
    ]  # fmt: skip


def _rewritten(relations: list[CatalogRelation]) -> list[Finding]:
    """Returns a finding on tables without a TOAST table that no publication lists by name. While such a table is
    UNLOGGED, its changes are not in the WAL. PostgreSQL refuses SET UNLOGGED only for tables that a publication lists
    by name. SET UNLOGGED makes new files and a new TOAST table. A TRUNCATE makes only new files. So if there is no
    TOAST table, SET UNLOGGED looks like a TRUNCATE."""
    tables = sorted(
        str(relation.name) for relation in relations if not relation.partitioned and not relation.files.toast
    )
    if not tables:
        return []
    return [
        Finding(
            "info", f"tables {named(tables)}", "have no TOAST table, and no publication lists them by name: pgcdc "
            "copies them again after TRUNCATE, VACUUM FULL or CLUSTER (for a partition, its whole table), because it "
            "cannot distinguish these commands from SET UNLOGGED, after which changes are not in the WAL",
        )
    ]  # fmt: skip
