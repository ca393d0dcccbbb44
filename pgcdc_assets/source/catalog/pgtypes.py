"""Reads types from pg_type, with all types inside them at any depth.

The inner types matter because the text of their values may change although no row is written. These commands change it:
ALTER TYPE ... RENAME VALUE, ADD ATTRIBUTE and DROP ATTRIBUTE (ALTER TABLE ... ADD COLUMN if a table is used as a row
type), and the renaming of an object, if the text of a value is the object's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import psycopg

from pgcdc_assets.core.catalog import PgType
from pgcdc_assets.core.marks import Composite, EnumLabel

NAMING_TYPES = frozenset(
    {"aclitem", "regclass", "regcollation", "regconfig", "regdatabase", "regdictionary", "regnamespace", "regoper",
     "regoperator", "regproc", "regprocedure", "regrole", "regtype"}
)  # fmt: skip
"""Types whose value is an object's OID, and whose text is the object's name. Renaming the object changes the text, but
writes no row and changes no type."""
_INNER = """
SELECT t.typbasetype AS oid
UNION ALL SELECT t.typelem
UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a
  WHERE t.typrelid <> 0 AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
"""
# A type is a true array only if it is the typarray of its element type. int2vector and oidvector have an element type
# too, but not the text form of arrays.
_TYPES = f"""
WITH RECURSIVE parts (oid) AS (
  SELECT unnest(%s::oid[])
  UNION SELECT inner_.oid FROM parts JOIN pg_catalog.pg_type t ON t.oid = parts.oid
    CROSS JOIN LATERAL ({_INNER}) AS inner_ WHERE inner_.oid <> 0
)
SELECT t.oid, t.typname::text, t.typtype::text, t.typdelim::text,
       CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE 0 END, t.typtypmod,
       CASE WHEN element.typarray = t.oid THEN element.oid ELSE 0 END, ARRAY({_INNER}),
       ARRAY(SELECT e.oid::text || ' ' || e.xmin::text || ' ' || e.enumlabel FROM pg_catalog.pg_enum e
             WHERE t.typtype = 'e' AND e.enumtypid = t.oid ORDER BY e.oid),
       (SELECT string_agg(a.attnum::text || ':' || a.atttypid::text, ' ' ORDER BY a.attnum)
        FROM pg_catalog.pg_attribute a
        WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0)
FROM parts JOIN pg_catalog.pg_type t ON t.oid = parts.oid
LEFT JOIN pg_catalog.pg_type element ON element.oid = t.typelem
"""  # noqa: S608 (texts of our own)


@dataclass(frozen=True)
class _Row:
    oid: int
    name: str
    family: str
    delimiter: str
    base: int
    base_typmod: int
    element: int
    inner: list[int]
    labels: list[str]
    """OID, xmin and text of each value of an enum, separated by spaces."""
    attributes: str | None


@dataclass(frozen=True)
class PgTypes:
    """The types of some columns, with all types inside them."""

    rows: Mapping[int, _Row] = field(default_factory=dict)

    @classmethod
    def read(cls, conn: psycopg.Connection[Any], oids: Iterable[int]) -> Self:
        """Reads all types with one query, for any number of types and any depth."""
        return cls({row[0]: _Row(*row) for row in conn.execute(_TYPES, [sorted(set(oids))])})

    def __contains__(self, oid: int) -> bool:
        return oid in self.rows

    def get(self, oid: int, typmod: int = -1) -> PgType:
        """Returns the type with this OID, as used by a column with this typmod. The typmod of an array column applies
        to the array's elements. A domain has its own typmod, which applies to its base type."""
        row = self.rows.get(oid)
        if row is None:  # the type was dropped; the codec reads its values as text
            return PgType(oid, f"oid {oid}", typmod)
        base = self._innermost(row) if row.base else None
        element = self.get(row.element, typmod) if row.element else None
        return PgType(row.oid, row.name, typmod, row.family, base, element, row.delimiter)

    def _innermost(self, row: _Row) -> PgType:
        """Returns the base type of a domain, which may be based on other domains. At most one of these domains has a
        typmod."""
        typmod, passed = -1, set[int]()
        while row.base:
            if row.oid in passed:
                raise ValueError(f"domain {row.name} is based on itself")
            passed.add(row.oid)
            typmod = row.base_typmod if row.base_typmod != -1 else typmod
            if row.base not in self.rows:
                return PgType(row.base, f"oid {row.base}", typmod)
            row = self.rows[row.base]
        return self.get(row.oid, typmod)

    def labels(self, types: Iterable[int]) -> tuple[EnumLabel, ...]:
        """Returns the values of the enums in these types."""
        values = (text.split(" ", 2) for row in self._within(types) for text in row.labels)
        return tuple(EnumLabel(int(oid), label, int(xmin)) for oid, xmin, label in values)

    def composites(self, types: Iterable[int]) -> tuple[Composite, ...]:
        rows = (row for row in self._within(types) if row.family == "c")
        return tuple(Composite(row.oid, row.name, row.attributes or "") for row in rows)

    def naming(self, types: Iterable[int]) -> list[str]:
        """Searches ``types`` and all types inside them. Returns the names of the types whose values print as the name
        of an object (:data:`NAMING_TYPES`)."""
        return [row.name for row in self._within(types) if row.name in NAMING_TYPES and row.family == "b"]

    def _within(self, types: Iterable[int]) -> list[_Row]:
        """Returns these types and all types inside them, sorted by OID."""
        found: dict[int, _Row] = {}
        waiting = list(types)
        while waiting:
            row = self.rows.get(waiting.pop())
            if row is not None and row.oid not in found:
                found[row.oid] = row
                waiting += row.inner
        return [found[oid] for oid in sorted(found)]
