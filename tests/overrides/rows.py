"""Replacements of functions of the package (overrides) that concern how messages in the log become changes of rows:
values, keys, TOAST, truncates."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.overrides.override import Original, override, with_instead

# Values -------------------------------------------------------------------------------------------------


def _infinity_is_clipped(original: Original) -> Any:
    def replaced(text: pa.StringArray, of: Any) -> Any:
        clipped = pc.replace_substring_regex(text, "^-?infinity$", "9999-12-31 00:00:00")
        return original(clipped, of)

    return replaced


override("infinity_is_clipped", "pgcdc_assets.protocol.text.types:_cast_or_outside",
    _infinity_is_clipped,
    rule="an infinite timestamp is NULL in the mirror, its text is kept, and it never becomes a finite one",
    test="tests/protocol/test_types.py::test_timestamp_is_cast_exactly_or_does_not_fit")  # fmt: skip


def _nan_is_clipped(original: Original) -> Any:
    numeric = 1700
    return {**original, numeric: lambda text, of: original[numeric](pc.replace_substring(text, "NaN", "0"), of)}


override("nan_is_clipped", "pgcdc_assets.protocol.text.types:_CASTS",
    _nan_is_clipped,
    rule="a numeric that does not fit its type is NULL, its text is kept, and it never becomes a number",
    test="tests/protocol/test_types.py::test_numeric_text_is_cast_exactly_or_does_not_fit")  # fmt: skip


# Changes of rows ----------------------------------------------------------------------------------------
override("key_change_is_a_plain_update", "pgcdc_assets.feed.events:_moved",
    lambda original: lambda post, pre, at, route: original(post, pre, at, route) & False,
    rule="a change of key is a delete and an insert",
    test="tests/feed/test_events.py::test_an_update_that_changes_the_key_is_two_events")  # fmt: skip
override("missing_value_of_an_insert_is_null", "pgcdc_assets.feed.events:_inserts",
    lambda original: with_instead(original, "change.unchanged", "{}"),
    rule="an insert that lacks a value is refused",
    test="tests/feed/test_events.py::test_an_insert_that_lacks_a_value_is_refused")  # fmt: skip
override("old_tuple_is_ignored", "pgcdc_assets.feed.events:_filled",
    lambda _: lambda post, pre, at: post,
    rule="under REPLICA IDENTITY FULL, values that were not sent come from the old tuple",
    test="tests/feed/test_events.py::test_with_identity_full_an_unsent_toast_value_is_taken_from_the_old_tuple",
)  # fmt: skip
override("rows_are_not_counted", "pgcdc_assets.feed.transform:_check_taken",
    lambda _: lambda log, router, plans, done: None,
    rule="a table is set aside if its feed has fewer rows than the receiver counted",
    test="tests/feed/test_transform.py::test_a_table_is_set_aside_if_its_feed_lacks_a_row_of_the_log")  # fmt: skip
override("rows_are_assigned_by_table_name", "pgcdc_assets.feed.plan:Router._taker",
    lambda _: lambda self, shape: self.names.get(shape.root or shape.table),
    rule="the table of a row is found by the OID of the row's relation, not by name",
    test="tests/feed/test_routing.py::test_rows_belong_to_the_table_with_the_oid_of_their_relation_under_any_name",
)  # fmt: skip


# Their net effect ---------------------------------------------------------------------------------------
override("unchanged_toast_is_null", "pgcdc_assets.mirror.net.neteffect:_present_masks",
    lambda _: lambda events, attnums: {},
    rule="an unchanged TOAST value is never NULL",
    test="tests/mirror/test_neteffect.py::test_an_unsent_value_is_taken_from_an_earlier_event_of_the_row")  # fmt: skip
override("toast_is_filled_across_a_delete", "pgcdc_assets.mirror.net.keyhistory:_with_masks",
    lambda original: with_instead(original, "np.where(old_half >= 0, before[old_half], before)", "before"),
    rule="an unchanged value never comes from a row that was deleted",
    test="tests/mirror/test_neteffect.py::test_an_unsent_value_is_not_taken_from_a_deleted_row")  # fmt: skip


def _truncate_is_dropped(original: Original) -> Any:
    def replaced(events: pa.Table) -> Any:
        return original(events.filter(pc.not_equal(events["_pgcdc_op"], "truncate")))

    return replaced


override("truncate_is_dropped", "pgcdc_assets.mirror.net.neteffect:after_truncates",
    _truncate_is_dropped,
    rule="a TRUNCATE removes the earlier changes of the table",
    test="tests/mirror/test_neteffect.py::test_truncate_drops_earlier_events")  # fmt: skip
override("truncate_of_a_partition_empties_the_table", "pgcdc_assets.mirror.net.neteffect:after_truncates",
    lambda original: with_instead(original, "pc.or_(other, later)", "later"),
    rule="a TRUNCATE of a partition removes only rows of this partition",
    test="tests/mirror/test_neteffect.py::test_truncate_of_a_leaf_drops_earlier_events_of_that_leaf")  # fmt: skip
override("contradictions_are_accepted", "pgcdc_assets.mirror.net.keyhistory:_refuse_contradictions",
    lambda _: lambda before, live, arrives, commit_lsn: None,
    rule="changes that contradict the mirror's state are refused",
    test="tests/mirror/test_neteffect.py::test_changes_that_contradict_each_other_are_refused")  # fmt: skip
override("order_in_a_transaction_is_ignored", "pgcdc_assets.mirror.net.keyhistory:key_outcomes",
    lambda original: with_instead(original, "np.lexsort((ordinal, commit_lsn))",
                                  "np.argsort(commit_lsn, kind='stable')"),
    rule="changes of one transaction are applied in their order in the transaction",
    test="tests/mirror/test_neteffect.py::test_order_of_events_in_files_does_not_change_the_net_effect")  # fmt: skip
override("duplicates_are_one_row", "pgcdc_assets.mirror.net.neteffect:net_rows",
    lambda original: with_instead(original, "np.where(leaving, -1, 1)", "np.where(leaving, -1, 1) / 2"),
    rule="equal rows of a table without a key stay separate rows",
    test="tests/property/test_collapse.py::test_after_a_merge_equal_rows_without_a_key_occur_as_often_as_in_the_source",
)  # fmt: skip
