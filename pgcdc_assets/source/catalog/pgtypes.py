"""Reads types from pg_type, with the base types of domains and the element types of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgcdc_assets.core.catalog import PgType

# A true array type is the typarray of its element type. int2vector and oidvector are not, and they print differently.
_QUERY = """
SELECT t.oid, t.typname::text, t.typtype::text, t.typdelim::text,
       CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE 0 END, t.typtypmod,
       CASE WHEN e.typarray = t.oid THEN e.oid ELSE 0 END
FROM pg_catalog.pg_type t LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem
WHERE t.oid = ANY(%s)
"""


@dataclass(frozen=True)
class _Row:
    oid: int
    name: str
    family: str
    delimiter: str
    base: int
    base_typmod: int
    element: int


class PgTypes:
    """The rows of pg_type that some columns need. They are read with few queries."""

    def __init__(self, rows: Mapping[int, _Row]) -> None:
        self._rows = rows

    @classmethod
    def read(cls, conn: psycopg.Connection[Any], oids: Iterable[int]) -> PgTypes:
        rows: dict[int, _Row] = {}
        wanted = set(oids)
        while wanted:
            found = [_Row(*row) for row in conn.execute(_QUERY, [sorted(wanted)])]
            rows.update((row.oid, row) for row in found)
            wanted = {oid for row in found for oid in (row.base, row.element) if oid} - rows.keys()
        return cls(rows)

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> PgTypes:
        """Made from rows that the caller has read. Their fields are in the order of :class:`_Row`."""
        return cls({row[0]: _Row(*row) for row in rows})

    def __contains__(self, oid: int) -> bool:
        return oid in self._rows

    def get(self, oid: int, typmod: int = -1) -> PgType:
        """Returns the type of a column. The typmod of a domain applies to its base type, the typmod of an array to its
        elements."""
        row = self._rows.get(oid)
        if row is None:  # dropped; the codec reads its values as text
            return PgType(oid, f"oid {oid}", typmod)
        base = self._innermost(row) if row.base else None
        element = self.get(row.element, typmod) if row.element else None
        return PgType(row.oid, row.name, typmod, row.family, base, element, row.delimiter)

    def _innermost(self, row: _Row) -> PgType:
        """Returns the base type of a domain. A domain may be based on a domain; only one type of the chain has a
        typmod."""
        typmod, passed = -1, set[int]()
        while row.base:
            if row.oid in passed:
                raise ValueError(f"domain {row.name} stands on itself")
            passed.add(row.oid)
            typmod = row.base_typmod if row.base_typmod != -1 else typmod
            if row.base not in self._rows:
                return PgType(row.base, f"oid {row.base}", typmod)
            row = self._rows[row.base]
        return self.get(row.oid, typmod)
