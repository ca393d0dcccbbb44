"""Reads the comments of tables and columns, which COMMENT ON TABLE and COMMENT ON COLUMN set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import psycopg

Comments = tuple[tuple[int, str], ...]
"""The form of :attr:`Table.comments`: attnum (0 for the table) and text, in attnum order."""

# A separate query, because only checks of the catalog need comments. The facts in the change log have no comments.
_COMMENTS = """
SELECT objoid, objsubid, description
FROM pg_catalog.pg_description
WHERE classoid = 'pg_catalog.pg_class'::pg_catalog.regclass AND objoid = ANY(%s) ORDER BY objoid, objsubid
"""


def read_comments(conn: psycopg.Connection[Any], relations: Iterable[int]) -> dict[int, Comments]:
    """Returns the comments of these relations, by OID. Relations without comments are left out."""
    found: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for oid, attnum, comment in conn.execute(_COMMENTS, [sorted(set(relations))]):
        found[oid].append((attnum, comment))
    return {oid: tuple(comments) for oid, comments in found.items()}
