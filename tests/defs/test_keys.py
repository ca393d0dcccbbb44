"""The Dagster names of tables: they are valid and readable, and different tables have different names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs import keys
from pgcdc_assets.defs.replication import STAGES
from tests.defs.catalogs import NAMES

PART = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
ANY_NAMES = st.builds(TableName, PART, PART)


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
    assert NAMES.of_stage("mirror", table).path == ["pgcdc", *key]
    assert NAMES.of_stage("changes", table).path == ["pgcdc", "changes", *key]
    assert NAMES.of_stage("snapshot", table).path == ["pgcdc", "snapshot", *key]


def test_all_names_of_a_source_begin_with_its_name() -> None:
    names = keys.Names("shop")
    for key in (names.slot, names.change_log, names.messages, names.consistent_points):
        assert (key.path[0], len(key.path)) == ("shop", 2)
    sets = str(names.lsn_ranges.name), str(names.snapshot_ranges.name), names.owner
    others = names.pool, names.engines, names.pyspark, names.watcher
    assert all(name.startswith("shop_") for name in (*sets, *names.jobs, *others))
    assert len({*sets, *names.jobs, *others}) == 10
    assert keys.Names("shop", ("lake", "house")).change_log.path == ["lake", "house", "shop", "change_log"]


@given(ANY_NAMES, ANY_NAMES)
def test_keys_of_different_tables_differ_as_paths_and_as_text(left: TableName, right: TableName) -> None:
    for stage in STAGES:
        same = NAMES.of_stage(stage, left).to_user_string() == NAMES.of_stage(stage, right).to_user_string()
        assert same == (left == right)


@given(ANY_NAMES, ANY_NAMES)
def test_keys_of_different_kinds_of_assets_never_collide(left: TableName, right: TableName) -> None:
    others = (NAMES.of_stage("changes", left), NAMES.of_stage("snapshot", left), NAMES.source_table(left))
    texts = {key.to_user_string() for key in others}
    assert NAMES.of_stage("mirror", right).to_user_string() not in texts


@given(ANY_NAMES, ANY_NAMES)
def test_op_names_are_valid_and_one_to_one(left: TableName, right: TableName) -> None:
    names = keys.op_name("mirror", left), keys.op_name("mirror", right)
    assert all(re.fullmatch(r"[A-Za-z0-9_]+", name) for name in names)
    assert (names[0] == names[1]) == (left == right)
