"""Reads the mirrored tables from the source's catalog, all with one snapshot.

Reading all facts of 1,000 tables takes a quarter of a second. Reading a fingerprint of their catalog rows takes a few
milliseconds (:class:`CatalogSnapshot`), so pgcdc can afford to check the catalog for each consistent point.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import psycopg
from psycopg.pq import TransactionStatus

from pgcdc_assets.core.catalog import Catalog, Identity, Table, relations_of
from pgcdc_assets.core.marks import marks
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import CopyBlocked, SettingsError
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.source.catalog.assembly import Assembly
from pgcdc_assets.source.catalog.pgclass import of_catalog, read_comments, read_leaves, read_relations
from pgcdc_assets.source.catalog.pgtypes import PgTypes
from pgcdc_assets.source.catalog.published import (
    LISTS_SINCE,
    UNREAD,
    PublicationRows,
    read_places,
    read_published,
    refuse_unread,
)
from pgcdc_assets.source.connect.connection import encoding_of
from pgcdc_assets.source.connect.failures import no_publication
from pgcdc_assets.structure.differences import changes

# The query reads the pg_inherits rows of each leaf and of all its ancestors, because a partition that has partitions
# itself may also be detached and attached again.
_ATTACHED = """
WITH RECURSIVE chain (leaf, parent, level, mark) AS (
  SELECT inhrelid, inhparent, 1, ARRAY[inhparent::int8, xmin::text::int8]
  FROM pg_catalog.pg_inherits WHERE inhrelid = ANY(%s)
  UNION ALL SELECT chain.leaf, i.inhparent, chain.level + 1, ARRAY[i.inhparent::int8, i.xmin::text::int8]
    FROM chain JOIN pg_catalog.pg_inherits i ON i.inhrelid = chain.parent
)
SELECT leaf, array_agg(mark ORDER BY level) FROM chain GROUP BY leaf
"""


@of_catalog()
def read_tables(
    conn: psycopg.Connection[Any], publications: Sequence[str], patterns: Sequence[str] = (),
    before: Sequence[Table] = (), blocked: dict[TableName, CopyBlocked] | None = None,
) -> tuple[Table, ...]:  # fmt: skip
    """Returns the mirrored tables of these publications, sorted by name: roots with their leaves, and plain tables.

    The row filter of a locked table or partition cannot be read. Then the filter is taken from ``before``, the tables
    of an earlier reading, if the catalog rows that publish the table have not changed since. Otherwise CopyBlocked is
    raised or, if ``blocked`` is given, the error is stored there under the table's name, and the table is left out of
    the result.
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
        types = PgTypes.read(conn, {oid for relation in relations.values() for oid in relation.types})
        shown = [oid for oid in relations if oid in published or oid in roots]
        comments = read_comments(conn, shown)
    assembly = Assembly(
        conn.info.server_version, published, relations, leaves, rows=rows, places=places, attached=attached,
        types=types, comments=comments,
    )  # fmt: skip
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
    return replace(table, row_filter=before.row_filter, uneven=table.uneven or before.uneven)


@contextmanager
def at_one_moment(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Gives all queries in the block the same snapshot. Otherwise an ALTER PUBLICATION between two queries could look
    as if a table had been removed and added again."""
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
    """Reads the catalog in the form in which the project saves it. ``publications``: first the publication of the
    settings, then our publication for inserts only, if there is one. ``before``: see :func:`read_tables`."""
    tables = read_tables(conn, publications, patterns, before)
    encoding = encoding_of(conn).name
    return Catalog(identity, publications[0], conn.info.server_version, tables, tuple(publications), encoding)


@of_catalog()
def relation_facts(
    conn: psycopg.Connection[Any], relations: Mapping[int, Iterable[int]], publications: Sequence[str]
) -> dict[int, RelationFacts]:
    """Reads from the current catalog the facts that Relation messages lack. ``relations``: for each relation, by OID,
    the OIDs of its columns' types. This takes about ten queries for any number of relations.

    In the result, :attr:`RelationFacts.table` is the relation itself; None if it was dropped. For a leaf, it has the
    leaf's columns and attnums, and names the root. Its key is the root's key, as attnums of the leaf.
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


# The check of the catalog ----------------------------------------------------------------------

_SUM = "count(*)::text || ':' || coalesce(sum(hashint8extended(xmin::text::int8, {})), 0)::text"
# A change of a catalog row writes a row with a new xmin, and a deletion removes a row. So every change gives a
# different sum. There are few enum values, partitions and publications, so all rows of these catalogs are summed. This
# also notices new rows.
_SUMMED = {
    "pg_class": "oid::int8|oid = ANY(%(relations)s)",
    "pg_attribute": "attrelid::int8 * 65536 + attnum|attrelid = ANY(%(relations)s) AND attnum > 0",
    "pg_index": "indexrelid::int8|indrelid = ANY(%(relations)s)",
    "pg_depend": "objid::int8|classid = 'pg_catalog.pg_class'::regclass AND objid = ANY(%(relations)s) AND objsubid = 0"
    " AND refclassid = 'pg_catalog.pg_namespace'::regclass",
    "pg_inherits": "inhrelid::int8|true",
    "pg_enum": "oid::int8|true",
    "pg_namespace": "oid::int8|nspname !~ '^pg_'",
    "pg_publication": "oid::int8|true",
    "pg_publication_rel": "oid::int8|true",
    "pg_publication_namespace": "oid::int8|true",
}
# Selects the relations whose catalog rows are in the fingerprint: the tables, their leaves, the partitioned tables
# between them, and the composite types of their columns.
_DESCRIBING = """
WITH RECURSIVE above (oid) AS (
  SELECT unnest(%(oids)s::oid[])
  UNION SELECT i.inhparent FROM above JOIN pg_catalog.pg_inherits i ON i.inhrelid = above.oid
)
SELECT oid FROM above UNION SELECT typrelid FROM pg_catalog.pg_type WHERE oid = ANY(%(types)s)
"""


@dataclass(frozen=True)
class CatalogSnapshot:
    """The published tables and a fingerprint of the catalog, both at one moment. ``relations``: the OIDs of the
    relations whose catalog rows are in the fingerprint."""

    tables: tuple[Table, ...]
    relations: tuple[int, ...]
    fingerprint: str

    @classmethod
    @of_catalog()
    def read(
        cls, conn: psycopg.Connection[Any], publications: Sequence[str], patterns: Sequence[str],
        before: Sequence[Table] = (),
    ) -> Self:  # fmt: skip
        """Reads the tables of these publications, and their fingerprint. ``before``: see :func:`read_tables`."""
        with at_one_moment(conn):
            tables = read_tables(conn, publications, patterns, before)
            oids = relations_of(tables) | {leaf.oid for table in tables for leaf in table.unpublished}
            oids |= {leaf.oid for table in tables for leaf in table.outside}
            types = {composite.oid for table in tables for composite in table.marks.composites}
            found = conn.execute(_DESCRIBING, {"oids": sorted(oids), "types": sorted(types)}).fetchall()
            relations = tuple(sorted(oid for (oid,) in found))
            return cls(tables, relations, fingerprint(conn, relations))

    def shows(self, table: Table) -> bool:
        """Whether ``table``, which may have been read before or after this snapshot, is the same in this snapshot. A
        change that was undone is noticed too, because a changed mark (:mod:`pgcdc_assets.core.marks`) never gets its
        old value again."""
        seen = next((other for other in self.tables if other.name == table.name), None)
        return seen is not None and not changes(table, seen) and seen.comments == table.comments

    def is_current(self, conn: psycopg.Connection[Any]) -> bool:
        """Whether nothing that this snapshot shows has changed since. A change that was undone counts as a change."""
        return fingerprint(conn, self.relations) == self.fingerprint


def fingerprint(conn: psycopg.Connection[Any], relations: Sequence[int]) -> str:
    """Reads a text that differs after each change of these relations in the catalog, and after each change of a
    partition, enum value or publication. One statement reads it, so that all its parts are from one moment."""
    version = conn.info.server_version
    parts = (
        f"(SELECT {_SUM.format(row)} FROM pg_catalog.{table} WHERE {where})"  # noqa: S608 (texts of our own)
        for table, (row, _, where) in ((table, text.partition("|")) for table, text in _SUMMED.items())
        if table != "pg_publication_namespace" or version >= LISTS_SINCE
    )
    query = f"SELECT concat_ws(' ', {', '.join(parts)})"
    ((fingerprint,),) = conn.execute(query.encode(), {"relations": list(relations)})
    return str(fingerprint)


# The setting `tables` -----------------------------------------------------------------------

_NAME_PART = re.compile(r'"(?:[^"]|"")+"|[^".\s][^".]*')


@dataclass(frozen=True)
class TablePatterns:
    """Patterns of the form ``schema.table`` with ``*`` and ``?``. A pattern that begins with ``-`` excludes tables. A
    name without a schema is in the schema public. A table is selected if an inclusion matches it (or there are no
    inclusions) and no exclusion matches it. Patterns are case-sensitive. A part in double quotes is taken literally."""

    included: tuple[re.Pattern[str], ...] = ()
    excluded: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def parse(cls, patterns: Sequence[str]) -> Self:
        wanted = tuple(_compiled(text) for text in patterns if not text.startswith("-"))
        unwanted = tuple(_compiled(text[1:]) for text in patterns if text.startswith("-"))
        return cls(wanted, unwanted)

    def match(self, table: TableName) -> bool:
        key = f"{table.schema}\0{table.name}"
        if any(pattern.fullmatch(key) for pattern in self.excluded):
            return False
        return not self.included or any(pattern.fullmatch(key) for pattern in self.included)

    def names(self, table: TableName) -> bool:
        """Whether an inclusion selects this table. False if it is selected only because there are no inclusions."""
        return bool(self.included) and self.match(table)


def _compiled(text: str) -> re.Pattern[str]:
    parts = _NAME_PART.findall(text.strip())
    if not 1 <= len(parts) <= 2 or ".".join(parts) != text.strip():
        raise SettingsError(f"{text!r} is not a pattern; write schema.table, public.*, or -public.audit_*",
                            thing="setting `tables`")  # fmt: skip
    schema, name = parts if len(parts) == 2 else ("public", parts[0])
    return re.compile(f"{_name_part(schema)}\0{_name_part(name)}", re.DOTALL)


def _name_part(text: str) -> str:
    if text.startswith('"'):
        return re.escape(text[1:-1].replace('""', '"'))
    return "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in text)
