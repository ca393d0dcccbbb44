"""Findings on rows that a query of a table returns and its mirror does not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import psycopg

from pgcdc_assets.source.catalog.pgclass import read_leaves, read_relations
from pgcdc_assets.source.setup.findings import Finding, named

# Partitions do not appear here, because their parent is a partitioned table (relkind p).
_CHILDREN = """
SELECT p.oid, array_agg(format('%%s.%%s', n.nspname, c.relname) ORDER BY n.nspname, c.relname)
FROM pg_catalog.pg_inherits i
JOIN pg_catalog.pg_class p ON p.oid = i.inhparent AND p.relkind = 'r'
JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE p.oid = ANY(%s) GROUP BY p.oid
"""


def outside_findings(conn: psycopg.Connection[Any], tables: Iterable[int]) -> Iterator[Finding]:
    """Yields a finding for each leaf whose rows are in no stream. ``tables``: published tables and leaves."""
    relations = read_relations(conn, tables)
    roots = {relation.root or oid for oid, relation in relations.items() if relation.root or relation.partitioned}
    leaves = read_leaves(conn, roots)
    known = relations | read_relations(conn, {*roots, *(leaf for group in leaves.values() for leaf in group)})
    for root in sorted(leaves.keys() & known.keys(), key=lambda oid: known[oid].name):
        for leaf in (known[oid].outside for oid in leaves[root] if oid in known):
            if leaf is not None:
                yield Finding("warning", f"table {known[root].name}", f"{leaf}", leaf.do)


def child_findings(conn: psycopg.Connection[Any], tables: Iterable[int]) -> Iterator[Finding]:
    """Yields a finding for each table that other tables inherit from."""
    children = dict(conn.execute(_CHILDREN, [list(tables)]).fetchall())
    relations = read_relations(conn, children)
    for relation in sorted(relations.values(), key=lambda relation: relation.name):
        yield Finding(
            "warning", f"table {relation.name}", f"is the parent of {named(children[relation.oid])} by INHERITS: its "
            f"mirror has the rows of ONLY {relation.name}, and each child that is published has a mirror of its own",
            "read the mirrors of the children too",
        )  # fmt: skip
