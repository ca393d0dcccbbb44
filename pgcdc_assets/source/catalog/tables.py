"""Reads the mirrored tables from the source's catalog, all at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from pgcdc_assets.core.catalog import Catalog, Identity, Table
from pgcdc_assets.core.marks import marks
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.source.catalog.assembly import Assembly
from pgcdc_assets.source.catalog.bare import UNREAD, refuse_unread
from pgcdc_assets.source.catalog.comments import read_comments
from pgcdc_assets.source.catalog.patterns import TablePatterns
from pgcdc_assets.source.catalog.pgclass import of_catalog, read_leaves, read_relations
from pgcdc_assets.source.catalog.pgtypes import PgTypes
from pgcdc_assets.source.catalog.published import PublicationRows, read_places, read_published
from pgcdc_assets.source.catalog.typeparts import TypeParts
from pgcdc_assets.source.connect.connection import encoding_of
from pgcdc_assets.source.connect.failures import no_publication

# Goes up from each leaf, because a partition that has partitions itself may be detached and attached too.
_ATTACHED = """
WITH RECURSIVE chain (leaf, parent, level, mark) AS (
  SELECT inhrelid, inhparent, 1, ARRAY[inhparent::int8, xmin::text::int8]
  FROM pg_catalog.pg_inherits WHERE inhrelid = ANY(%s)
  UNION ALL SELECT chain.leaf, i.inhparent, chain.level + 1, ARRAY[i.inhparent::int8, i.xmin::text::int8]
    FROM chain JOIN pg_catalog.pg_inherits i ON i.inhrelid = chain.parent
)
SELECT leaf, array_agg(mark ORDER BY level) FROM chain GROUP BY leaf
"""

_KEYS = "SELECT conrelid, oid FROM pg_catalog.pg_constraint WHERE conrelid = ANY(%s) AND contype = 'p'"


@of_catalog()
def read_tables(
    conn: psycopg.Connection[Any], publications: Sequence[str], patterns: Sequence[str] = (),
    before: Sequence[Table] = (), blocked: dict[TableName, CopyBlocked] | None = None,
) -> tuple[Table, ...]:  # fmt: skip
    """Returns the mirrored tables of these publications, sorted by name: roots with their leaves, and plain tables.

    ``before``: the tables as they were read earlier. The row filter of a locked table cannot be read. If no catalog row
    that publishes the table has changed since, the row filter is taken from ``before``. Otherwise CopyBlocked is
    raised. With ``blocked``, the error is stored there by the table's name instead, and the table is left out.
    """
    with at_one_moment(conn):
        published = read_published(conn, publications, unread=True)
        relations = read_relations(conn, published)
        roots = {relation.root for relation in relations.values() if relation.root and not relation.partitioned}
        via_root = {oid for oid, relation in relations.items() if relation.partitioned}
        leaves = read_leaves(conn, via_root | roots)
        more = (roots | {leaf for group in leaves.values() for leaf in group}) - relations.keys()
        relations |= read_relations(conn, more)
        rows = PublicationRows.read(conn, publications)
        for gone in set(publications) - rows.publications.keys():
            raise no_publication(gone)
        places = read_places(conn, relations) if rows.schemas else {}
        partitions = [oid for oid, relation in relations.items() if relation.root and not relation.partitioned]
        chains = conn.execute(_ATTACHED, [partitions]).fetchall() if partitions else []
        attached = {leaf: marks(chain) for leaf, chain in chains}
        parts = TypeParts.read(conn, {oid for relation in relations.values() for oid in relation.types})
        shown = [oid for oid in relations if oid in published or oid in roots]
        comments, keys = read_comments(conn, shown), dict(conn.execute(_KEYS, [shown]).fetchall())
    assembly = Assembly(
        conn.info.server_version, published, relations, leaves, rows, places, attached, parts, comments, keys
    )
    wanted = TablePatterns.parse(patterns)
    known = {table.oid: table for table in before}
    made: list[Table] = []
    for table in assembly.tables():
        if wanted.match(table.name):
            try:
                made.append(_filtered(table, known.get(table.oid)))
            except CopyBlocked as error:
                if blocked is None:
                    raise
                blocked[table.name] = error
    return tuple(made)


def _filtered(table: Table, before: Table | None) -> Table:
    if table.row_filter != UNREAD:
        return table
    if before is None or not table.marks.publications or before.marks.publications != table.marks.publications:
        refuse_unread(table.name)
    return replace(table, row_filter=before.row_filter)


@contextmanager
def at_one_moment(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Gives all queries in the block one snapshot. Otherwise an ALTER PUBLICATION that commits between two queries
    could look as if a table had been removed and added again."""
    if conn.info.transaction_status != TransactionStatus.IDLE:
        yield  # The caller has opened a transaction itself.
        return
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield


def read_catalog(
    conn: psycopg.Connection[Any], identity: Identity, publications: Sequence[str], patterns: Sequence[str] = (),
    before: Sequence[Table] = (),
) -> Catalog:  # fmt: skip
    """Reads the catalog to save. The first publication is the main publication. ``before``: see :func:`read_tables`."""
    tables = read_tables(conn, publications, patterns, before)
    encoding = encoding_of(conn).name
    return Catalog(identity, publications[0], conn.info.server_version, tables, tuple(publications), encoding)


@of_catalog()
def relation_facts(
    conn: psycopg.Connection[Any], relations: Mapping[int, Iterable[int]], publications: Sequence[str]
) -> dict[int, RelationFacts]:
    """Reads from the current catalog the facts that Relation messages lack.

    ``relations``: the OIDs of each relation's column types, by the relation's OID.

    Needs about ten queries for any number of relations, because a transaction may touch thousands. In the result,
    ``table`` is the relation itself. For a leaf it has the leaf's columns and attnums, the root's name, and the root's
    key by the leaf's attnums. ``table`` is None if the relation has been dropped.
    """
    wanted = {oid: list(type_oids) for oid, type_oids in relations.items()}
    types = PgTypes.read(conn, {type_oid for type_oids in wanted.values() for type_oid in type_oids})
    found = read_relations(conn, wanted)
    roots = {oid: relation.root for oid, relation in found.items() if relation.root and not relation.partitioned}
    partitioned = {oid for oid, relation in found.items() if relation.partitioned}
    leaves = read_leaves(conn, {*roots.values(), *partitioned})
    published = read_published(conn, publications, {*found, *(oid for group in leaves.values() for oid in group)})
    family = {oid for root in partitioned for oid in leaves.get(root, ())} | set(roots.values())
    family |= {oid for root in roots.values() for oid in leaves.get(root, ()) if oid in published}
    assembly = Assembly(
        conn.info.server_version, published, found | read_relations(conn, family - found.keys()), leaves
    )  # fmt: skip
    facts = {}
    for oid, type_oids in wanted.items():
        known = {type_oid: types.get(type_oid) for type_oid in type_oids if type_oid in types}
        relation = found.get(oid)
        table = None if relation is None else assembly.leaf(relation) if oid in roots else assembly.plain(relation)
        facts[oid] = RelationFacts(table, known, encoding_of(conn).name)
    return facts
