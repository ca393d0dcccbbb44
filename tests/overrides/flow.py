"""Replacements of functions of the package (overrides) that concern consistent points, pauses, and what status, verify
and Dagster report."""

from __future__ import annotations

from tests.overrides.override import override, with_instead, without

# Points -------------------------------------------------------------------------------------------------
override("points_fall", "pgcdc_assets.points.points:ConsistentPoints.publish",
    lambda original: without(original, "raise LakeError"),
    rule="no consistent point is published below an earlier one",
    test="tests/points/test_points.py::test_no_point_is_published_below_the_newest_point")  # fmt: skip
override("point_is_above_the_log", "pgcdc_assets.flow.progress:TablesProgress.publish",
    lambda original: without(original, "raise LakeError"),
    rule="no point is published above the end of the log",
    test="tests/flow/test_progress.py::test_no_point_is_above_the_log")  # fmt: skip
override("copying_tables_are_listed", "pgcdc_assets.flow.standing:ListedTables.versions_at",
    lambda original: with_instead(original, "record.replay_lsn == lsn", "record.replay_lsn <= lsn"),
    rule="a consistent point lists only tables whose mirrors are at its LSN",
    test="tests/flow/test_progress.py::test_point_lists_only_tables_that_have_reached_its_lsn")  # fmt: skip
override("structure_is_listed_below_its_catalog_check", "pgcdc_assets.structure.record:TableRecord.shown",
    lambda _: lambda record, lsn: True,
    rule="a table is listed in no point below the catalog check that showed its structure",
    test="tests/flow/test_progress.py::test_table_is_not_listed_below_the_lsn_of_its_new_structure")  # fmt: skip
override("point_without_a_catalog_check", "pgcdc_assets.flow.catalogwatch:CatalogWatch.is_current",
    lambda _: property(lambda self: self._seen is not None),
    rule="no point lists a table whose mirror is wrong because of DDL below the point",
    test="tests/flow/test_catalogwatch.py::test_no_point_lists_a_table_after_ddl_that_requires_a_new_copy")  # fmt: skip
override("types_of_later_columns_are_not_recorded", "pgcdc_assets.flow.progress:TablesProgress.types_seen",
    lambda _: lambda self, live: None,
    rule="a change of a type is noticed, also of a value or a column that was added after the copy",
    test="tests/flow/test_catalogwatch.py::"
    "test_no_point_lists_a_table_after_an_enum_value_that_was_added_since_the_copy_was_renamed")  # fmt: skip
override("rows_of_an_unknown_partition_are_ignored", "pgcdc_assets.flow.turns:_unlist_roots",
    lambda _: lambda work, span, tables: None,
    rule="no point lists a table without the rows of a partition that was dropped before its facts were read",
    test="tests/flow/test_listed_leaves.py::"
    "test_points_from_before_the_drop_of_a_partition_that_the_receiver_never_saw_have_its_rows")  # fmt: skip
override("points_promise_missing_messages", "pgcdc_assets.flow.messages:messages_at",
    lambda _: lambda work, lsn: lsn,
    rule="a point states that it has the messages only if the feed of messages is complete up to its LSN",
    test="tests/flow/test_messages.py::test_failed_feed_of_logical_messages_delays_no_table")  # fmt: skip


# Runs ---------------------------------------------------------------------------------------------------
override("changes_are_applied_during_a_pause", "pgcdc_assets.flow.decide:next_step",
    lambda original: with_instead(original, "view.paused", "False"),
    rule="nothing is applied while the operator has paused applying",
    test="tests/flow/test_decide.py::test_next_step_depends_on_the_state_of_log_and_tables")  # fmt: skip


# Reports ------------------------------------------------------------------------------------------------
override("lost_row_is_explained_by_a_delete", "pgcdc_assets.checks.verify:TableReport.explained",
    lambda _: property(lambda self: self.compared and not self.updates_seen and not self.different),
    rule="verify reports a row missing from the mirror, also for a table whose updates are not published",
    test="tests/checks/test_verify.py::test_only_extra_rows_are_allowed_if_only_inserts_are_published")  # fmt: skip
override("emptied_publication_is_not_reported", "pgcdc_assets.checks.tablehealth:RULES",
    lambda original: tuple(rule for rule in original if rule.__name__ != "_publications"),
    rule="status reports a publication that lost all its tables",
    test="tests/checks/test_status.py::test_status_reports_a_publication_without_tables_as_an_error")  # fmt: skip
