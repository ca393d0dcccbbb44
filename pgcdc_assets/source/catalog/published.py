"""What publications publish, as the server itself resolves it (pg_publication_tables).

That view waits for whoever holds ACCESS EXCLUSIVE on a published table: an open TRUNCATE or ALTER TABLE, a VACUUM FULL.
The stream does not wait for such a lock, and we must not stop it either: then the bare catalog is read instead.
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
"""The version that brought publish_generated_columns; before it a generated column is never in the stream, though 15
lists it."""

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
# The view's own list of columns is of the newest catalog and of the query's snapshot at once: a column that was dropped
# between the two, as another one was added, would seem to be published no more.
_LISTS = f"{COLUMNS}, t.rowfilter"
_NO_LISTS = "NULL::text[], NULL::text"


@dataclass(frozen=True)
class Published:
    """One relation as the stream of several publications together carries it."""

    oid: int
    publications: tuple[str, ...]
    inserts: bool
    updates: bool
    deletes: bool
    truncates: bool
    via_root: bool
    columns: tuple[str, ...] | None
    """None: all (before 15)."""
    row_filter: str | None


def read_published(
    conn: psycopg.Connection[Any], publications: Sequence[str], oids: Iterable[int] | None = None, *,
    unread: bool = False,
) -> dict[int, Published]:  # fmt: skip
    """The relations of these publications by oid: leaves or roots, as each publication lists them; a root without a
    leaf stands for itself.

    ``oids`` restricts them to these, which is much cheaper among hundreds. With ``unread`` the row filter of a table
    that is locked is UNREAD; without, that raises CopyBlocked.
    """
    version = conn.info.server_version
    lists, own = (_LISTS, OWN_ROW) if version >= LISTS_SINCE else (_NO_LISTS, "")
    query = _QUERY.format(lists=lists, own=own, only="" if oids is None else _ONLY)
    wanted = {"names": list(publications), "oids": sorted(set(oids or ())), "version": version}
    try:
        # A rollback, so that the caller's own transaction keeps its time limit.
        with conn.transaction(force_rollback=True):
            conn.execute(_LOCK_TIMEOUT)
            found = conn.execute(query.encode(), wanted).fetchall()
        found += read_leafless(conn, publications, oids)
    except (LockNotAvailable, InternalError_):
        # The latter is raised if a table is dropped while the view is read: "could not open relation with OID".
        found = read_beside_locks(conn, publications, oids)
        locked = [row[0] for row in found if row[-1] == UNREAD]
        if locked and not unread:
            refuse_unread(conn.execute("SELECT %s::regclass::text", locked[:1]).fetchall()[0][0])
    rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in found:
        rows[row[0]].append(row)
    return {oid: _combined(oid, entries) for oid, entries in rows.items()}


def _combined(oid: int, entries: list[tuple[Any, ...]]) -> Published:
    """Combines several publications of one table: an operation is published if any of them publishes it, and filters
    are OR-ed.

    Different column lists of one table are an error of the server itself.
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
"""How the comment begins of a publication that setup made."""
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
    """xmin of the row in pg_depend that ties each relation to its schema: SET SCHEMA alone writes a new one.

    Only a publication of a schema loses a table that way, and regains it when the table comes back.
    """
    return dict(conn.execute(_PLACES, [sorted(set(oids))]).fetchall())


@dataclass(frozen=True)
class PublicationRows:
    """The catalog rows that publish the table. A table that was taken out and put back has new ones."""

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
        """The relations that a publication lists by themselves."""
        return frozenset(oid for _, oid in self.relations)

    def listing(self, publications: Iterable[str], oid: int) -> Marks:
        """The rows that list a relation by itself."""
        return tuple(sorted(self.relations[name, oid] for name in publications if (name, oid) in self.relations))

    def of(self, publications: Iterable[str], oids: Iterable[int], schemas: Iterable[str]) -> Marks:
        """The rows that concern a table: its publications', its own or its relatives', its schemas'."""
        members, places = list(oids), list(schemas)
        marks: list[Mark] = []
        for name in publications:
            marks += [self.publications[name]] if name in self.publications else []
            marks += [self.relations[name, oid] for oid in members if (name, oid) in self.relations]
            marks += [self.schemas[name, schema] for schema in places if (name, schema) in self.schemas]
        return tuple(sorted(marks))
