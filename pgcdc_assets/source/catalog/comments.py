"""The comments of tables and of their columns, as COMMENT ON TABLE and COMMENT ON COLUMN have set them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import psycopg

Comments = tuple[tuple[int, str], ...]
"""As :attr:`Table.comments`: attnum (0: the table) and text, in attnum order."""

# A query of its own: comments are asked for at looks at the catalog, not for the facts of the log.
_COMMENTS = """
SELECT objoid, objsubid, description
FROM pg_catalog.pg_description
WHERE classoid = 'pg_catalog.pg_class'::pg_catalog.regclass AND objoid = ANY(%s) ORDER BY objoid, objsubid
"""


def read_comments(conn: psycopg.Connection[Any], relations: Iterable[int]) -> dict[int, Comments]:
    """The comments of these relations, by their OIDs; those without any are left out."""
    found: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for oid, attnum, comment in conn.execute(_COMMENTS, [sorted(set(relations))]):
        found[oid].append((attnum, comment))
    return {oid: tuple(comments) for oid, comments in found.items()}
