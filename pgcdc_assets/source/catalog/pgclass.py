"""Reads rows of pg_class with their columns, keys and comments, and the leaves of partitioned tables. Chooses the
columns that are the key of a mirror.

The stream identifies an old row by the table's replica identity. So the primary key is the mirror's key only if the
replica identity contains all columns of the primary key. Otherwise the identity index is the mirror's key. Deferrable
keys are not used, because one UPDATE (``SET id = -id``) may then swap the keys of two rows. The mirror applies one net
change for each key, and cannot express such a swap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import psycopg
from psycopg.pq import TransactionStatus

from pgcdc_assets.core.catalog import Column, Outside, ReplicaIdentity
from pgcdc_assets.core.formats import reading
from pgcdc_assets.core.marks import Files, Marks, marks
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import SourceFailed
from pgcdc_assets.source.catalog.pgtypes import PgTypes

# We do not call pg_relation_filenode(), because it ignores the query's snapshot. It could return the relfilenode from
# after an ALTER TABLE, while the query returns the columns from before it. The rewrite by ALTER TABLE would then look
# like a TRUNCATE.
_RELATIONS = """
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relreplident::text,
       c.relfilenode, c.reltoastrelid, greatest(c.relpages, 0), greatest(c.reltuples, 0)::int8,
       CASE WHEN c.relispartition THEN nullif(pg_catalog.pg_partition_root(c.oid)::oid, c.oid) END,
       c.relpersistence = 'u', c.relnatts,
       CASE WHEN c.relkind = 'r' AND m.amhandler <> 'pg_catalog.heap_tableam_handler'::regproc THEN m.amname::text END
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_am m ON m.oid = c.relam
WHERE c.oid = ANY(%s)
"""
_COLUMNS = """
SELECT attrelid, attnum, attname::text, atttypid, atttypmod, attnotnull, attgenerated::text,
       CASE WHEN atthasmissing THEN (attmissingval::text::text[])[1] END, ARRAY[attnum::int8, xmin::text::int8]
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
             WHERE k.place <= i.indnkeyatts ORDER BY k.place),
       coalesce((SELECT c.oid FROM pg_catalog.pg_constraint c
                 WHERE c.conrelid = i.indrelid AND c.conindid = i.indexrelid AND c.contype IN ('p', 'u')), i.indexrelid)
FROM pg_catalog.pg_index i
WHERE i.indrelid = ANY(%s) AND (i.indisprimary OR i.indisreplident)
"""
# pg_partition_tree is not used: it waits for locks on partitions. Partitions with inhdetachpending are skipped: they
# remain after an interrupted DETACH CONCURRENTLY, and queries of their table do not see them.
_LEAVES = """
WITH RECURSIVE tree (root, oid) AS (
  SELECT r.oid, r.oid FROM unnest(%s::oid[]) AS r (oid)
  UNION ALL SELECT tree.root, i.inhrelid FROM tree JOIN pg_catalog.pg_inherits i
    ON i.inhparent = tree.oid AND NOT i.inhdetachpending
    JOIN pg_catalog.pg_class parent ON parent.oid = i.inhparent AND parent.relkind = 'p'
)
SELECT tree.root, tree.oid FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.oid WHERE c.relkind <> 'p'
"""
# A separate query, because only the catalog check needs comments. The change log does not store comments.
_COMMENTS = """
SELECT objoid, objsubid, description
FROM pg_catalog.pg_description
WHERE classoid = 'pg_catalog.pg_class'::pg_catalog.regclass AND objoid = ANY(%s) ORDER BY objoid, objsubid
"""
DECODED: Final = frozenset({"tde_heap"})
"""Table access methods of extensions that write the same WAL records as the heap."""
of_catalog = partial(reading, "system catalog of the source", SourceFailed, "check the source for damage")
"""Decorates functions that interpret catalog rows. A row that breaks PostgreSQL's rules raises SourceFailed."""
Comments = tuple[tuple[int, str], ...]
"""The form of :attr:`Table.comments`: attnum (0 for the table) and text, in attnum order."""


@dataclass(frozen=True)
class Index:
    """The primary key, or the index of REPLICA IDENTITY USING INDEX."""

    columns: tuple[str, ...]
    primary: bool
    identity: bool
    usable: bool
    """Whether the index can identify rows: it is valid, unique, immediate, not partial and without expressions."""
    source: int
    """OID of the constraint that has this index; of the index, if no constraint has it."""


@dataclass(frozen=True)
class RowIdentity:
    """How the stream identifies the old rows of one relation."""

    replica_identity: ReplicaIdentity
    primary: tuple[str, ...] = ()
    """Columns of the primary key, if it is usable."""
    index: tuple[str, ...] = ()
    """Columns of the identity index, if it is usable."""
    sources: tuple[tuple[tuple[str, ...], int], ...] = ()
    """The columns of each usable index with its :attr:`Index.source`, first the primary key."""

    @classmethod
    def of(cls, replica_identity: ReplicaIdentity, indexes: Iterable[Index]) -> RowIdentity:
        usable = sorted((index for index in indexes if index.usable), key=lambda index: not index.primary)
        primary = next((index.columns for index in usable if index.primary), ())
        chosen = next((index.columns for index in usable if index.identity), ())
        return cls(replica_identity, primary, chosen, tuple((index.columns, index.source) for index in usable))

    def source_of(self, key: tuple[str, ...]) -> int:
        """Returns :attr:`TableMarks.key_constraint` for a key that has these columns."""
        return next((source for columns, source in self.sources if columns == key), 0)

    @property
    def carried(self) -> tuple[str, ...]:
        """Columns that a key tuple ``K`` contains. Empty if there is no usable key, or if the replica identity is FULL,
        with which the stream contains the whole old row."""
        return {"d": self.primary, "i": self.index}.get(self.replica_identity, ())

    @property
    def publishable(self) -> bool:
        """Whether PostgreSQL accepts updates and deletes on the table while a publication publishes them."""
        return self.replica_identity == "f" or bool(self.carried)

    def delivers(self, key: Sequence[str]) -> bool:
        """Whether every update and delete in the stream contains at least the ``key`` of the old row."""
        return self.replica_identity == "f" or (bool(self.carried) and set(key) <= set(self.carried))

    def candidates(self) -> list[tuple[str, ...]]:
        return [key for key in (self.primary, self.index) if key]


@dataclass(frozen=True)
class CatalogRelation:
    """A row of pg_class with its columns and identity, whether the relation is published or not."""

    oid: int
    name: TableName
    kind: Literal["r", "p", "f"]
    replica_identity: ReplicaIdentity
    files: Files
    pages: int
    rows: int
    root: int | None
    unlogged: bool
    columns: tuple[Column, ...]
    identity: RowIdentity
    column_rows: Marks
    attnums_given: int
    """See :attr:`Table.attnums_given`."""
    access_method: str | None
    """The table access method; None if it is PostgreSQL's heap."""

    @property
    def partitioned(self) -> bool:
        return self.kind == "p"

    @property
    def outside(self) -> Outside | None:
        """Why logical decoding never sends the relation's rows; None if it sends them. Each table access method writes
        its own kind of WAL, and PostgreSQL decodes only the heap's kind. So another access method is accepted only if
        it is known to write the heap's kind (:data:`DECODED`)."""
        if self.kind == "f":
            return Outside(
                self.oid, self.name, "is a foreign table", "replicate its rows from the server that has them"
            )
        if self.unlogged and not self.partitioned:
            return Outside(self.oid, self.name, "is UNLOGGED", f"ALTER TABLE {self.name} SET LOGGED")
        if self.access_method is not None and self.access_method not in DECODED:
            why = f"has the table access method {self.access_method}, which logical decoding does not cover"
            return Outside(self.oid, self.name, why, f"ALTER TABLE {self.name} SET ACCESS METHOD heap")
        return None

    @property
    def refuses_updates(self) -> bool:
        """Whether PostgreSQL refuses UPDATE and DELETE on the relation if a publication publishes them. Never true for
        foreign and unlogged tables, which are not published."""
        return self.kind != "f" and not self.unlogged and not self.identity.publishable

    @property
    def types(self) -> set[int]:
        return {column.type.oid for column in self.columns}

    def numbering_in(self, root: CatalogRelation) -> tuple[tuple[int, int], ...] | None:
        """Returns :attr:`Leaf.numbering` of this leaf under ``root``."""
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


def mirror_key(own: RowIdentity, senders: Sequence[RowIdentity], published: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns of the mirror's key; () if it has no key. ``own``: the table's identity. ``senders``: the
    identities of the relations under whose names the stream sends the rows, which are the table or its leaves.
    ``published``: the published columns. Only the table's own keys are used, because a key that only the leaves have is
    not unique across the leaves."""
    for key in own.candidates():
        if set(key) <= set(published) and all(sender.delivers(key) for sender in senders):
            return key
    return ()


def followable(own: RowIdentity, senders: Sequence[RowIdentity], published: Sequence[str]) -> bool:
    """Whether updates and deletes can be mirrored: by a key or, with REPLICA IDENTITY FULL, by the whole old row."""
    return bool(mirror_key(own, senders, published)) or all(sender.replica_identity == "f" for sender in senders)


@of_catalog()
def read_relations(conn: psycopg.Connection[Any], oids: Iterable[int]) -> dict[int, CatalogRelation]:
    """Returns the relations of ``oids`` that still exist, with about four queries for any number of relations."""
    wanted = sorted(set(oids))
    heads = list(conn.execute(_RELATIONS, [wanted]))
    attributes = list(conn.execute(_COLUMNS, [wanted]))
    if any(None in row[:4] for row in (*heads, *attributes)):
        raise ValueError("pg_class or pg_attribute has NULL as an OID, an attribute number, a name or a kind")
    types = PgTypes.read(conn, {row[3] for row in attributes})
    columns: dict[int, list[Column]] = defaultdict(list)
    rows: dict[int, list[Sequence[int]]] = defaultdict(list)
    for oid, attnum, name, type_oid, typmod, not_null, generated, missing, mark in attributes:
        rows[oid].append(mark)
        columns[oid].append(Column(attnum, name, types.get(type_oid, typmod), not_null, generated, missing))
    indexes: dict[int, list[Index]] = defaultdict(list)
    for oid, primary, identity, usable, names, source in conn.execute(_INDEXES, [wanted]):
        indexes[oid].append(Index(tuple(names), primary, identity, usable, source))
    return {
        oid: CatalogRelation(
            oid, TableName(schema, name), kind, replident, Files(filenode or 0, toast), pages, tuples, root, unlogged,
            tuple(columns[oid]), RowIdentity.of(replident, indexes[oid]), marks(rows[oid]),
            given, method,
        )
        for oid, schema, name, kind, replident, filenode, toast, pages, tuples, root, unlogged, given, method in heads
    }  # fmt: skip


@of_catalog()
def read_leaves(conn: psycopg.Connection[Any], roots: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Returns the OIDs of all leaves of each partitioned table, published or not."""
    found: dict[int, list[int]] = defaultdict(list)
    wanted = sorted(set(roots))
    for root, leaf in conn.execute(_LEAVES, [wanted]) if wanted else ():
        found[root].append(leaf)
    return {root: tuple(sorted(leaves)) for root, leaves in found.items()}


def read_comments(conn: psycopg.Connection[Any], relations: Iterable[int]) -> dict[int, Comments]:
    """Returns the comments of these relations, by OID. Leaves out relations without comments."""
    found: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for oid, attnum, comment in conn.execute(_COMMENTS, [sorted(set(relations))]):
        found[oid].append((attnum, comment))
    return {oid: tuple(comments) for oid, comments in found.items()}


def without_rows(conn: psycopg.Connection[Any], relation: int) -> bool:
    """Whether a relation's file is empty, so that not even an open transaction has a row in it. Returns False if the
    relation was dropped, or stays locked for 100 ms. The connection must not be in a transaction, so that no other lock
    is held during this wait."""
    if conn.info.transaction_status != TransactionStatus.IDLE:
        raise ValueError("the connection is inside a transaction, which would keep the lock until it ends")
    with suppress(psycopg.errors.LockNotAvailable), conn.transaction():
        conn.execute("SET LOCAL lock_timeout = '100ms'")
        row = conn.execute("SELECT pg_catalog.pg_relation_size(%s::oid)", [relation]).fetchone()
        return row is not None and row[0] == 0
    return False
