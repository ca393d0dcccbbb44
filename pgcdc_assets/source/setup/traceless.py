"""Findings on tables whose rows may change without a trace, or with a trace that harmless commands leave too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from pgcdc_assets.source.catalog.pgclass import CatalogRelation, read_relations
from pgcdc_assets.source.catalog.typeparts import TypeParts
from pgcdc_assets.source.setup.findings import Finding, named

_LISTED = "SELECT prrelid FROM pg_catalog.pg_publication_rel WHERE prrelid = ANY(%s)"


def trace_findings(conn: psycopg.Connection[Any], tables: Iterable[int], *, own_publication: bool) -> list[Finding]:
    """Returns at most one finding of each kind for these tables and leaves.

    ``own_publication``: whether our publications publish the tables. Then all tables that are not leaves are listed.
    """
    relations = list(read_relations(conn, tables).values())
    listed = {oid for (oid,) in conn.execute(_LISTED, [[relation.oid for relation in relations]])}
    listed |= {relation.oid for relation in relations if own_publication and relation.root is None}
    return [*_names(conn, relations), *_rewritten([relation for relation in relations if relation.oid not in listed])]


def _names(conn: psycopg.Connection[Any], relations: list[CatalogRelation]) -> list[Finding]:
    parts = TypeParts.read(conn, {oid for relation in relations for oid in relation.types})
    columns = sorted(
        f"{relation.name}.{column.name}"
        for relation in relations if relation.root is None
        for column in relation.columns if parts.naming([column.type.oid])
    )  # fmt: skip
    if not columns:
        return []
    return [
        Finding(
            "warning", f"columns {named(columns)}", "hold names of objects (regclass and its kin): a rename of the "
            "object changes their text in older rows and leaves no trace, so mirrors keep the name of before",
            "after a rename, run `pgcdc snapshot` for their tables",
        )
    ]  # fmt: skip


def _rewritten(relations: list[CatalogRelation]) -> list[Finding]:
    """Returns a finding on tables without a TOAST table that no publication lists individually.

    PostgreSQL refuses SET UNLOGGED if a publication lists the table itself. A rewrite creates a new TOAST table. If a
    table has no TOAST table, a rewrite leaves the same traces as TRUNCATE and VACUUM FULL.
    """
    tables = sorted(
        str(relation.name) for relation in relations if not relation.partitioned and not relation.files.toast
    )
    if not tables:
        return []
    return [
        Finding(
            "info", f"tables {named(tables)}", "have no TOAST table and are not listed in a publication by themselves: "
            "TRUNCATE, VACUUM FULL and CLUSTER are not to be told from SET UNLOGGED, writes, and SET LOGGED, and so "
            "have them copied anew, a partition's table as a whole",
        )
    ]  # fmt: skip
