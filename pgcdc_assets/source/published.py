"""What publications publish, as the server itself resolves it (pg_publication_tables)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

LISTS_SINCE = 150000
"""Column lists, row filters and schema publications came with 15."""
GENERATED_SINCE = 180000
"""publish_generated_columns; before it a generated column is never in the stream, though 15 lists it."""

_QUERY = """
SELECT c.oid, p.pubname::text, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot, {lists}
FROM pg_catalog.pg_publication_tables t
JOIN pg_catalog.pg_publication p ON p.pubname = t.pubname
JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
WHERE t.pubname = ANY(%s) ORDER BY c.oid, p.pubname
"""
_LISTS = "t.attnames::text[], t.rowfilter"
_NO_LISTS = "NULL::text[], NULL::text"


@dataclass(frozen=True)
class Published:
    """One relation as the stream of some publications has it together."""

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


def read_published(conn: psycopg.Connection[Any], publications: Sequence[str]) -> dict[int, Published]:
    """The relations of these publications by oid: leaves or roots, as each publication has it."""
    query = _QUERY.format(lists=_LISTS if conn.info.server_version >= LISTS_SINCE else _NO_LISTS)
    rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in conn.execute(query.encode(), [list(publications)]):
        rows[row[0]].append(row)
    return {oid: _combined(oid, entries) for oid, entries in rows.items()}


def _combined(oid: int, entries: list[tuple[Any, ...]]) -> Published:
    """Several publications of one table: any of them publishes an operation, and filters are OR-ed.

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
    if any(text is None for text in given):
        return None
    unique = sorted({text for text in given if text is not None})
    return unique[0] if len(unique) == 1 else " OR ".join(f"({text})" for text in unique)
