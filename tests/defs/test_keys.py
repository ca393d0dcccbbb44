"""Names of tables as Dagster names: valid, readable and one to one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs import keys

PART = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
NAMES = st.builds(TableName, PART, PART)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        (TableName("public", "orders"), ["public", "orders"]),
        (TableName("Odd Schema", "Select"), ["Odd Schema", "Select"]),
        (TableName("public", "Bücher ☃"), ["public", "Bücher ☃"]),
        (TableName("x/y", 'z"'), ["x~2f~y", "z~22~"]),
        (TableName("..", "a~b"), ["~2e~~2e~", "a~7e~b"]),
    ],
)
def test_asset_keys_are_readable(table: TableName, key: list[str]) -> None:
    assert keys.mirror_key(table).path == key
    assert keys.changes_key(table).path == ["changes", *key]
    assert keys.snapshot_key(table).path == ["snapshot", *key]


@given(NAMES, NAMES)
def test_keys_of_different_tables_differ_as_paths_and_as_text(left: TableName, right: TableName) -> None:
    for make in (keys.mirror_key, keys.changes_key, keys.snapshot_key):
        same = make(left).to_user_string() == make(right).to_user_string()
        assert same == (left == right)


@given(NAMES, NAMES)
def test_keys_of_different_kinds_of_assets_never_collide(left: TableName, right: TableName) -> None:
    texts = {make(left).to_user_string() for make in (keys.changes_key, keys.snapshot_key)}
    assert keys.mirror_key(right).to_user_string() not in texts


@given(NAMES, NAMES)
def test_op_names_are_valid_and_one_to_one(left: TableName, right: TableName) -> None:
    names = keys.op_name("mirror", left), keys.op_name("mirror", right)
    assert all(re.fullmatch(r"[A-Za-z0-9_]+", name) for name in names)
    assert (names[0] == names[1]) == (left == right)


def test_op_names_differ_where_simple_joining_would_collide() -> None:
    tables = [
        TableName("a__b", "c"), TableName("a", "b__c"), TableName("a_b", "c"), TableName("a", "b_c"),
        TableName("a-b", "c"), TableName("a.b", "c"), TableName("A_b", "c"), TableName("a_", "b"), TableName("a", "_b"),
    ]  # fmt: skip
    assert len({keys.op_name("mirror", table) for table in tables}) == len(tables)
    assert keys.op_name("mirror", TableName("public", "order_lines")) == "mirror__public__order_lines"
