"""Reads what publications publish, as the server itself resolves it (pg_publication_tables).

That view waits for each session that holds ACCESS EXCLUSIVE on a published table: an open TRUNCATE or ALTER TABLE, or a
VACUUM FULL. The stream does not wait for such a lock, so we must not make it wait. If a table is locked, the catalog
tables themselves are read instead (:mod:`pgcdc_assets.source.catalog.bare`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import psycopg
from psycopg.errors import InternalError_, LockNotAvailable

from pgcdc_assets.core.marks import Mark, Marks
from pgcdc_assets.source.catalog.bare import (
    COLUMNS,
    LISTS_SINCE,
    OWN_ROW,
    UNREAD,
    read_beside_locks,
    read_leafless,
    refuse_unread,
)

_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '500ms'"
GENERATED_SINCE = 180000
"""The version that introduced publish_generated_columns. In older versions a generated column is never in the stream,
although PostgreSQL 15 lists it."""

_QUERY = """
SELECT c.oid, p.pubname::text, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot, {lists}
FROM pg_catalog.pg_publication_tables t
JOIN pg_catalog.pg_publication p ON p.pubname = t.pubname
JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
{own}
WHERE t.pubname = ANY(%(names)s){only} ORDER BY c.oid, p.pubname
"""
_ONLY = " AND c.oid = ANY(%(oids)s)"
# The view's own list of columns mixes the newest catalog with the query's snapshot. A column that was dropped between
# the two, while another column was added, would look like a column that is no longer published.
_LISTS = f"{COLUMNS}, t.rowfilter"
_NO_LISTS = "NULL::text[], NULL::text"


@dataclass(frozen=True)
class Published:
    """What the stream carries of one relation, from all its publications together."""

    oid: int
    publications: tuple[str, ...]
    inserts: bool
    updates: bool
    deletes: bool
    truncates: bool
    via_root: bool
    columns: tuple[str, ...] | None
    """Names of the published columns. None means all columns (before PostgreSQL 15)."""
    row_filter: str | None


def read_published(
    conn: psycopg.Connection[Any], publications: Sequence[str], oids: Iterable[int] | None = None, *,
    unread: bool = False,
) -> dict[int, Published]:  # fmt: skip
    """Returns the relations of these publications by OID: leaves or roots, as each publication publishes them.

    A root without leaves is returned itself. ``oids`` restricts the result to these relations, which is much cheaper if
    the publications have hundreds of tables. If a table is locked and its row filter cannot be read, the row filter is
    UNREAD with ``unread``; without ``unread``, CopyBlocked is raised.
    """
    version = conn.info.server_version
    lists, own = (_LISTS, OWN_ROW) if version >= LISTS_SINCE else (_NO_LISTS, "")
    query = _QUERY.format(lists=lists, own=own, only="" if oids is None else _ONLY)
    wanted = {"names": list(publications), "oids": sorted(set(oids or ())), "version": version}
    try:
        # The rollback restores the lock_timeout of the caller's own transaction.
        with conn.transaction(force_rollback=True):
            conn.execute(_LOCK_TIMEOUT)
            found = conn.execute(query.encode(), wanted).fetchall()
        found += read_leafless(conn, publications, oids)
    except (LockNotAvailable, InternalError_):
        # InternalError_ is raised if a table is dropped while the view is read: "could not open relation with OID".
        found = read_beside_locks(conn, publications, oids)
        locked = [row[0] for row in found if row[-1] == UNREAD]
        if locked and not unread:
            refuse_unread(conn.execute("SELECT %s::regclass::text", locked[:1]).fetchall()[0][0])
    rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in found:
        rows[row[0]].append(row)
    return {oid: _combined(oid, entries) for oid, entries in rows.items()}


def _combined(oid: int, entries: list[tuple[Any, ...]]) -> Published:
    """Combines several publications of one table. An operation is published if any publication publishes it. Row
    filters are combined by OR.

    Different column lists for one table need no handling here: the server itself reports them as an error.
    """
    _, names, inserts, updates, deletes, truncates, via_root, columns, filters = zip(*entries, strict=True)
    listed = None if any(column is None for column in columns) else tuple(columns[0])
    return Published(
        oid, tuple(names), any(inserts), any(updates), any(deletes), any(truncates), any(via_root), listed,
        _any_filter(filters),
    )  # fmt: skip


def _any_filter(filters: Iterable[str | None]) -> str | None:
    given = list(filters)
    if UNREAD in given:
        return None if None in given else UNREAD
    if any(text is None for text in given):
        return None
    unique = sorted({text for text in given if text is not None})
    return unique[0] if len(unique) == 1 else " OR ".join(f"({text})" for text in unique)


_PUBLICATION_ROWS = """
SELECT p.pubname::text, NULL::oid, NULL::text, ARRAY[p.oid::int8, p.xmin::text::int8]
FROM pg_catalog.pg_publication p WHERE p.pubname = ANY(%(names)s)
UNION ALL
SELECT p.pubname::text, r.prrelid, NULL, ARRAY[r.oid::int8, r.xmin::text::int8]
FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = ANY(%(names)s)
"""
_SCHEMA_ROWS = """
UNION ALL
SELECT p.pubname::text, NULL, n.nspname::text, ARRAY[s.oid::int8, s.xmin::text::int8]
FROM pg_catalog.pg_publication_namespace s JOIN pg_catalog.pg_publication p ON p.oid = s.pnpubid
JOIN pg_catalog.pg_namespace n ON n.oid = s.pnnspid
WHERE p.pubname = ANY(%(names)s)
"""
MARK: Final = "Made by pgcdc_assets for slot "
"""Beginning of the comment on each publication that setup made."""
_OURS = """
SELECT pubname::text FROM pg_catalog.pg_publication
WHERE pubname = ANY(%(names)s) AND starts_with(pg_catalog.obj_description(oid, 'pg_publication'), %(mark)s)
"""
_PLACES = """
SELECT objid, xmin::text::int8 FROM pg_catalog.pg_depend
WHERE classid = 'pg_catalog.pg_class'::regclass AND objid = ANY(%s) AND objsubid = 0
  AND refclassid = 'pg_catalog.pg_namespace'::regclass AND deptype = 'n'
"""


def read_places(conn: psycopg.Connection[Any], oids: Iterable[int]) -> dict[int, int]:
    """Returns the xmin of the pg_depend row that ties each relation to its schema. Only SET SCHEMA writes this row
    again.

    Only a publication of a schema loses a table by SET SCHEMA. It has the table again once the table is moved back.
    """
    return dict(conn.execute(_PLACES, [sorted(set(oids))]).fetchall())


@dataclass(frozen=True)
class PublicationRows:
    """The catalog rows that publish tables. A table that was removed from a publication and added again has new
    rows."""

    publications: Mapping[str, Mark]
    relations: Mapping[tuple[str, int], Mark]
    schemas: Mapping[tuple[str, str], Mark]
    ours: frozenset[str]
    """The publications that setup made."""

    @classmethod
    def read(cls, conn: psycopg.Connection[Any], names: Sequence[str]) -> PublicationRows:
        query = _PUBLICATION_ROWS + (_SCHEMA_ROWS if conn.info.server_version >= LISTS_SINCE else "")
        rows = list(conn.execute(query.encode(), {"names": list(names)}))
        ours = frozenset(name for (name,) in conn.execute(_OURS, {"names": list(names), "mark": MARK}))
        return cls(
            {name: (row, xmin) for name, oid, schema, (row, xmin) in rows if oid is None and schema is None},
            {(name, oid): (row, xmin) for name, oid, _, (row, xmin) in rows if oid is not None},
            {(name, schema): (row, xmin) for name, _, schema, (row, xmin) in rows if schema is not None},
            ours,
        )

    @cached_property
    def listed(self) -> frozenset[int]:
        """The relations that a publication lists individually."""
        return frozenset(oid for _, oid in self.relations)

    def listing(self, publications: Iterable[str], oid: int) -> Marks:
        """Returns the rows that list a relation individually."""
        return tuple(sorted(self.relations[name, oid] for name in publications if (name, oid) in self.relations))

    def of(self, publications: Iterable[str], oids: Iterable[int], schemas: Iterable[str]) -> Marks:
        """Returns the rows that concern a table: of its publications, of the table and its partitions, and of its
        schemas."""
        members, places = list(oids), list(schemas)
        marks: list[Mark] = []
        for name in publications:
            marks += [self.publications[name]] if name in self.publications else []
            marks += [self.relations[name, oid] for oid in members if (name, oid) in self.relations]
            marks += [self.schemas[name, schema] for schema in places if (name, schema) in self.schemas]
        return tuple(sorted(marks))
