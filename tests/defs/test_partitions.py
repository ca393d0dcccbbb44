"""The register of LSN ranges in Dagster: the ranges are ordered and without gaps, and a range that the change log no
longer contains is deleted."""

from __future__ import annotations

import re

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs import keys
from pgcdc_assets.defs.partitions import RangeRegister, Selection, register_snapshot
from pgcdc_assets.defs.replication import STAGES
from pgcdc_assets.errors import BadRange, RangeGap
from tests.defs.catalogs import NAMES
from tests.defs.doubles import span

RANGES = str(NAMES.lsn_ranges.name)


@pytest.fixture
def register(instance: dg.DagsterInstance) -> RangeRegister:
    return RangeRegister(instance, NAMES)


def test_ranges_are_listed_in_the_order_in_which_they_ended(
    register: RangeRegister, instance: dg.DagsterInstance
) -> None:
    for start, end in ((0x10, 0x20), (0x20, 0x1000), (0x1000, 0x1_0000_0000)):
        assert register.add(span(start, end)) == span(start, end)
    assert instance.get_dynamic_partitions(RANGES) == [
        "000000000010-000000000020", "000000000020-000000001000", "000000001000-000100000000",
    ]  # fmt: skip


def test_a_gap_before_a_new_range_is_registered_as_a_separate_range(register: RangeRegister) -> None:
    register.add(span(0x10, 0x20))
    assert register.add(span(0x40, 0x50)) == span(0x40, 0x50)
    assert register.known() == [span(0x10, 0x20), span(0x20, 0x40), span(0x40, 0x50)]


def test_the_part_of_a_range_that_is_already_registered_is_not_registered_again(register: RangeRegister) -> None:
    register.add(span(0x10, 0x20))
    register.add(span(0x20, 0x30))
    assert register.add(span(0x10, 0x20)) == span(0x10, 0x20)
    assert register.add(span(0x18, 0x28)) == span(0x20, 0x30)
    assert register.add(span(0x28, 0x40)) == span(0x30, 0x40)
    assert register.known() == [span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)]


def test_partition_keys_of_ranges_outside_of_the_change_log_are_deleted(register: RangeRegister) -> None:
    for start, end in ((0x10, 0x20), (0x20, 0x30), (0x30, 0x40)):
        register.add(span(start, end))
    assert register.prune(Lsn(0x20), Lsn(0x30)) == [span(0x10, 0x20), span(0x30, 0x40)]
    assert register.known() == [span(0x20, 0x30)]


def test_the_lsn_range_of_a_copy_is_added_only_once_as_a_dagster_partition(instance: dg.DagsterInstance) -> None:
    assert register_snapshot(instance, NAMES, Lsn(0xABC)) == "000000000000-000000000ABC"
    register_snapshot(instance, NAMES, Lsn(0xABC))
    assert instance.get_dynamic_partitions("pgcdc_snapshot_ranges") == ["000000000000-000000000ABC"]


def test_selecting_no_range_or_ranges_with_a_gap_fails(register: RangeRegister) -> None:
    for known in (span(0x10, 0x20), span(0x20, 0x30), span(0x30, 0x40)):
        register.add(known)
    with pytest.raises(BadRange, match="no LSN range was selected"):
        Selection([], register)
    with pytest.raises(RangeGap, match=r"0/30\.\.0/40 does not begin where 0/10\.\.0/20 ends"):
        Selection([span(0x10, 0x20).key, span(0x30, 0x40).key], register)
    with pytest.raises(RangeGap, match="has no partition 000000000040-000000000050"):
        Selection([span(0x30, 0x40).key, span(0x40, 0x50).key], register)


def test_partition_key_above_all_ended_ranges_is_removed(register: RangeRegister, instance: dg.DagsterInstance) -> None:
    """Somebody added the key by hand during a sync. If the key stayed, it could be taken for the next ended range."""
    register.add(span(0x10, 0x20))
    instance.add_dynamic_partitions(RANGES, [span(0x50, 0x60).key])
    assert register.add(span(0x20, 0x30)) == span(0x20, 0x30)
    assert register.known() == [span(0x10, 0x20), span(0x20, 0x30)]


def test_deleted_keys_of_adjacent_ranges_are_restored_as_one_key_in_lsn_order(
    register: RangeRegister, instance: dg.DagsterInstance
) -> None:
    for start in (0x10, 0x20, 0x30, 0x40, 0x50):
        register.add(span(start, start + 0x10))
    name = RANGES
    for gone in (span(0x20, 0x30), span(0x30, 0x40)):
        instance.delete_dynamic_partition(name, gone.key)
    selection = Selection([span(0x10, 0x20).key, span(0x40, 0x50).key], register)
    assert (selection.span, selection.holes) == (span(0x10, 0x50), [span(0x20, 0x40)])
    assert "0/20..0/40" in selection.told[0]
    assert register.mend() == [span(0x20, 0x40)]
    mended = [span(0x10, 0x20), span(0x20, 0x40), span(0x40, 0x50), span(0x50, 0x60)]
    assert instance.get_dynamic_partitions(name) == [one.key for one in mended]
    # The key was deleted and added again by hand, so Dagster lists it last.
    instance.delete_dynamic_partition(name, mended[2].key)
    instance.add_dynamic_partitions(name, [mended[2].key])
    assert register.mend() == []
    assert instance.get_dynamic_partitions(name) == [one.key for one in mended]


# The Dagster names of tables ------------------------------------------------------------------------

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
def test_asset_key_is_schema_and_name_with_special_characters_encoded(table: TableName, key: list[str]) -> None:
    assert NAMES.of_stage("mirror", table).path == ["pgcdc", *key]
    assert NAMES.of_stage("changes", table).path == ["pgcdc", "changes", *key]
    assert NAMES.of_stage("snapshot", table).path == ["pgcdc", "snapshot", *key]


def test_all_dagster_names_of_a_source_begin_with_the_name_of_the_source() -> None:
    names = keys.Names("shop")
    for key in (names.slot, names.change_log, names.messages, names.consistent_points):
        assert (key.path[0], len(key.path)) == ("shop", 2)
    sets = str(names.lsn_ranges.name), str(names.snapshot_ranges.name), names.owner
    others = names.pool, names.engines, names.pyspark, names.watcher
    assert all(name.startswith("shop_") for name in (*sets, *names.jobs, *others))
    assert len({*sets, *names.jobs, *others}) == 10
    assert keys.Names("shop", ("lake", "house")).change_log.path == ["lake", "house", "shop", "change_log"]


@given(ANY_NAMES, ANY_NAMES)
def test_asset_keys_of_different_tables_have_different_texts(left: TableName, right: TableName) -> None:
    for stage in STAGES:
        same = NAMES.of_stage(stage, left).to_user_string() == NAMES.of_stage(stage, right).to_user_string()
        assert same == (left == right)


@given(ANY_NAMES, ANY_NAMES)
def test_the_asset_key_of_a_mirror_is_never_the_key_of_another_kind_of_asset(left: TableName, right: TableName) -> None:
    others = (NAMES.of_stage("changes", left), NAMES.of_stage("snapshot", left), NAMES.source_table(left))
    texts = {key.to_user_string() for key in others}
    assert NAMES.of_stage("mirror", right).to_user_string() not in texts


@given(ANY_NAMES, ANY_NAMES)
def test_op_names_are_valid_and_differ_for_different_tables(left: TableName, right: TableName) -> None:
    names = keys.op_name("mirror", left), keys.op_name("mirror", right)
    assert all(re.fullmatch(r"[A-Za-z0-9_]+", name) for name in names)
    assert (names[0] == names[1]) == (left == right)
