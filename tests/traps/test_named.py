"""The known traps of logical replication, each with its test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.traps import rows, schema

ROOT = Path(__file__).resolve().parents[2]

_ROWS = "tests/traps/test_rows.py::test_mirror_equals_the_source_after_every_trap"
_SCHEMA = "tests/traps/test_schema.py::test_mirror_equals_the_source_after_the_trap"
_POSITIONS, _PUBLICATIONS = "tests/traps/test_positions.py::test_", "tests/traps/test_publications.py::test_"

TRAPS = {
    "begin order differs from commit order and a change is dropped": (
        f"{_POSITIONS}transactions_over_two_ranges_are_received_in_commit_order",
        f"{_ROWS}[begin_order_is_not_commit_order]",
    ),
    "flush reported inside a transaction": (
        "tests/log/test_confirmations.py::test_no_confirmation_lies_inside_a_commit_record",
    ),
    "flush reported before it is durable": (f"{_POSITIONS}flush_is_not_reported_before_it_is_durable",),
    "a stored position demanded to equal the slot's": (
        f"{_POSITIONS}stored_position_may_differ_from_the_slots_position",
    ),
    "a new slot joined to old progress": (
        "tests/log/test_slot_truths.py::test_slot_recreated_under_the_same_name_is_refused",
    ),
    "unchanged TOAST written as NULL": (
        f"{_ROWS}[unchanged_toast]",
        f"{_ROWS}[unchanged_toast_over_a_key_change]",
        f"{_ROWS}[toast_of_a_deleted_row_stays_with_it]",
        f"{_ROWS}[unchanged_toast_under_full]",
        f"{_PUBLICATIONS}row_filters_column_lists_and_partitions_via_root_are_followed",
    ),
    "a magic string for TOAST that leaks": (f"{_ROWS}[toast_texts_that_others_use_as_magic]",),
    "TRUNCATE ignored": (
        f"{_ROWS}[insert_truncate_insert]",
        f"{_ROWS}[truncate_of_several_tables]",
        f"{_ROWS}[a_truncated_leaf]",
    ),
    "microseconds cut in changes but not in the snapshot": (f"{_ROWS}[microseconds_in_changes_as_in_the_copy]",),
    "timestamps infinity and BC": (f"{_ROWS}[timestamps_infinity_and_bc]", f"{_ROWS}[dates_infinity_and_bc]"),
    "numeric NaN": (f"{_ROWS}[numeric_nan]", f"{_ROWS}[numeric_without_bounds]"),
    "one-dimensional arrays with other lower bounds": (f"{_ROWS}[arrays_with_other_lower_bounds]",),
    "columns with odd names": (f"{_ROWS}[columns_with_odd_names]",),
    "tables named alike in two schemas": (f"{_ROWS}[tables_named_alike_in_two_schemas]",),
    "a publication emptied while every signal stays green": (
        f"{_PUBLICATIONS}running_sync_follows_tables_that_are_added_and_removed",
        "tests/checks/test_status.py::test_an_emptied_publication_is_an_error",
    ),
    "an invalidated slot that is not found": (
        "tests/source/test_invalidated.py::test_a_slot_whose_wal_was_removed_is_reported_lost",
    ),
    "WAL held by an idle table": (
        "tests/log/test_positions.py::test_position_past_foreign_wal_is_recorded_before_it_is_confirmed",
    ),
    "a large transaction held in memory": (
        f"{_POSITIONS}large_transaction_is_not_held_in_memory",
        "tests/log/test_positions.py::test_open_transaction_spills_and_is_stored_whole",
    ),
    "Type messages crash the decoder": (f"{_ROWS}[type_messages]",),
    "ALTER TYPE ... USING rewrites rows that decoding never shows": (
        f"{_SCHEMA}[type_changed_using]",
        f"{_SCHEMA}[rows_rewritten_under_the_same_type]",
    ),
    "a merge that reports success and changed nothing": (
        "tests/mirror/test_apply.py::test_a_mirror_that_differs_is_set_aside_unchanged",
    ),
    "root and leaves with different identities": (f"{_ROWS}[root_and_leaves_with_different_identities]",),
    "a row filter that moves a TOASTed row in": (
        f"{_PUBLICATIONS}row_filters_column_lists_and_partitions_via_root_are_followed",
    ),
    "a long key": (f"{_ROWS}[a_long_key]",),
    "key swap under a deferrable key": (f"{_ROWS}[key_swap_under_a_deferrable_key]",),
    "leaf truncate, attach, detach": (
        f"{_ROWS}[a_truncated_leaf]",
        f"{_SCHEMA}[partition_attached_with_rows]",
        f"{_SCHEMA}[partition_detached]",
    ),
    "drop and add of one column": (f"{_SCHEMA}[column_dropped_and_added_again]",),
    "drop and recreate of a table": (f"{_SCHEMA}[table_dropped_and_made_anew]",),
    "drop and recreate of the publication": (
        f"{_PUBLICATIONS}row_filters_column_lists_and_partitions_via_root_are_followed",
    ),
    "a new copy while the stream is ahead": (
        "tests/traps/test_late_copy.py::test_late_copy_catches_up_and_delays_no_other_table",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_known_trap_has_a_test(trap: str) -> None:
    for test in TRAPS[trap]:
        path, name = test.split("[")[0].split("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if "[" in test:
            played = rows.TRAPS if path == "tests/traps/test_rows.py" else schema.TRAPS
            assert test.split("[")[1].rstrip("]") in {item.name for item in played}
