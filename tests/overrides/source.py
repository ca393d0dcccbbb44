"""Replacements of functions of the package (overrides) that concern copies, changes that are not in the stream, and
writes on the source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.overrides.override import Original, override, with_instead

# Copies -------------------------------------------------------------------------------------------------
override("row_filter_is_not_copied", "pgcdc_assets.source.snapshot.pieces:_condition",
    lambda original: with_instead(original, "table.row_filter", "None"),
    rule="a copy contains only rows that match the publication's row filter",
    test="tests/source/test_pieces.py::test_a_row_filter_applies_to_every_piece")  # fmt: skip
override("row_security_shortens_a_copy", "pgcdc_assets.source.connect.connection:connect",
    lambda original: lambda *args, row_security=True, **kwargs: original(*args, **kwargs),
    rule="row-level security that hides rows makes a copy fail, so no copy lacks rows",
    test="tests/source/test_pieces.py::test_a_copy_fails_if_row_level_security_would_hide_rows")  # fmt: skip
override("gate_is_skipped", "pgcdc_assets.source.snapshot.export:_gate",
    lambda _: lambda holder, observer: None,
    rule="a copy begins only after each transaction that has ended in its snapshot has ended for all sessions",
    test="tests/source/test_export.py::test_a_copy_waits_until_a_commit_in_the_wal_is_visible")  # fmt: skip
override("rewrite_before_the_copy_is_missed", "pgcdc_assets.source.snapshot.reading:_Storage.still_holds",
    lambda _: lambda self, then: True,
    rule="a table that was rewritten or truncated between snapshot and COPY is not copied",
    test="tests/source/test_export.py::test_a_copy_after_ddl_equals_the_snapshot_or_fails[TRUNCATE t]")  # fmt: skip
override("waiters_are_kept_waiting", "pgcdc_assets.source.snapshot.reading:interrupt",
    lambda _: lambda conn, asked: set(),
    rule="a session that requests a lock on a table that a copy reads gets the lock",
    test="tests/source/test_waiters.py::test_a_session_that_requests_a_lock_gets_it_while_a_copy_reads_the_table[cancelled]",
)  # fmt: skip


# The catalog --------------------------------------------------------------------------------------------


def _catalog_is_read_in_pieces(_original: Original) -> Any:
    @contextmanager
    def replaced(conn: Any) -> Iterator[None]:
        yield

    return replaced


override("catalog_is_read_in_pieces", "pgcdc_assets.source.catalog.tables:at_one_moment",
    _catalog_is_read_in_pieces,
    rule="all queries of the catalog read the same snapshot",
    test="tests/structure/test_differences.py::test_a_change_between_two_catalog_queries_is_seen_completely_or_not_at_all",
)  # fmt: skip
override("rewrite_is_missed", "pgcdc_assets.structure.differences:_maybe_rewritten",
    lambda _: lambda before, now: False,
    rule="an ALTER TABLE that rewrites rows is noticed, although the stream does not contain it",
    test="tests/structure/test_differences.py::test_a_change_that_the_stream_does_not_contain_is_a_difference",
)  # fmt: skip
override("unlogged_for_a_while_is_missed", "pgcdc_assets.structure.differences:_behind_the_stream",
    lambda _: lambda before, now: iter(()),
    rule="a table that was UNLOGGED for some time is noticed, because the stream lacks changes",
    test="tests/structure/test_differences.py::test_a_table_set_unlogged_and_logged_again_is_a_difference")  # fmt: skip
override("attached_partition_is_missed", "pgcdc_assets.structure.differences:_partitions",
    lambda _: lambda before, now: iter(()),
    rule="ATTACH and DETACH PARTITION are noticed, although the stream does not contain them",
    test="tests/structure/test_differences.py::test_a_change_that_the_stream_does_not_contain_is_a_difference",
)  # fmt: skip
override("recreated_key_is_missed", "pgcdc_assets.structure.differences:key_changed",
    lambda original: with_instead(original, "before.marks.key_constraint != now.marks.key_constraint", "False"),
    rule="a key that was dropped and added again is noticed, because rows may have had equal keys",
    test="tests/structure/test_differences.py::test_a_change_that_the_stream_does_not_contain_is_a_difference",
)  # fmt: skip
override("recreated_table_is_missed", "pgcdc_assets.structure.differences:changes",
    lambda original: with_instead(original, "before.oid != now.oid", "False"),
    rule="a table that was dropped and created again is noticed",
    test="tests/structure/test_differences.py::test_a_change_that_the_stream_does_not_contain_is_a_difference",
)  # fmt: skip
override("republished_table_is_missed", "pgcdc_assets.structure.differences:_publication",
    lambda _: lambda before, now: iter(()),
    rule="a table that left the publication and came back is noticed, because the stream lacks changes",
    test="tests/structure/test_differences.py::test_a_change_that_the_stream_does_not_contain_is_a_difference",
)  # fmt: skip
override("deferrable_key_is_trusted", "pgcdc_assets.source.catalog.pgclass:_INDEXES",
    lambda original: original.replace(" AND i.indimmediate", ""),
    rule="a deferrable key is not used as a key, because rows can swap such keys in one statement",
    test="tests/source/test_tables.py::test_the_key_of_a_table_identifies_its_rows_in_the_stream")  # fmt: skip


# Writes on the source -----------------------------------------------------------------------------------
override("keyless_table_is_published_for_updates", "pgcdc_assets.source.setup.selection:_unfollowed",
    lambda _: lambda relation, senders, version: None,
    rule="no write on the source fails because of pgcdc",
    test="tests/source/test_setup.py::test_no_write_on_the_source_fails_because_of_setup")  # fmt: skip
override("password_goes_into_the_file", "pgcdc_assets.projectfile:without_secrets",
    lambda _: lambda source: source,
    rule="no secret of a source is written to a file",
    test="tests/cli/test_projectsource.py::test_a_url_with_a_password_is_written_without_the_password")  # fmt: skip
override("another_source_is_accepted", "pgcdc_assets.projectsource:_compare",
    lambda _: lambda settings, saved, found: None,
    rule="a project refuses a source other than the source with which it was set up",
    test="tests/cli/test_projectsource.py::test_every_command_refuses_another_source_before_it_writes")  # fmt: skip
override("another_lake_is_accepted", "pgcdc_assets.flow.ownlake:refuse_other_lake",
    lambda _: lambda layout, *, may_be_gone=False: None,
    rule="a project refuses to write to the lake of another project",
    test="tests/cli/test_own_lake.py::test_a_lake_of_another_project_is_refused[sync]")  # fmt: skip
