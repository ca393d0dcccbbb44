"""Consistent points, pauses, and what status, verify and Dagster say."""

from __future__ import annotations

from typing import Any

from tests.overrides.override import Original, override, with_instead, without

# Points -------------------------------------------------------------------------------------------------


@override(
    "pgcdc_assets.points.points:ConsistentPoints.publish",
    rule="consistent points never go down",
    test="tests/points/test_points.py::test_points_never_fall",
)
def points_fall(original: Original) -> Any:
    return without(original, "raise LakeError")


@override(
    "pgcdc_assets.flow.progress:TablesProgress.publish",
    rule="no point stands above the log",
    test="tests/flow/test_progress.py::test_no_point_is_above_the_log",
)
def point_stands_above_the_log(original: Original) -> Any:
    return without(original, "raise LakeError")


@override(
    "pgcdc_assets.structure.listing:versions_at",
    rule="a consistent point lists only tables that stand at its LSN",
    test="tests/flow/test_progress.py::test_point_lists_only_tables_that_have_reached_it",
)
def copying_tables_are_listed(original: Original) -> Any:
    return with_instead(original, "record.replay_lsn == lsn", "record.replay_lsn <= lsn")


@override(
    "pgcdc_assets.structure.listing:shown",
    rule="a table is listed in no point below the catalog check that showed its structure",
    test="tests/flow/test_progress.py::test_table_is_not_listed_below_the_catalog_check_of_its_structure",
)
def structure_is_listed_before_its_look(_original: Original) -> Any:
    return lambda record, lsn: True


@override(
    "pgcdc_assets.flow.catalogwatch:CatalogWatch.is_current",
    rule="no point lists a table that DDL before the point has made wrong",
    test="tests/flow/test_look.py::test_no_point_lists_a_table_that_ddl_has_made_wrong",
)
def point_without_a_look(_original: Original) -> Any:
    return property(lambda self: self._seen is not None)


@override(
    "pgcdc_assets.flow.messages:messages_at",
    rule="a point says that it has the messages only if the feed of messages is complete to it",
    test="tests/flow/test_messages.py::test_unwritable_message_feed_holds_back_no_table",
)
def points_promise_missing_messages(_original: Original) -> Any:
    return lambda work, lsn: lsn


# Runs ---------------------------------------------------------------------------------------------------


@override(
    "pgcdc_assets.flow.decide:next_step",
    rule="nothing is applied during an operator's pause",
    test="tests/flow/test_decide.py::test_next_step_depends_on_what_the_run_sees",
)
def paused_apply_goes_on(original: Original) -> Any:
    return with_instead(original, "view.paused", "False")


# What is said -------------------------------------------------------------------------------------------


@override(
    "pgcdc_assets.checks.verify:TableReport.explained",
    rule="verify reports a lost row of a table whose updates are not published",
    test="tests/checks/test_verify.py::test_a_mirror_of_an_inserts_only_table_may_only_have_too_many_rows",
)
def lost_row_is_explained_by_a_delete(_original: Original) -> Any:
    return property(lambda self: self.compared and not self.updates_seen and not self.different)


@override(
    "pgcdc_assets.checks.tablehealth:RULES",
    rule="status reports an emptied publication at once",
    test="tests/checks/test_status.py::test_an_emptied_publication_is_an_error",
)
def emptied_publication_is_swallowed(original: Original) -> Any:
    return tuple(rule for rule in original if rule.__name__ != "_publications")
