"""Saved catalogs for the tests, written by hand."""

from __future__ import annotations

from pgcdc_assets.core.catalog import Catalog, Column, Identity, PgType, Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs.keys import Names

NAMES = Names("pgcdc")
"""The Dagster names of a source that has no name in its settings."""

COLUMNS = (
    Column(1, "id", PgType(23, "int4"), not_null=True),
    Column(2, 'v "x"', PgType(1009, "_text", element=PgType(25, "text"))),
)
ODD = (
    ("public", "orders"), ("Odd Schema", "Select"), ("odd_schema", "select"), ("a__b", "c"), ("a", "b__c"),
    ("x/y", "z"), ("x", "y/z"), ("snapshot", "public"), ("changes", "plain"), ("emoji", "🐘"), ("..", "."),
    ("a-b", "c"), ("a.b", "c"), ("a_b", "c"), ('q"q', "*"), ("slot", "change_log"),
)  # fmt: skip


def catalog_of(*names: tuple[str, str], slot: str = "s") -> Catalog:
    tables = tuple(Table(oid, TableName(*name), COLUMNS, key=(1,)) for oid, name in enumerate(names, start=16384))
    return Catalog(Identity("7000000000000000001", "db", slot), "p", 180000, tables, ("p",))
