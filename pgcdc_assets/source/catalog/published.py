"""Reads what publications publish, as the server's view pg_publication_tables shows it.

The view waits for sessions that hold ACCESS EXCLUSIVE on a published table (TRUNCATE, ALTER TABLE, VACUUM FULL).
Logical decoding does not wait for such a lock, so the receiver must not wait for one in our query either. If a table is
locked, we read the catalog tables instead, by the rules of ``pg_get_publication_tables`` (PostgreSQL,
pg_publication.c). To print a row filter, PostgreSQL opens the filter's table. So we then read each row filter by its
own query, which waits only for this table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NoReturn

import psycopg
from psycopg.errors import InternalError_, LockNotAvailable

from pgcdc_assets.core.marks import Mark, Marks
from pgcdc_assets.errors import CopyBlocked

LISTS_SINCE: Final = 150000
"""PostgreSQL 15 introduced column lists, row filters and publications of schemas."""
GENERATED_SINCE = 180000
"""PostgreSQL 18 introduced publish_generated_columns. Older versions never send generated columns, although PostgreSQL
15 lists them as published."""
MARK: Final = "Made by pgcdc_assets for slot "
"""Beginning of the comment on each publication that setup made."""
UNREAD: Final = "\0"
"""Stands for a row filter that could not be read."""
# Joins the row that lists relation c in publication p, with its column list and row filter. A table that is also
# published with its schema, or by FOR ALL TABLES, has neither.
_OWN_ROW: Final = """
LEFT JOIN pg_catalog.pg_publication_rel own ON own.prpubid = p.oid AND own.prrelid = c.oid AND NOT p.puballtables
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_publication_namespace s
                  WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace)
"""
_COLUMNS: Final = """
  ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
          AND (own.prattrs IS NULL OR a.attnum = ANY(own.prattrs::int2[]))
          AND (a.attgenerated = '' OR %(version)s >= 180000
               AND a.attgenerated = 's' AND (own.prattrs IS NOT NULL OR to_jsonb(p) ->> 'pubgencols' = 's'))
        ORDER BY a.attnum)
"""
"""SQL: names of the columns of relation ``c`` that publication ``p`` publishes. Needs :data:`_OWN_ROW` in the same
query; ``version`` is the server's version. All catalog rows are read under the query's own snapshot."""
_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '500ms'"
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
# We do not use the view's own list of columns, because it mixes the newest catalog with the query's snapshot. If a
# column was dropped and another column was added after the snapshot, the dropped column would look unpublished.
_LISTS = f"{_COLUMNS}, t.rowfilter"
_NO_LISTS = "NULL::text[], NULL::text"


@dataclass(frozen=True)
class Published:
    """Which changes of one relation the stream contains, as all its publications together publish them."""

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
    """Returns the relations of these publications by OID: leaves or roots, as each publication publishes them. A
    partitioned table without leaves is returned with its own OID. ``oids`` restricts the result, which is much cheaper
    with hundreds of published tables.

    A row filter cannot be read while its table is locked. With ``unread``, the filter is then UNREAD in the result.
    Otherwise CopyBlocked is raised."""
    version = conn.info.server_version
    lists, own = (_LISTS, _OWN_ROW) if version >= LISTS_SINCE else (_NO_LISTS, "")
    query = _QUERY.format(lists=lists, own=own, only="" if oids is None else _ONLY)
    wanted = {"names": list(publications), "oids": sorted(set(oids or ())), "version": version}
    try:
        # If the caller has opened a transaction, the rollback of our savepoint restores its lock_timeout.
        with conn.transaction(force_rollback=True):
            conn.execute(_LOCK_TIMEOUT)
            found = conn.execute(query.encode(), wanted).fetchall()
        found += read_leafless(conn, publications, oids)
    except (LockNotAvailable, InternalError_):
        # InternalError_: a table was dropped while the view was read ("could not open relation with OID").
        found = read_beside_locks(conn, publications, oids)
        locked = [row[0] for row in found if row[-1] == UNREAD]
        if locked and not unread:
            refuse_unread(conn.execute("SELECT %s::regclass::text", locked[:1]).fetchall()[0][0])
    rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in found:
        rows[row[0]].append(row)
    return {oid: _combined(oid, entries) for oid, entries in rows.items()}


def _combined(oid: int, entries: list[tuple[Any, ...]]) -> Published:
    """Combines several publications of one table. An operation is published if any publication publishes it, and row
    filters are combined by OR. If publications have different column lists for the table, the server itself raises an
    error."""
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


def refuse_unread(name: object) -> NoReturn:
    """Raises CopyBlocked for a table whose row filter is needed and could not be read."""
    raise CopyBlocked("is locked, so its row filter cannot be read", thing=f"table {name}",
                      do="end the transaction that holds ACCESS EXCLUSIVE on it, "
                      "then run the command again")  # fmt: skip


# Reading the catalog tables instead of the view -----------------------------------------------

_MEMBERS: Final = """
  SELECT p.oid AS pub, r.prrelid AS relid FROM pub p JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid
  UNION SELECT p.oid, c.oid FROM pub p, pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  WHERE p.puballtables AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
    AND n.nspname NOT IN ('pg_catalog', 'information_schema')
"""
_SCHEMA_MEMBERS: Final = """
  UNION SELECT p.oid, c.oid FROM pub p JOIN pg_catalog.pg_publication_namespace s ON s.pnpubid = p.oid
  JOIN pg_catalog.pg_class c ON c.relnamespace = s.pnnspid
  WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
"""
_MEMBERSHIP: Final = """
WITH RECURSIVE pub AS (SELECT * FROM pg_catalog.pg_publication WHERE pubname = ANY(%(names)s)),
member AS ({members}),
below (pub, relid) AS (
  SELECT m.pub, i.inhrelid FROM member m JOIN pg_catalog.pg_inherits i
    ON i.inhparent = m.relid AND NOT i.inhdetachpending
  JOIN pg_catalog.pg_class c ON c.oid = m.relid AND c.relkind = 'p'
  UNION SELECT b.pub, i.inhrelid FROM below b JOIN pg_catalog.pg_inherits i
    ON i.inhparent = b.relid AND NOT i.inhdetachpending
  JOIN pg_catalog.pg_class c ON c.oid = b.relid AND c.relkind = 'p'
),
"""
# Foreign and unlogged leaves do not count as leaves here, because their rows cannot be published.
_LEAFLESS: Final = """
  SELECT m.pub, m.relid FROM member m JOIN pub p ON p.oid = m.pub
  JOIN pg_catalog.pg_class c ON c.oid = m.relid AND c.relkind = 'p' AND NOT c.relispartition
  WHERE NOT p.pubviaroot AND NOT EXISTS (
    WITH RECURSIVE tree (oid) AS (
      SELECT m.relid UNION ALL SELECT i.inhrelid FROM tree
      JOIN pg_catalog.pg_inherits i ON i.inhparent = tree.oid AND NOT i.inhdetachpending
    )
    SELECT FROM tree JOIN pg_catalog.pg_class leaf ON leaf.oid = tree.oid
    WHERE leaf.relkind = 'r' AND leaf.relpersistence = 'p'
  )
"""
_SHOWN: Final = (
    """
  SELECT m.pub, m.relid FROM member m JOIN pub p ON p.oid = m.pub
  WHERE p.pubviaroot AND NOT EXISTS (SELECT FROM below b WHERE b.pub = m.pub AND b.relid = m.relid)
  UNION SELECT f.pub, f.relid FROM (SELECT * FROM member UNION SELECT * FROM below) f JOIN pub p ON p.oid = f.pub
  JOIN pg_catalog.pg_class c ON c.oid = f.relid WHERE NOT p.pubviaroot AND c.relkind = 'r'
  UNION """  # noqa: S608 (texts of our own)
    + _LEAFLESS
)
_ROWS: Final = """
SELECT c.oid, p.pubname::text, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot, {columns}
FROM shown JOIN pub p ON p.oid = shown.pub JOIN pg_catalog.pg_class c ON c.oid = shown.relid {own}
WHERE %(oids)s::oid[] IS NULL OR c.oid = ANY(%(oids)s) ORDER BY c.oid, p.pubname
"""
_FILTER: Final = """
SELECT pg_catalog.pg_get_expr(r.prqual, r.prrelid)
FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
WHERE r.prrelid = %s AND p.pubname = %s
"""
_FILTER_TIMEOUT: Final = "SET LOCAL lock_timeout = '100ms'"
"""Short, because we have already waited for the view, and other sessions wait in the lock queue behind us."""


def read_beside_locks(
    conn: psycopg.Connection[Any], publications: Sequence[str], oids: Iterable[int] | None = None
) -> list[tuple[Any, ...]]:
    """Returns the content of pg_publication_tables, read from the catalog tables. The fields are: OID, publication,
    the four operations, via_root, columns, row filter. The columns are None before PostgreSQL 15, which means all
    columns. The row filter is UNREAD if its table is locked."""
    found = _read(conn, _SHOWN, publications, oids)
    return [(*row, _row_filter(conn, row[0], row[1]) if filtered else None) for *row, filtered in found]


def read_leafless(
    conn: psycopg.Connection[Any], publications: Sequence[str], oids: Iterable[int] | None = None
) -> list[tuple[Any, ...]]:
    """Returns rows like :func:`read_beside_locks`, for partitioned tables that a publication lists, but that have no
    leaf yet whose rows can be published. The view pg_publication_tables does not show such a table."""
    return [(*row, None) for *row, _ in _read(conn, _LEAFLESS, publications, oids)]


def _read(
    conn: psycopg.Connection[Any], shown: str, publications: Sequence[str], oids: Iterable[int] | None
) -> list[tuple[Any, ...]]:
    """Returns a row for each publication of each relation that the query ``shown`` selects. The last field says whether
    the publication has a row filter for the relation."""
    lists = conn.info.server_version >= LISTS_SINCE
    query = f"{_MEMBERSHIP}shown AS ({shown}){_ROWS}".format(
        members=_MEMBERS + (_SCHEMA_MEMBERS if lists else ""),
        columns=f"{_COLUMNS}, own.prqual IS NOT NULL" if lists else "NULL::text[], false",
        own=_OWN_ROW if lists else "",
    )
    wanted = {
        "names": list(publications),
        "oids": None if oids is None else sorted(set(oids)),
        "version": conn.info.server_version,
    }
    return conn.execute(query.encode(), wanted).fetchall()


def _row_filter(conn: psycopg.Connection[Any], oid: int, publication: str) -> str | None:
    """Returns the row filter's text: UNREAD if the table is locked, None if the table was dropped."""
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(_FILTER_TIMEOUT)
            row = conn.execute(_FILTER, [oid, publication]).fetchone()
    except LockNotAvailable:
        return UNREAD
    except InternalError_:
        return None
    return None if row is None else str(row[0])


# Catalog rows that publish tables --------------------------------------------------------------

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
    """Returns the xmin of each relation's pg_depend row for its schema. Only SET SCHEMA writes this row again, so a new
    xmin shows that the table was moved. While a table is in another schema, a publication of its old schema does not
    publish it."""
    return dict(conn.execute(_PLACES, [sorted(set(oids))]).fetchall())


@dataclass(frozen=True)
class PublicationRows:
    """The :class:`Mark` of each catalog row that publishes tables. If a table was removed from a publication and added
    again, it has a new row, and so a new mark."""

    publications: Mapping[str, Mark]
    relations: Mapping[tuple[str, int], Mark]
    schemas: Mapping[tuple[str, str], Mark]
    ours: frozenset[str]

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
        """OIDs of the relations that a publication lists by name (FOR TABLE)."""
        return frozenset(oid for _, oid in self.relations)

    def listing(self, publications: Iterable[str], oid: int) -> Marks:
        """Returns the marks of the catalog rows with which these publications list the relation by name."""
        return tuple(sorted(self.relations[name, oid] for name in publications if (name, oid) in self.relations))

    def of(self, publications: Iterable[str], oids: Iterable[int], schemas: Iterable[str]) -> Marks:
        """Returns the marks of these publications' own rows, and of the rows with which they list these relations and
        schemas."""
        members, places = list(oids), list(schemas)
        marks: list[Mark] = []
        for name in publications:
            marks += [self.publications[name]] if name in self.publications else []
            marks += [self.relations[name, oid] for oid in members if (name, oid) in self.relations]
            marks += [self.schemas[name, schema] for schema in places if (name, schema) in self.schemas]
        return tuple(sorted(marks))
