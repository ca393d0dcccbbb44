"""Findings on a publication that somebody else made and that we use unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import psycopg

from pgcdc_assets.core.catalog import Table, relations_of
from pgcdc_assets.source.catalog.patterns import TablePatterns
from pgcdc_assets.source.catalog.pgclass import CatalogRelation, read_leaves, read_relations
from pgcdc_assets.source.catalog.published import Published, read_published
from pgcdc_assets.source.catalog.tables import read_tables
from pgcdc_assets.source.setup.findings import Finding

_WHOLE_OLD_IMAGES_SINCE = 150000
_TOASTABLE = """
SELECT DISTINCT attrelid FROM pg_catalog.pg_attribute
WHERE attrelid = ANY(%s) AND attnum > 0 AND NOT attisdropped AND attstorage IN ('x', 'e', 'm')
"""


def foreign_findings(conn: psycopg.Connection[Any], name: str, patterns: TablePatterns) -> list[Finding]:
    """Returns, for each table, what its publication leaves out, and what makes writes on the source fail."""
    thing = f"publication {name}"
    published = read_published(conn, [name])
    relations = read_relations(conn, published)
    found = [Finding("info", thing, "was made by somebody else, and is used as it is")]
    if not published:
        found.append(Finding("error", thing, "lists no table", "add tables to it"))
    toastable = {oid for (oid,) in conn.execute(_TOASTABLE, [list(published)])}
    for oid, entry in published.items():
        if oid in relations:
            found += _relation_findings(relations[oid], entry, toastable=oid in toastable)
    via_root = {
        oid: relation for oid, relation in relations.items() if relation.partitioned and published[oid].via_root
    }
    found += _partition_findings(conn, via_root)
    whole = {oid for oid, entry in published.items() if entry.updates and entry.deletes}
    for table in read_tables(conn, [name]):
        if patterns.match(table.name):
            sent = not whole.isdisjoint(relations_of([table]))
            found += _table_findings(table, name, conn.info.server_version, sent=sent)
    return found


def _relation_findings(relation: CatalogRelation, entry: Published, *, toastable: bool) -> Iterator[Finding]:
    thing = f"table {relation.name}"
    if not entry.inserts:
        yield Finding("warning", thing, "is published without insert: its mirror cannot follow",
                      "let the publication publish insert")  # fmt: skip
    elif not (entry.updates and entry.deletes):
        yield Finding("warning", thing, "is published without update or delete: its mirror keeps what they change",
                      "let the publication publish update and delete")  # fmt: skip
    if not entry.truncates:
        yield Finding("warning", thing, "is published without truncate: TRUNCATE, VACUUM FULL and CLUSTER have it "
                      "copied again", "let the publication publish truncate")  # fmt: skip
    if (entry.updates or entry.deletes) and relation.refuses_updates:
        yield Finding("warning", thing, "UPDATE and DELETE fail on the source: no usable replica identity",
                      f"give it a primary key, or ALTER TABLE {relation.name} REPLICA IDENTITY FULL")  # fmt: skip
    if entry.row_filter and entry.updates and toastable and relation.replica_identity != "f":
        yield Finding(
            "warning", thing, "has a row filter and columns that may be stored out of line: an update that moves a "
            "row into the filter may come without their values, and then the table is set aside",
            f"ALTER TABLE {relation.name} REPLICA IDENTITY FULL",
        )  # fmt: skip


def _partition_findings(conn: psycopg.Connection[Any], roots: Mapping[int, CatalogRelation]) -> Iterator[Finding]:
    """Findings on tables that are published via their root.

    If a table is published via its root, Relation messages have the root's replica identity and key flags, but the old
    rows have the key that the leaf's replica identity sends.
    """
    for root, leaves in read_leaves(conn, roots).items():
        own = roots[root].identity
        stored = [leaf for leaf in read_relations(conn, leaves).values() if not leaf.outside]
        others = [leaf for leaf in stored
                  if (leaf.replica_identity, leaf.identity.carried) != (own.replica_identity, own.carried)]  # fmt: skip
        for leaf in others:
            yield Finding("warning", f"table {roots[root].name}",
                          f"partition {leaf.name} has another replica identity than its root",
                          "give both the same one, or publish with publish_via_partition_root = false")  # fmt: skip
        yield Finding("info", f"table {roots[root].name}", "is published via its root: TRUNCATE, ATTACH, DETACH "
                      "and DROP of a single partition are not in the stream")  # fmt: skip


def _table_findings(table: Table, publication: str, server_version: int, *, sent: bool) -> Iterator[Finding]:
    """Findings on one table. ``sent``: whether its updates and deletes are published."""
    if sent and not table.updates_seen:
        yield Finding("warning", f"table {table.name}", "its updates and deletes cannot be mirrored: no usable key "
                      f"among the columns of publication {publication}",
                      "publish its primary key's columns, or give it REPLICA IDENTITY FULL")  # fmt: skip
    if server_version < _WHOLE_OLD_IMAGES_SINCE and table.via_root and table.updates_seen and not table.key:
        yield Finding("warning", f"table {table.name}", "has no key and is published via its root: before PostgreSQL "
                      "15 the old image of a row has NULL in a column that came with a default later than the row, and "
                      "the table is then set aside", "publish with publish_via_partition_root = false, or give it a "
                      "primary key")  # fmt: skip
