"""Reads the published tables, together with a fingerprint of the catalog rows that describe them.

Reading all facts of 1,000 tables takes a quarter of a second. Reading the fingerprint takes a few milliseconds. So the
catalog can be checked for each consistent point, after all changes that the point covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import psycopg

from pgcdc_assets.core.catalog import Table, relations_of
from pgcdc_assets.source.catalog.bare import LISTS_SINCE
from pgcdc_assets.source.catalog.pgclass import of_catalog
from pgcdc_assets.source.catalog.tables import at_one_moment, read_tables
from pgcdc_assets.structure.differences import changes

_SUM = "count(*)::text || ':' || coalesce(sum(hashint8extended(xmin::text::int8, {})), 0)::text"
# A change of a catalog row writes a new row with a new xmin. A deletion removes a row. So every change gives another
# sum. Enum values, partitions and publications are few. All their rows are summed, so that new rows are noticed too.
_PARTS = {
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
# Selects the tables, their leaves, the partitioned tables between them, and the composite types of their columns.
_RELATIONS = """
WITH RECURSIVE above (oid) AS (
  SELECT unnest(%(oids)s::oid[])
  UNION SELECT i.inhparent FROM above JOIN pg_catalog.pg_inherits i ON i.inhrelid = above.oid
)
SELECT oid FROM above UNION SELECT typrelid FROM pg_catalog.pg_type WHERE oid = ANY(%(types)s)
"""


@dataclass(frozen=True)
class CatalogLook:
    """The published tables at one moment, and a fingerprint of the catalog at that moment.

    ``relations``: the OIDs of the relations whose catalog rows are in the fingerprint.
    """

    tables: tuple[Table, ...]
    relations: tuple[int, ...]
    fingerprint: str

    @classmethod
    @of_catalog()
    def now(
        cls, conn: psycopg.Connection[Any], publications: Sequence[str], patterns: Sequence[str],
        before: Sequence[Table] = (),
    ) -> Self:  # fmt: skip
        """Reads the tables of these publications, and their fingerprint at the same moment.

        ``before``: see :func:`read_tables`.
        """
        with at_one_moment(conn):
            tables = read_tables(conn, publications, patterns, before)
            oids = relations_of(tables) | {leaf.oid for table in tables for leaf in table.unpublished}
            oids |= {leaf.oid for table in tables for leaf in table.outside}
            types = {composite.oid for table in tables for composite in table.marks.composites}
            found = conn.execute(_RELATIONS, {"oids": sorted(oids), "types": sorted(types)}).fetchall()
            relations = tuple(sorted(oid for (oid,) in found))
            return cls(tables, relations, _fingerprint(conn, relations))

    def shows(self, table: Table) -> bool:
        """Whether this look shows exactly the given table.

        ``table`` may have been read before or after this look, because a mark that has changed never has its old value
        again.
        """
        seen = next((other for other in self.tables if other.name == table.name), None)
        return seen is not None and not changes(table, seen) and seen.comments == table.comments

    def stands(self, conn: psycopg.Connection[Any]) -> bool:
        """Whether nothing that this look shows has changed since. A change that was undone counts as a change."""
        return _fingerprint(conn, self.relations) == self.fingerprint


def _fingerprint(conn: psycopg.Connection[Any], relations: Sequence[int]) -> str:
    """Reads the fingerprint of these relations by one statement, so that all of it is of one moment."""
    version = conn.info.server_version
    parts = (
        f"(SELECT {_SUM.format(row)} FROM pg_catalog.{table} WHERE {where})"  # noqa: S608 (texts of our own)
        for table, (row, _, where) in ((table, text.partition("|")) for table, text in _PARTS.items())
        if table != "pg_publication_namespace" or version >= LISTS_SINCE
    )
    row = conn.execute(f"SELECT concat_ws(' ', {', '.join(parts)})".encode(), {"relations": list(relations)}).fetchone()
    assert row is not None
    return str(row[0])
