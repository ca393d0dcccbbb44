"""Types as pg_type has them: domains down to their base, arrays down to their element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgcdc_assets.core.catalog import PgType

# A proper array type is the typarray of its element; int2vector and its like are not, and print differently.
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
    """The rows of pg_type that some columns need, read in a few queries."""

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
        """From rows that were read by somebody else, with the fields of those that we read."""
        return cls({row[0]: _Row(*row) for row in rows})

    def __contains__(self, oid: int) -> bool:
        return oid in self._rows

    def get(self, oid: int, typmod: int = -1) -> PgType:
        """The type of a column. A domain's own typmod governs its base; an array's governs its elements."""
        row = self._rows.get(oid)
        if row is None:  # dropped since: the codec takes it as text
            return PgType(oid, f"oid {oid}", typmod)
        base = self._innermost(row) if row.base else None
        element = self.get(row.element, typmod) if row.element else None
        return PgType(row.oid, row.name, typmod, row.family, base, element, row.delimiter)

    def _innermost(self, row: _Row) -> PgType:
        """Domains may stand on domains; only one of the chain can carry a typmod."""
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
