"""The source's catalog as plain facts: tables, columns, keys, leaves, types."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import psycopg
from psycopg.pq import TransactionStatus

from pgcdc_assets.core.catalog import Catalog, Column, Identity, Leaf, ReplicaIdentity, Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.source.catalog.bare import UNREAD, refuse_unread
from pgcdc_assets.source.catalog.comments import Comments, read_comments
from pgcdc_assets.source.catalog.mirrorkey import Index, RowIdentity, followable, mirror_key
from pgcdc_assets.source.catalog.patterns import TablePatterns
from pgcdc_assets.source.catalog.pgtypes import PgTypes
from pgcdc_assets.source.catalog.published import (
    GENERATED_SINCE,
    PublicationRows,
    Published,
    read_places,
    read_published,
)
from pgcdc_assets.source.catalog.typeparts import TypeParts

# Not by pg_relation_filenode(), which answers as of now under any snapshot: the new files of an ALTER TABLE would stand
# beside the columns of before, as those of a TRUNCATE do.
_RELATIONS = """
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relreplident::text,
       c.relfilenode, c.reltoastrelid, greatest(c.relpages, 0), greatest(c.reltuples, 0)::int8,
       CASE WHEN c.relispartition THEN nullif(pg_catalog.pg_partition_root(c.oid)::oid, c.oid) END,
       c.relpersistence = 'u', c.relnatts
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY(%s)
"""
_COLUMNS = """
SELECT attrelid, attnum, attname::text, atttypid, atttypmod, attnotnull, attgenerated::text,
       CASE WHEN atthasmissing THEN (attmissingval::text::text[])[1] END, attnum::text || ':' || xmin::text
FROM pg_catalog.pg_attribute
WHERE attrelid = ANY(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attrelid, attnum
"""
_INDEXES = """
SELECT i.indrelid, i.indisprimary, i.indisreplident,
       i.indisvalid AND i.indisready AND i.indislive AND i.indisunique AND i.indimmediate
           AND i.indpred IS NULL AND i.indexprs IS NULL,
       ARRAY(SELECT a.attname::text
             FROM unnest(string_to_array(i.indkey::text, ' ')::int2[]) WITH ORDINALITY AS k (attnum, place)
             JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
             WHERE k.place <= i.indnkeyatts ORDER BY k.place)
FROM pg_catalog.pg_index i
WHERE i.indrelid = ANY(%s) AND (i.indisprimary OR i.indisreplident)
"""
# Without pg_partition_tree, which would wait for whoever has a leaf locked. A DETACH CONCURRENTLY that was interrupted
# before its second half leaves a partition that no query of its table sees any more.
_LEAVES = """
WITH RECURSIVE tree (root, oid) AS (
  SELECT r.oid, r.oid FROM unnest(%s::oid[]) AS r (oid)
  UNION ALL SELECT tree.root, i.inhrelid FROM tree JOIN pg_catalog.pg_inherits i
    ON i.inhparent = tree.oid AND NOT i.inhdetachpending
    JOIN pg_catalog.pg_class parent ON parent.oid = i.inhparent AND parent.relkind = 'p'
)
SELECT tree.root, tree.oid FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.oid WHERE c.relkind <> 'p'
"""
# Upwards from each leaf, because a branch with partitions of its own may be detached and attached too.
_ATTACHED = """
WITH RECURSIVE chain (leaf, parent, level, mark) AS (
  SELECT inhrelid, inhparent, 1, inhparent::text || ':' || xmin::text
  FROM pg_catalog.pg_inherits WHERE inhrelid = ANY(%s)
  UNION ALL SELECT chain.leaf, i.inhparent, chain.level + 1, i.inhparent::text || ':' || i.xmin::text
    FROM chain JOIN pg_catalog.pg_inherits i ON i.inhrelid = chain.parent
)
SELECT leaf, string_agg(mark, ' ' ORDER BY level) FROM chain GROUP BY leaf
"""


@dataclass(frozen=True)
class CatalogRelation:
    """A row of pg_class with its columns and identity, whatever publications say of it."""

    oid: int
    name: TableName
    kind: Literal["r", "p"]
    replica_identity: ReplicaIdentity
    relfilenode: int
    toast: int
    pages: int
    rows: int
    root: int | None
    unlogged: bool
    columns: tuple[Column, ...]
    identity: RowIdentity
    column_rows: str
    attnums_given: int
    """As of :attr:`Table.attnums_given`."""

    @property
    def partitioned(self) -> bool:
        return self.kind == "p"

    @property
    def types(self) -> set[int]:
        return {column.type.oid for column in self.columns}

    def numbering_in(self, root: CatalogRelation) -> tuple[tuple[int, int], ...] | None:
        """As of :attr:`Leaf.numbering`."""
        if [column.name for column in self.columns] != [column.name for column in root.columns]:
            return None
        alike = [(own.attnum, theirs.attnum) for own, theirs in zip(self.columns, root.columns, strict=True)]
        alike.append((self.attnums_given + 1, root.attnums_given + 1))
        above = [theirs - own for own, theirs in alike]
        begins = [at for at in range(len(above)) if at == 0 or above[at] != above[at - 1]]
        return tuple((alike[at][0], above[at]) for at in begins)

    def attnums(self, names: Iterable[str]) -> tuple[int, ...]:
        by_name = {column.name: column.attnum for column in self.columns}
        return tuple(by_name[name] for name in names if name in by_name)


def read_relations(conn: psycopg.Connection[Any], oids: Iterable[int]) -> dict[int, CatalogRelation]:
    """The relations that still exist under these oids. Four queries, however many relations."""
    wanted = sorted(set(oids))
    heads = list(conn.execute(_RELATIONS, [wanted]))
    attributes = list(conn.execute(_COLUMNS, [wanted]))
    types = PgTypes.read(conn, {row[3] for row in attributes})
    columns: dict[int, list[Column]] = defaultdict(list)
    marks: dict[int, list[str]] = defaultdict(list)
    for oid, attnum, name, type_oid, typmod, not_null, generated, missing, mark in attributes:
        marks[oid].append(mark)
        columns[oid].append(Column(attnum, name, types.get(type_oid, typmod), not_null, generated, missing))
    indexes: dict[int, list[Index]] = defaultdict(list)
    for oid, primary, identity, usable, names in conn.execute(_INDEXES, [wanted]):
        indexes[oid].append(Index(tuple(names), primary, identity, usable))
    return {
        oid: CatalogRelation(
            oid, TableName(schema, name), kind, replident, filenode or 0, toast, pages, rows, root, unlogged,
            tuple(columns[oid]), RowIdentity.of(replident, indexes[oid]), " ".join(marks[oid]),
            given,
        )
        for oid, schema, name, kind, replident, filenode, toast, pages, rows, root, unlogged, given in heads
    }  # fmt: skip


def read_leaves(conn: psycopg.Connection[Any], roots: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Oids of all leaves of each partitioned table, published or not."""
    found: dict[int, list[int]] = defaultdict(list)
    wanted = sorted(set(roots))
    for root, leaf in conn.execute(_LEAVES, [wanted]) if wanted else ():
        found[root].append(leaf)
    return {root: tuple(sorted(leaves)) for root, leaves in found.items()}


def without_rows(conn: psycopg.Connection[Any], relation: int) -> bool:
    """Whether a relation has no page: then no transaction has a row in it. False for one that is locked or gone.

    No lock is held beside this one, and nobody is waited for longer than briefly.
    """
    if conn.info.transaction_status != TransactionStatus.IDLE:
        raise ValueError("a lock would be held until the end of the transaction that is open")
    with suppress(psycopg.errors.LockNotAvailable), conn.transaction():
        conn.execute("SET LOCAL lock_timeout = '100ms'")
        row = conn.execute("SELECT pg_catalog.pg_relation_size(%s::oid)", [relation]).fetchone()
        return row is not None and row[0] == 0
    return False


def read_tables(
    conn: psycopg.Connection[Any], publications: Sequence[str], patterns: Sequence[str] = (),
    before: Sequence[Table] = (),
) -> tuple[Table, ...]:  # fmt: skip
    """The mirrored tables of these publications, by name: roots and plain tables. Roots hold their leaves.

    ``before``: as they were read earlier. The row filter of a locked table, which cannot be read, is the one that it
    had then, if no row of the catalog that publishes it has changed since. Otherwise CopyBlocked is raised.
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
        places = read_places(conn, relations) if rows.schemas else {}
        partitions = [oid for oid, relation in relations.items() if relation.root and not relation.partitioned]
        attached = dict(conn.execute(_ATTACHED, [partitions]).fetchall()) if partitions else {}
        parts = TypeParts.read(conn, {oid for relation in relations.values() for oid in relation.types})
        comments = read_comments(conn, [oid for oid in relations if oid in published or oid in roots])
    assembly = _Assembly(
        conn.info.server_version, published, relations, leaves, rows, places, attached, parts, comments
    )
    wanted = TablePatterns.parse(patterns)
    known = {table.oid: table for table in before}
    tables = (table for table in assembly.tables() if wanted.match(table.name))
    return tuple(_filtered(table, known.get(table.oid)) for table in tables)


def _filtered(table: Table, before: Table | None) -> Table:
    if table.row_filter != UNREAD:
        return table
    if before is None or not table.publication_rows or before.publication_rows != table.publication_rows:
        refuse_unread(table.name)
    return replace(table, row_filter=before.row_filter)


@contextmanager
def at_one_moment(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Gives all queries one snapshot: half of an ALTER PUBLICATION would look like a table that was lost and
    regained."""
    if conn.info.transaction_status != TransactionStatus.IDLE:
        yield  # The caller has opened a transaction of its own.
        return
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield


def read_catalog(
    conn: psycopg.Connection[Any], identity: Identity, publications: Sequence[str], patterns: Sequence[str] = (),
    before: Sequence[Table] = (),
) -> Catalog:  # fmt: skip
    """The catalog to save. The first publication is the main one. ``before``: see :func:`read_tables`."""
    tables = read_tables(conn, publications, patterns, before)
    return Catalog(identity, publications[0], conn.info.server_version, tables, tuple(publications))


def relation_facts(
    conn: psycopg.Connection[Any], relations: Mapping[int, Iterable[int]], publications: Sequence[str]
) -> dict[int, RelationFacts]:
    """What Relation messages lack, as the catalog has it now. ``relations``: the OIDs of each relation's column types,
    by its OID.

    Some ten queries, however many relations: a transaction may touch thousands. ``table`` is the relation itself: a
    leaf has its own columns by its own attnums, its root's name, and the root's key by the leaf's attnums. It is None
    once the relation is dropped.
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
    assembly = _Assembly(
        conn.info.server_version, published, found | read_relations(conn, family - found.keys()), leaves
    )  # fmt: skip
    facts = {}
    for oid, type_oids in wanted.items():
        known = {type_oid: types.get(type_oid) for type_oid in type_oids if type_oid in types}
        relation = found.get(oid)
        table = None if relation is None else assembly.leaf(relation) if oid in roots else assembly.plain(relation)
        facts[oid] = RelationFacts(table, known)
    return facts


@dataclass(frozen=True)
class _Assembly:
    """Puts relations, and what is published of them, together as tables."""

    server_version: int
    published: Mapping[int, Published]
    relations: Mapping[int, CatalogRelation]
    leaves: Mapping[int, tuple[int, ...]]
    rows: PublicationRows | None = None
    places: Mapping[int, str] = field(default_factory=dict)
    attached: Mapping[int, str] = field(default_factory=dict)
    parts: TypeParts = field(default_factory=TypeParts)
    comments: Mapping[int, Comments] = field(default_factory=dict)

    def tables(self) -> list[Table]:
        made: dict[TableName, Table] = {}
        grouped: dict[int, list[CatalogRelation]] = defaultdict(list)
        for oid in self.published:
            relation = self.relations.get(oid)
            if relation is None:
                continue
            if relation.root and not relation.partitioned:
                grouped[relation.root].append(relation)
            else:
                made[relation.name] = self.plain(relation)
        for root, senders in grouped.items():
            if root in self.relations and self.relations[root].name not in made:
                made[self.relations[root].name] = self.root(self.relations[root], senders)
        return [made[name] for name in sorted(made)]

    def plain(self, relation: CatalogRelation) -> Table:
        """A table that is published as itself; a partitioned one then stands for its leaves' rows."""
        rows = [self.relations[oid] for oid in self.leaves.get(relation.oid, ()) if oid in self.relations]
        senders = [relation.identity, *(leaf.identity for leaf in rows)]
        return self._table(relation, relation.oid, senders, rows)

    def root(self, relation: CatalogRelation, senders: Sequence[CatalogRelation]) -> Table:
        """A partitioned table whose leaves are published as themselves."""
        identities = [sender.identity for sender in senders]
        every = (self.relations[oid] for oid in self.leaves.get(relation.oid, ()) if oid in self.relations)
        others = [leaf for leaf in every if leaf.kind == "r" and leaf.oid not in self.published]
        unlogged = [leaf for leaf in others if leaf.unlogged]
        lacking = [leaf for leaf in others if not leaf.unlogged] if self._ours(senders) else []
        table = self._table(relation, senders[0].oid, identities, [*senders, *unlogged])
        return replace(table, unpublished=self._leaves(lacking, relation, senders[0].oid))

    def _ours(self, senders: Sequence[CatalogRelation]) -> bool:
        """Whether a publication that setup made lists one of these. Somebody else's may mean those alone that it
        lists."""
        if self.rows is None:
            return False
        return any(not self.rows.ours.isdisjoint(self.published[sender.oid].publications) for sender in senders)

    def leaf(self, relation: CatalogRelation) -> Table:
        """A leaf by itself, with its root's key by name."""
        root = self.relations.get(relation.root or 0)
        own = self._table(relation, relation.oid, [relation.identity], ())
        if root is None:
            return own
        whole = self._roots.get(root.oid) or self.root(root, [relation])
        key = relation.attnums(column.name for column in whole.key_columns)
        seen = own.updates_seen and whole.updates_seen
        return replace(own, root=root.name, root_oid=root.oid, key=key, updates_seen=seen)

    @cached_property
    def _roots(self) -> dict[int, Table]:
        """The roots of published leaves. Each is put together once, because it may have thousands of leaves."""
        senders: dict[int, list[CatalogRelation]] = defaultdict(list)
        for relation in self.relations.values():
            if relation.root and not relation.partitioned and relation.oid in self.published:
                senders[relation.root].append(relation)
        known = self.relations
        return {oid: self.root(known[oid], leaves) for oid, leaves in senders.items() if oid in known}

    def _table(
        self,
        relation: CatalogRelation,
        sender: int,
        identities: Sequence[RowIdentity],
        storage: Sequence[CatalogRelation],
    ) -> Table:
        entry = self.published.get(sender)
        columns = _with_defaults_of(storage, self._columns(relation, entry))
        names = [column.name for column in columns]
        sent = entry is None or (entry.updates and entry.deletes)
        seen = sent and followable(relation.identity, identities, names)
        key = mirror_key(relation.identity, identities, names) if seen else ()
        whole_rows = all(identity.replica_identity == "f" for identity in identities)
        return Table(
            oid=relation.oid,
            name=relation.name,
            columns=columns,
            key=relation.attnums(key),
            replica_identity="f" if whole_rows else relation.replica_identity,
            identity_key=relation.attnums(relation.identity.carried),
            relfilenode=relation.relfilenode,
            partitioned=relation.partitioned,
            via_root=relation.partitioned and sender == relation.oid,
            leaves=self._leaves(storage, relation, sender),
            row_filter=entry.row_filter if entry else None,
            updates_seen=seen,
            pages=relation.pages + sum(leaf.pages for leaf in storage),
            rows=relation.rows if not storage else sum(leaf.rows for leaf in storage),
            toast=relation.toast,
            traceless=self._traceless(relation),
            publication_rows=self._rows(relation, storage)[0],
            schema_rows=self._rows(relation, storage)[1],
            column_rows=relation.column_rows,
            enum_labels=self.parts.labels(relation.types),
            enum_rows=self.parts.label_rows(relation.types),
            composites=self.parts.composites(relation.types),
            attnums_given=relation.attnums_given,
            comments=self._comments(relation, columns),
        )

    def _comments(self, relation: CatalogRelation, columns: Sequence[Column]) -> Comments:
        """Those of the table and of the columns that are published."""
        published = {0, *(column.attnum for column in columns)}
        return tuple(one for one in self.comments.get(relation.oid, ()) if one[0] in published)

    def _leaves(self, storage: Iterable[CatalogRelation], root: CatalogRelation, sender: int) -> tuple[Leaf, ...]:
        return tuple(self._leaf(leaf, root, sender) for leaf in sorted(storage, key=lambda r: r.name))

    def _leaf(self, leaf: CatalogRelation, root: CatalogRelation, sender: int) -> Leaf:
        return Leaf(
            leaf.oid, leaf.name, leaf.relfilenode, leaf.toast, self.attached.get(leaf.oid, ""), leaf.unlogged,
            sender == root.oid or self._traceless(leaf), leaf.numbering_in(root), self._listed(leaf),
            leaf.replica_identity,
        )  # fmt: skip

    def _listed(self, leaf: CatalogRelation) -> str:
        if self.rows is None or leaf.oid not in self.published:
            return ""
        return self.rows.listing(self.published[leaf.oid].publications, leaf.oid)

    def _traceless(self, relation: CatalogRelation) -> bool:
        listed = self.rows is not None and relation.oid in self.rows.listed
        return not relation.partitioned and not relation.toast and not listed

    def _rows(self, relation: CatalogRelation, storage: Sequence[CatalogRelation]) -> tuple[str, str]:
        """The marks ``publication_rows`` and ``schema_rows``."""
        if self.rows is None:
            return "", ""
        members = {relation.oid: relation, **{leaf.oid: leaf for leaf in storage}}
        names = {name for oid in members if oid in self.published for name in self.published[oid].publications}
        schemas = sorted({member.name.schema for member in members.values()})
        marks = [f"{oid}:{self.places[oid]}" for oid in sorted(members) if oid in self.places]
        by_schema = any((name, schema) in self.rows.schemas for name in names for schema in schemas)
        return self.rows.text(names, sorted(members), schemas), " ".join(marks) if by_schema else ""

    def _columns(self, relation: CatalogRelation, entry: Published | None) -> tuple[Column, ...]:
        listed = entry.columns if entry else None
        columns = [column for column in relation.columns if listed is None or column.name in listed]
        if self.server_version < GENERATED_SINCE:
            columns = [column for column in columns if not column.generated]
        return tuple(columns)


def _with_defaults_of(leaves: Sequence[CatalogRelation], columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns with the leaves' defaults: ADD COLUMN ... DEFAULT notes the value of older rows at the leaves, which
    hold them, and not at their root."""
    noted = {column.name: column.missing for leaf in leaves for column in leaf.columns if column.missing is not None}
    return tuple(replace(column, missing=noted.get(column.name, column.missing)) for column in columns)
