"""Reads what publications publish from the catalog tables themselves, without waiting for locks.

The rules are the rules of ``pg_get_publication_tables`` (PostgreSQL, pg_publication.c). The text of a row filter is the
exception: to print it, PostgreSQL opens the filter's table. So each row filter is read by a query of its own, which
waits only for a lock on that table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

import psycopg
from psycopg.errors import InternalError_, LockNotAvailable

from pgcdc_assets.errors import CopyBlocked

LISTS_SINCE: Final = 150000
"""PostgreSQL 15 introduced column lists, row filters and publications of schemas."""

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
# A table that is published with its schema, or with all tables, has neither a column list nor a filter.
OWN_ROW: Final = """
LEFT JOIN pg_catalog.pg_publication_rel own ON own.prpubid = p.oid AND own.prrelid = c.oid AND NOT p.puballtables
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_publication_namespace s
                  WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace)
"""
# Before PostgreSQL 18 a generated column is never in the stream, although the view of PostgreSQL 15 lists it.
COLUMNS: Final = """
  ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
          AND (own.prattrs IS NULL OR a.attnum = ANY(own.prattrs::int2[]))
          AND (a.attgenerated = '' OR %(version)s >= 180000
               AND a.attgenerated = 's' AND (own.prattrs IS NOT NULL OR to_jsonb(p) ->> 'pubgencols' = 's'))
        ORDER BY a.attnum)
"""
"""SQL: names of the columns of relation ``c`` that publication ``p`` publishes. Needs :data:`OWN_ROW` in the same
query; ``version`` is the server's version. All catalog rows are read under the query's own snapshot."""
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
# Foreign and unlogged leaves do not count: a table cannot be published through them.
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
"""Short, because we have already waited for the view, and other sessions that want the table queue behind us."""
UNREAD: Final = "\0"
"""Stands for a row filter that could not be read."""


def read_beside_locks(
    conn: psycopg.Connection[Any], publications: Sequence[str], oids: Iterable[int] | None = None
) -> list[tuple[Any, ...]]:
    """Returns rows like the rows of pg_publication_tables: oid, publication, its four operations, via_root, columns,
    row filter.

    Before PostgreSQL 15 columns is None, which means all columns. The row filter is UNREAD if its table is locked.
    """
    found = _read(conn, _SHOWN, publications, oids)
    return [(*row, _row_filter(conn, row[0], row[1]) if filtered else None) for *row, filtered in found]


def read_leafless(
    conn: psycopg.Connection[Any], publications: Sequence[str], oids: Iterable[int] | None = None
) -> list[tuple[Any, ...]]:
    """Returns rows like :func:`read_beside_locks`, for the listed partitioned tables that no leaf can publish yet.

    The view pg_publication_tables shows such a table only once it has a leaf.
    """
    return [(*row, None) for *row, _ in _read(conn, _LEAFLESS, publications, oids)]


def _read(
    conn: psycopg.Connection[Any], shown: str, publications: Sequence[str], oids: Iterable[int] | None
) -> list[tuple[Any, ...]]:
    """Returns the relations that the query ``shown`` selects. The last field says whether there is a row filter."""
    lists = conn.info.server_version >= LISTS_SINCE
    query = f"{_MEMBERSHIP}shown AS ({shown}){_ROWS}".format(
        members=_MEMBERS + (_SCHEMA_MEMBERS if lists else ""),
        columns=f"{COLUMNS}, own.prqual IS NOT NULL" if lists else "NULL::text[], false",
        own=OWN_ROW if lists else "",
    )
    wanted = {
        "names": list(publications),
        "oids": None if oids is None else sorted(set(oids)),
        "version": conn.info.server_version,
    }
    return conn.execute(query.encode(), wanted).fetchall()


def _row_filter(conn: psycopg.Connection[Any], oid: int, publication: str) -> str | None:
    """Returns the row filter's text: UNREAD if the table is locked, None if the table has been dropped."""
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(_FILTER_TIMEOUT)
            row = conn.execute(_FILTER, [oid, publication]).fetchone()
    except LockNotAvailable:
        return UNREAD
    except InternalError_:
        # "could not open relation with OID": the table has been dropped.
        return None
    return None if row is None else str(row[0])


def refuse_unread(name: object) -> NoReturn:
    """Raises CopyBlocked for a table whose row filter is needed and could not be read."""
    raise CopyBlocked("is locked, and its row filter cannot be read meanwhile", thing=f"table {name}",
                      do="end the transaction that holds ACCESS EXCLUSIVE on it, then run again")  # fmt: skip
