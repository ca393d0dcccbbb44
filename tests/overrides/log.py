"""Replacements of functions of the package (overrides) that concern what is received, recorded in the change log, and
confirmed to the source."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.overrides.override import Original, override, with_instead, without

# Only durable positions are confirmed -------------------------------------------------------------------


def _confirm_before_durable(original: Original) -> Any:
    def replaced(self: Any) -> None:
        self._reported.durable(self._positions.boundary)
        self._confirm()
        original(self)

    return replaced


override("confirm_before_durable", "pgcdc_assets.log.receive.batches:Batches.cut",
    _confirm_before_durable,
    rule="a position is confirmed to the slot only after it is durable in the log",
    test="tests/traps/test_positions.py::test_position_is_not_reported_as_flushed_before_it_is_durable")  # fmt: skip
override("fsync_is_skipped", "pgcdc_assets.store.localfiles:sync_file",
    lambda _: lambda path: None,
    rule="segments and commits are synced to disk before their position is reported",
    test="tests/log/test_reader.py::test_log_files_are_synced_before_the_commit_and_the_commit_before_it_is_reported",
)  # fmt: skip


def _keepalive_confirms_an_open_batch(original: Original) -> Any:
    def replaced(self: Any, frame: bytes) -> None:
        original(self, frame)
        self._reported.durable(self._positions.boundary)

    return replaced


override("keepalive_confirms_an_open_batch", "pgcdc_assets.log.receive.receiver:Receiver._keepalive",
    _keepalive_confirms_an_open_batch,
    rule="a keepalive's wal_end is confirmed only after all received commits below it are durable",
    test="tests/traps/test_positions.py::test_keepalive_does_not_confirm_an_open_batch")  # fmt: skip


def _boundary_inside_a_commit_record(original: Original) -> Any:
    def replaced(self: Any, run: Any) -> None:
        original(self, run)
        if len(run.brackets.begins):
            self._positions.reached(self._positions.seen + 8)

    return replaced


override("boundary_inside_a_commit_record", "pgcdc_assets.log.receive.wholetransactions:WholeTransactions._pass_begins",
    _boundary_inside_a_commit_record,
    rule="no boundary lies inside a commit record",
    test="tests/log/test_positions.py::test_no_confirmed_lsn_lies_inside_a_commit_record")  # fmt: skip


def _reported_positions_fall(_original: Original) -> Any:
    def replaced(self: Any, lsn: Any) -> Any:
        self._flush = lsn
        self.received(lsn)
        return lsn

    return replaced


override("reported_positions_fall", "pgcdc_assets.core.lsn:ReportedPositions.durable",
    _reported_positions_fall,
    rule="no position that is reported to the server is lower than before",
    test="tests/core/test_lsn.py::test_reported_positions_never_fall")  # fmt: skip
override("prepared_transaction_is_not_stored", "pgcdc_assets.log.batch:BatchWriter.keep",
    lambda _: lambda self, transaction, stream: None,
    rule="a prepared transaction is durable in the lake before a position above its PREPARE is confirmed",
    test="tests/log/test_two_phase.py::test_prepared_transaction_may_end_after_a_restart")  # fmt: skip


# The source can delete its WAL --------------------------------------------------------------------------
override("idle_tables_keep_wal", "pgcdc_assets.log.receive.receiver:Receiver._keepalive",
    lambda original: without(original, "self._positions.reached("),
    rule="a keepalive's wal_end is a boundary, so the slot keeps no WAL while the published tables are idle",
    test="tests/log/test_positions.py::test_position_above_wal_without_published_changes_is_recorded_then_confirmed",
)  # fmt: skip
override("shutdown_waits_for_the_open_batch", "pgcdc_assets.log.receive.receiver:Receiver._keepalive",
    lambda original: without(original, "self._batches.flush()"),
    rule="a keepalive that requests a reply ends the open batch, so that the source can shut down",
    test="tests/log/test_positions.py::test_source_can_shut_down_while_a_receiver_is_connected")  # fmt: skip


# Each transaction is stored once, in its range ----------------------------------------------------------
override("stored_transactions_are_stored_again",
    "pgcdc_assets.log.receive.wholetransactions:WholeTransactions._first_new",
    lambda _: lambda self, run, before, standalone: 0,
    rule="a slot behind the log sends transactions again, and they are skipped",
    test="tests/log/test_crash.py::test_transactions_that_a_slot_behind_the_log_resends_are_stored_once")  # fmt: skip
override("transactions_are_compared_by_begin_lsn",
    "pgcdc_assets.log.receive.wholetransactions:WholeTransactions._first_new",
    lambda original: with_instead(original, "run.brackets.final_lsn", "run.starts(run.brackets.begins)"),
    rule="whether a transaction is new depends on its commit_lsn, not on the LSN at which it began",
    test="tests/traps/test_positions.py::test_transactions_over_two_ranges_are_received_in_commit_order")  # fmt: skip
override("transaction_above_endpos_is_stored",
    "pgcdc_assets.log.receive.wholetransactions:WholeTransactions._first_beyond",
    lambda original: without(original, "beyond.append("),
    rule="a transaction that ends above the endpos is not stored",
    test="tests/log/test_endpos.py::test_run_stores_transactions_that_end_at_or_below_its_goal"
    "[inside a commit record-folder]",
)  # fmt: skip
override("range_contains_the_next_commit", "pgcdc_assets.core.lsn:LsnRange.holds_commit",
    lambda _: lambda self, commit_lsn: self.start <= commit_lsn <= self.end,
    rule="a transaction belongs only to the range that contains its end",
    test="tests/core/test_lsn.py::test_commit_record_that_starts_at_a_boundary_belongs_to_the_next_range",
)  # fmt: skip
override("log_position_is_set_blindly", "pgcdc_assets.log.commit:LogWriter.commit",
    lambda original: without(original, "raise LogConflict(f'ends at"),
    rule="a commit to the log fails if the log's position is not the one that the writer expects",
    test="tests/log/test_reader.py::test_position_is_set_by_compare_and_set")  # fmt: skip
override("writer_that_lost_the_lake_writes", "pgcdc_assets.log.commit:LogWriter._refuse_others",
    lambda _: lambda self, version: None,
    rule="a writer that has lost the lake cannot commit to the log",
    test="tests/log/test_positions.py::test_writer_cannot_commit_after_a_new_leader_has_taken_the_lake")  # fmt: skip
override("writer_with_an_expired_lease_writes", "pgcdc_assets.store.chainlease:ChainLease.check",
    lambda _: lambda self: None,
    rule="a process writes nothing to the lake if another process may have taken its lease",
    test="tests/store/test_lease.py::test_a_holder_whose_lease_expired_cannot_write_to_the_guarded_folder")  # fmt: skip


# Rows are complete, and are decoded with their structure ------------------------------------------------
override("ordinals_restart_after_spill", "pgcdc_assets.log.rows:_Transactions.of",
    lambda original: classmethod(with_instead(original.__func__, "-opening.ordinal if opening else 0", "0")),
    rule="tx_ordinal continues after a part of the transaction was spilled to disk",
    test="tests/log/test_positions.py::test_large_transaction_is_spilled_to_files_and_stored_completely")  # fmt: skip


def _newest_schema_for_all_rows(original: Original) -> Any:
    def replaced(self: Any, relation_id: int, sequence: Any) -> Any:
        return original(self, relation_id, np.full_like(sequence, np.iinfo(np.int64).max))

    return replaced


override("newest_schema_for_all_rows", "pgcdc_assets.log.relations:_Versions._in_force",
    _newest_schema_for_all_rows,
    rule="each row is decoded with the last Relation message before the row",
    test="tests/log/test_content.py::test_rows_before_and_after_an_alter_have_different_schema_ids")  # fmt: skip
override("damaged_bytes_are_read", "pgcdc_assets.log.segment:check_content",
    lambda _: lambda path: None,
    rule="a segment is read only if it contains the bytes that were written",
    test="tests/log/test_reader.py::test_damaged_file_is_detected")  # fmt: skip


# Transactions in progress -------------------------------------------------------------------------------
override("streamed_transaction_comes_twice", "pgcdc_assets.log.receive.wholetransactions:StreamPositions.holds",
    lambda _: lambda self, commit_lsn: False,
    rule="a transaction in progress that is already in the log is not stored again",
    test="tests/log/test_spill.py::test_transaction_below_the_position_of_the_log_is_not_stored_again")  # fmt: skip
override("savepoint_rollback_ends_the_transaction", "pgcdc_assets.log.transactions:TransactionsInProgress.abort",
    lambda original: with_instead(original, "message.whole", "True"),
    rule="a rollback to a savepoint removes only the rows after the savepoint",
    test="tests/log/test_spill.py::test_abort_ends_only_its_subtransaction")  # fmt: skip
override("rolled_back_rows_are_counted", "pgcdc_assets.log.commitfacts:CommitFacts.fill",
    lambda original: with_instead(original, "self.aborted", "()"),
    rule="rows of a subtransaction that was rolled back are not read",
    test="tests/log/test_commitfacts.py::test_early_files_have_the_same_rows_as_files_written_at_commit")  # fmt: skip


# The receiver checks that the log belongs to this source, and that the slot still has all later changes --
override("slot_ahead_is_accepted", "pgcdc_assets.source.slot.slot:check_slot",
    lambda original: without(original, "raise SlotAhead"),
    rule="a slot with a confirmed position above the log is refused, because changes are lost",
    test="tests/log/test_slot_truths.py::test_slot_advanced_past_the_log_is_refused")  # fmt: skip
override("log_ahead_is_accepted",
    ("pgcdc_assets.source.slot.slot:check_slot", "pgcdc_assets.source.stream.subscribe:check_identity"),
    lambda original: without(original, "raise LogAhead"),
    rule="a log above the source's WAL is refused, because the source was restored to an earlier time",
    test="tests/log/test_subscribe.py::test_log_ahead_of_the_source_is_refused")  # fmt: skip
override("another_system_is_followed", "pgcdc_assets.source.stream.subscribe:check_identity",
    lambda original: without(original, "raise IdentityMismatch"),
    rule="a log is continued only from the server and database with which it began",
    test="tests/log/test_subscribe.py::test_source_with_another_system_id_or_database_oid_is_refused")  # fmt: skip
override("timelines_are_ignored", "pgcdc_assets.source.stream.subscribe:_check_timeline",
    lambda _: lambda stream, now, log_timeline, end: None,
    rule="a promoted standby is followed only if the log ends below the LSN of the promotion",
    test="tests/log/test_subscribe.py::test_promoted_standby_is_refused_for_a_lake_above_the_fork[log]")  # fmt: skip
override("restored_source_is_followed", "pgcdc_assets.log.receive.wholetransactions:ResendCheck._fail",
    lambda _: lambda self, lsn: None,
    rule="a source that was restored, and then wrote WAL above the log's end, is refused",
    test="tests/log/test_slot_truths.py::test_source_with_a_transaction_that_the_log_lacks_is_refused_at_each_run",
)  # fmt: skip
override("restored_source_is_refused_only_once", "pgcdc_assets.log.receive.intake:Intake.resend_checked",
    lambda _: property(lambda self: True),
    rule="the slot is moved to the log's end only after the log was compared with what the server sends again",
    test="tests/log/test_slot_truths.py::test_source_with_a_transaction_that_the_log_lacks_is_refused_at_each_run",
)  # fmt: skip
override("drain_confirms_what_is_not_durable", "pgcdc_assets.source.stream.drain:Drain._advance_to",
    lambda original: lambda self, lsn: original(self, self.position),
    rule="while a backlog is drained, the slot is advanced only to LSNs that are durable in the log",
    test="tests/log/test_drain.py::test_slot_is_advanced_only_to_durable_positions")  # fmt: skip
