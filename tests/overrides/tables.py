"""Replacements of functions of the package (overrides) that concern Delta tables, their commits and files, mirrors, and
the stores below them."""

from __future__ import annotations

import errno
import os
import uuid
from typing import Any

import pyarrow as pa

from tests.overrides.override import Original, override, with_instead, without

# Commits and files --------------------------------------------------------------------------------------


def _commit_number_is_used_twice(_original: Original) -> Any:
    def replaced(self: Any, to: Any, content: bytes) -> None:
        staged = f"{to.text}.{uuid.uuid4().hex}"
        with open(staged, "wb") as file:
            file.write(content)
        os.replace(staged, to.text)

    return replaced


override("commit_number_is_used_twice", "pgcdc_assets.store.local:LocalStore.create",
    _commit_number_is_used_twice,
    rule="two commits never have the same number",
    test="tests/delta/test_commit.py::test_a_version_number_is_committed_only_once")  # fmt: skip
override("deletion_vector_is_replaced", "pgcdc_assets.delta.commit:_larger",
    lambda original: with_instead(original, "before | gone", "gone"),
    rule="rows that an earlier deletion vector deleted stay deleted",
    test="tests/delta/test_commit.py::test_every_version_holds_the_rows_of_the_model")  # fmt: skip


def _statistics_hide_nan(original: Original) -> Any:
    if original.__name__ == "_bounded":
        return lambda type_: original(type_) or pa.types.is_floating(type_)
    return with_instead(original, "pa.types.is_floating(type_)", "False")


override("statistics_hide_nan", ("pgcdc_assets.delta.datafile:_told", "pgcdc_assets.delta.datafile:_bounded"),
    _statistics_hide_nan,
    rule="columns that may have NaN get no min and max in a file's statistics, so no reader skips their rows",
    test="tests/delta/test_datafile.py::test_minimum_and_maximum_of_a_column_are_exact_or_absent")  # fmt: skip
override("commits_are_deleted_before_their_checkpoint", "pgcdc_assets.store.local:LocalStore.put",
    lambda original: without(original, "sync_file("),
    rule="commits are deleted only after the checkpoint that replaces them is synced to disk",
    test="tests/delta/test_torn.py::test_commits_are_deleted_only_after_their_checkpoint_is_durable")  # fmt: skip
override("torn_commit_is_read", "pgcdc_assets.delta.logfiles:commit_if_there",
    lambda original: with_instead(original, "ACTIONS in info", "False"),
    rule="a commit that was cut between two actions is refused",
    test="tests/delta/test_torn.py::test_a_torn_commit_is_refused_until_it_is_recovered")  # fmt: skip
override("promised_versions_are_forgotten", "pgcdc_assets.mirror.delta.removal:unneeded_parts",
    lambda original: lambda mirror, promised, grace: original(mirror, (), grace),
    rule="the Delta log of a mirror keeps the commits that the versions of consistent points need",
    test="tests/mirror/test_removal.py::test_promised_versions_are_kept_and_versions_between_them_are_deleted",
)  # fmt: skip


# Mirrors ------------------------------------------------------------------------------------------------
override("copy_keeps_the_application_id", "pgcdc_assets.mirror.delta.mirror:Mirror.generation_app_id",
    lambda _: property(lambda self: None if self.snapshot_lsn is None else self.identity.app_id("applied")),
    rule="after each copy, the mirror's position is stored under a new application id of Delta",
    test="tests/mirror/test_mirror.py::test_a_mirror_stores_the_lsns_of_its_copy_and_of_applied_changes")  # fmt: skip
override("repeated_apply_starts_again", "pgcdc_assets.mirror.delta.tableplan:TablePlan.of",
    lambda original: classmethod(with_instead(original.__func__, "max(part.span.start, stands)", "part.span.start")),
    rule="an apply that is repeated changes nothing",
    test="tests/mirror/test_apply.py::test_a_turn_repeated_after_a_crash_applies_no_change_twice")  # fmt: skip
override("merge_accepts_a_missing_row", "pgcdc_assets.mirror.delta.rowlookup:_Match.check",
    lambda original: without(original, "raise MergeMismatch(LACKS)"),
    rule="a merge fails if the mirror lacks a row that changed",
    test="tests/mirror/test_rowlookup.py::test_a_changed_row_missing_from_the_target_is_an_error")  # fmt: skip
override("merge_overwrites_what_it_finds", "pgcdc_assets.mirror.delta.rowlookup:_Match.check",
    lambda original: without(original, "raise MergeMismatch(HOLDS)"),
    rule="a merge fails if the mirror already has a row that was inserted",
    test="tests/mirror/test_rowlookup.py::test_an_inserted_row_that_the_target_has_is_an_error")  # fmt: skip
override("point_comes_before_its_mirrors", "pgcdc_assets.mirror.delta.durability:DurableVersions.settle",
    lambda original: without(original, "storage.settle(folders)"),
    rule="the mirrors' versions are durable before the point that lists them",
    test="tests/mirror/test_durability.py::test_after_a_power_cut_every_point_reads_as_published")  # fmt: skip
override("full_disk_sets_tables_aside", "pgcdc_assets.failures:_OF_THE_MACHINE",
    lambda original: original - {errno.ENOSPC},
    rule="a full disk ends the run, and sets no table aside",
    test="tests/mirror/test_contained.py::test_an_error_of_the_whole_run_is_not_blamed_on_one_table")  # fmt: skip
override("folders_are_readable_by_all", "pgcdc_assets.store.localfiles:private_folder",
    lambda original: with_instead(original, "OWNER_ONLY", "0o755"),
    rule="only the owner can read the files of the lake and of the project",
    test="tests/cli/test_private.py::test_folders_that_commands_create_are_readable_only_by_their_owner")  # fmt: skip


# Readers ------------------------------------------------------------------------------------------------
override("reused_version_is_read", "pgcdc_assets.lake.point:LakeAt._as_published",
    lambda original: with_instead(original, "found != published", "False"),
    rule="Lake.at refuses a version that has another LSN than its point",
    test="tests/points/test_points.py::test_a_commit_with_the_published_version_number_but_another_lsn_is_refused",
)  # fmt: skip
override("deleted_rows_are_read", "pgcdc_assets.lake.scan:MirrorScan._read",
    lambda original: with_instead(original, "group.alive.all()", "True"),
    rule="no reader of a point gets a deleted row",
    test="tests/lake/test_point.py::test_each_reader_gives_all_values_at_points_a_and_b[sql]")  # fmt: skip
override("bounds_exclude_null", "pgcdc_assets.lake.scan:_known",
    lambda original: with_instead(original, "(column >= low) | column.is_null()", "column >= low"),
    rule="a filter skips no row group that may have a matching row",
    test="tests/lake/test_point.py::test_filter_returns_exactly_the_rows_for_which_it_is_true")  # fmt: skip
