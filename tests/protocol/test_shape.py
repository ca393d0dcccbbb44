"""Shapes, and their fingerprints. A shape combines a Relation message with what the catalog says about the relation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.messages import Relation, RelationColumn
from pgcdc_assets.protocol.shape import TEXT, RelationFacts, Shape, ShapeColumn, fingerprint
from tests.protocol import wire
from tests.structure.marked import leaf, marks

INT = PgType(23, "int4")
NUMERIC = PgType(1700, "numeric")
PRICE = PgType(16400, "price", family="d", base=PgType(1700, "numeric", (10 << 16 | 2) + 4))
TAGS = PgType(1009, "_text", element=PgType(25, "text"))

RELATION = Relation(16384, "public", "item", "d", (
    RelationColumn(True, "id", 23, -1),
    RelationColumn(False, "amount", 1700, (12 << 16 | 3) + 4),
    RelationColumn(False, "price", 16400, -1),
    RelationColumn(False, "tags", 1009, -1),
))  # fmt: skip
PAYLOAD = wire.relation(RELATION)
TABLE = Table(
    16384, TableName("public", "item"),
    (Column(1, "id", INT, True), Column(3, "amount", replace(NUMERIC, typmod=(12 << 16 | 3) + 4)),
     Column(4, "price", PRICE), Column(7, "tags", TAGS)),
    key=(1,), identity_key=(1,), marks=marks(relfilenode=5),
)  # fmt: skip
FACTS = RelationFacts(TABLE, {t.oid: t for t in (INT, NUMERIC, PRICE, TAGS)})


def test_columns_take_attnums_and_types_from_the_catalog_and_typmods_from_the_message() -> None:
    shape = Shape.resolve(PAYLOAD, FACTS)
    assert shape.columns == (
        ShapeColumn("id", 1, INT, True),
        ShapeColumn("amount", 3, PgType(1700, "numeric", (12 << 16 | 3) + 4), False),
        ShapeColumn("price", 4, PRICE, False),
        ShapeColumn("tags", 7, TAGS, False),
    )
    assert (shape.relation_id, shape.table, shape.catalog_name, shape.root) == (16384, TABLE.name, TABLE.name, None)
    assert (shape.replica_identity, shape.key) == ("d", ("id",))
    assert shape.schema_id == fingerprint(PAYLOAD, FACTS)


def test_typmod_comes_from_the_message_even_if_the_catalog_is_newer() -> None:
    wider = replace(TABLE, columns=(*TABLE.columns[:1], Column(3, "amount", replace(NUMERIC, typmod=99)),
                                    *TABLE.columns[2:]))  # fmt: skip
    shape = Shape.resolve(PAYLOAD, replace(FACTS, table=wider))
    assert shape.columns[1].type.typmod == (12 << 16 | 3) + 4


def test_column_that_the_catalog_lacks_has_a_type_but_no_attnum() -> None:
    table = replace(TABLE, columns=(TABLE.columns[0], Column(9, "amount", INT)))
    shape = Shape.resolve(PAYLOAD, RelationFacts(table, {1700: NUMERIC, 1009: TAGS}))
    assert shape.columns[1] == ShapeColumn("amount", None, PgType(1700, "numeric", (12 << 16 | 3) + 4), False)
    assert shape.columns[2] == ShapeColumn("price", None, TEXT, False)
    assert shape.columns[3] == ShapeColumn("tags", None, TAGS, False)


def test_key_of_a_dropped_table_comes_from_the_message() -> None:
    facts = RelationFacts(None, FACTS.types)
    assert Shape.resolve(PAYLOAD, facts).key == ("id",)
    full = replace(RELATION, replica_identity="f", columns=tuple(replace(c, key=True) for c in RELATION.columns))
    assert Shape.resolve(wire.relation(full), facts).key == ()


def test_shape_of_a_partition_names_its_root_table() -> None:
    root = TableName("public", "all_items")
    shape = Shape.resolve(PAYLOAD, replace(FACTS, table=replace(TABLE, root=root, root_oid=5)))
    assert (shape.table, shape.root, shape.root_oid) == (TABLE.name, root, 5)


def test_shape_has_the_tables_name_in_the_message_and_its_name_in_the_catalog() -> None:
    shape = Shape.resolve(PAYLOAD, replace(FACTS, table=replace(TABLE, name=TableName("public", "later"))))
    assert (shape.table, shape.catalog_name) == (TABLE.name, TableName("public", "later"))
    assert Shape.resolve(PAYLOAD, RelationFacts(None)).forgotten


def test_empty_namespace_in_a_relation_message_means_pg_catalog() -> None:
    payload = wire.relation(replace(RELATION, schema=""))
    assert Shape.resolve(payload, RelationFacts(None)).table == TableName("pg_catalog", "item")


def test_relation_facts_are_unchanged_after_a_round_trip_as_json() -> None:
    facts = replace(FACTS, table=replace(TABLE, leaves=(leaf(1, TableName("a", "b"), 2),), root=TableName("a", "r")))
    assert RelationFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    assert RelationFacts.from_json(json.loads(json.dumps(RelationFacts(None).to_json()))) == RelationFacts(None)


def test_fingerprint_changes_only_with_facts_that_affect_decoding() -> None:
    first = fingerprint(PAYLOAD, FACTS)
    assert -(1 << 63) <= first < 1 << 63
    grown = replace(TABLE, marks=marks(relfilenode=77), pages=5, rows=10, leaves=(leaf(1, TABLE.name, 2),))
    reordered = RelationFacts(grown, dict(reversed(FACTS.types.items())))
    assert fingerprint(PAYLOAD, reordered) == first
    assert fingerprint(PAYLOAD, RelationFacts.from_json(json.loads(json.dumps(FACTS.to_json())))) == first
    assert fingerprint(PAYLOAD, replace(FACTS, table=replace(TABLE, key=(3,)))) != first
    assert fingerprint(PAYLOAD, RelationFacts(TABLE, {})) != first
    assert fingerprint(PAYLOAD + b"\0", FACTS) != first


def test_shape_of_a_message_that_is_not_a_relation_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="instead of a Relation message"):
        Shape.resolve(b"T" + bytes(5), FACTS)
