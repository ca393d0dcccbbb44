"""Reads types from pg_type: with the base types of domains and the element types of arrays (:class:`PgTypes`), and with
all types inside them at any depth: enums, composite types, and types whose text is a name (:class:`TypeParts`).

The text of values of the inner types can change although no row is written. The causes are ALTER TYPE ... RENAME VALUE,
ADD ATTRIBUTE and DROP ATTRIBUTE (ALTER TABLE ... ADD COLUMN, if a table is used as a row type), and the renaming of an
object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgcdc_assets.core.catalog import PgType
from pgcdc_assets.core.marks import Composite, EnumLabel

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


NAMING_TYPES = frozenset(
    {"aclitem", "regclass", "regcollation", "regconfig", "regdatabase", "regdictionary", "regnamespace", "regoper",
     "regoperator", "regproc", "regprocedure", "regrole", "regtype"}
)  # fmt: skip
"""Types whose value is the OID of an object and whose text is the object's name. Renaming the object changes the text
and leaves no trace in the rows or in the type."""

_INNER = """
SELECT t.typbasetype AS oid
UNION ALL SELECT t.typelem
UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a
  WHERE t.typrelid <> 0 AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
"""
_PARTS = f"""
WITH RECURSIVE parts (oid) AS (
  SELECT unnest(%s::oid[])
  UNION SELECT inner_.oid FROM parts JOIN pg_catalog.pg_type t ON t.oid = parts.oid
    CROSS JOIN LATERAL ({_INNER}) AS inner_ WHERE inner_.oid <> 0
)
SELECT t.oid, t.typname::text, t.typtype::text, ARRAY({_INNER}),
       ARRAY(SELECT e.oid::text || ' ' || e.xmin::text || ' ' || e.enumlabel FROM pg_catalog.pg_enum e
             WHERE t.typtype = 'e' AND e.enumtypid = t.oid ORDER BY e.oid),
       (SELECT string_agg(a.attnum::text || ':' || a.atttypid::text, ' ' ORDER BY a.attnum)
        FROM pg_catalog.pg_attribute a
        WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0)
FROM parts JOIN pg_catalog.pg_type t ON t.oid = parts.oid
"""  # noqa: S608 (texts of our own)


@dataclass(frozen=True)
class _Part:
    oid: int
    name: str
    family: str
    inner: tuple[int, ...]
    labels: tuple[EnumLabel, ...] = ()
    attributes: str = ""


@dataclass(frozen=True)
class TypeParts:
    """The types of some columns, with all types inside them."""

    parts: Mapping[int, _Part] = field(default_factory=dict)

    @classmethod
    def read(cls, conn: psycopg.Connection[Any], oids: Iterable[int]) -> TypeParts:
        """Reads all types with one query, for any number of types and any depth."""
        found = {}
        for oid, name, family, inner, labels, attributes in conn.execute(_PARTS, [sorted(set(oids))]):
            values = (text.split(" ", 2) for text in labels)
            inside = tuple(part for part in inner if part)
            own = tuple(EnumLabel(int(row), label, int(xmin)) for row, xmin, label in values)
            found[oid] = _Part(oid, name, family, inside, own, attributes or "")
        return cls(found)

    def labels(self, types: Iterable[int]) -> tuple[EnumLabel, ...]:
        """Returns the values of the enums in these types."""
        return tuple(label for part in self._within(types) for label in part.labels)

    def composites(self, types: Iterable[int]) -> tuple[Composite, ...]:
        return tuple(
            Composite(part.oid, part.name, part.attributes) for part in self._within(types) if part.family == "c"
        )

    def naming(self, types: Iterable[int]) -> list[str]:
        """Returns the names of the types in ``types`` whose text is the name of an object."""
        return [part.name for part in self._within(types) if part.name in NAMING_TYPES and part.family == "b"]

    def _within(self, types: Iterable[int]) -> list[_Part]:
        """Returns these types and all types inside them, sorted by OID."""
        found: dict[int, _Part] = {}
        waiting = list(types)
        while waiting:
            part = self.parts.get(waiting.pop())
            if part is not None and part.oid not in found:
                found[part.oid] = part
                waiting += part.inner
        return [found[oid] for oid in sorted(found)]
