"""What is received, recorded in the change log, and confirmed to the source."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.overrides.override import Original, override, with_instead, without

# Confirmed only what is durable -------------------------------------------------------------------------


@override(
    "pgcdc_assets.log.receive.batches:Batches.cut",
    rule="a position is confirmed only once it is durable in the log",
    test="tests/traps/test_positions.py::test_flush_is_not_reported_before_it_is_durable",
)
def confirm_before_durable(original: Original) -> Any:
    def replaced(self: Any) -> None:
        self._reported.durable(self._positions.boundary)
        self._confirm()
        original(self)

    return replaced


@override(
    "pgcdc_assets.store.localfiles:sync_file",
    rule="segments and commits are on disk before anybody is told",
    test="tests/log/test_reader.py::test_files_are_synced_before_the_commit_and_the_commit_before_it_is_reported",
)
def fsync_is_skipped(_original: Original) -> Any:
    return lambda path: None


@override(
    "pgcdc_assets.log.receive.receiver:Receiver._keepalive",
    rule="a keepalive's wal_end counts only once all commits before it are durable",
    test="tests/traps/test_positions.py::test_keepalive_does_not_confirm_an_open_batch",
)
def keepalive_confirms_an_open_batch(original: Original) -> Any:
    def replaced(self: Any, frame: bytes) -> None:
        original(self, frame)
        self._reported.durable(self._positions.boundary)

    return replaced


@override(
    "pgcdc_assets.log.receive.wholetransactions:WholeTransactions._pass_begins",
    rule="no boundary lies inside a transaction or its commit record",
    test="tests/log/test_confirmations.py::test_no_confirmation_lies_inside_a_commit_record",
)
def boundary_inside_a_commit_record(original: Original) -> Any:
    def replaced(self: Any, run: Any) -> None:
        original(self, run)
        if len(run.brackets.begins):
            self._positions.reached(self._positions.seen + 8)

    return replaced


@override(
    "pgcdc_assets.core.positions:ReportedPositions.durable",
    rule="no reported position ever goes down",
    test="tests/core/test_positions.py::test_reported_positions_never_fall",
)
def reported_positions_fall(_original: Original) -> Any:
    def replaced(self: Any, lsn: Any) -> Any:
        self._flush = lsn
        self.received(lsn)
        return lsn

    return replaced


@override(
    "pgcdc_assets.log.batch:BatchWriter.keep",
    rule="what is prepared is durable in the lake before the slot is confirmed past its PREPARE",
    test="tests/log/test_two_phase.py::test_prepared_transaction_may_end_after_a_restart",
)
def prepared_is_confirmed_unkept(_original: Original) -> Any:
    return lambda self, transaction, stream: None


# The source's WAL is let go -----------------------------------------------------------------------------


@override(
    "pgcdc_assets.log.receive.receiver:Receiver._keepalive",
    rule="a keepalive's wal_end is a boundary, so that idle tables hold no WAL",
    test="tests/log/test_positions.py::test_position_past_foreign_wal_is_recorded_before_it_is_confirmed",
)
def idle_wal_is_held(original: Original) -> Any:
    return without(original, "self._positions.reached(")


@override(
    "pgcdc_assets.log.receive.receiver:Receiver._keepalive",
    rule="a keepalive that asks for a reply closes the open batch, so that the source can shut down",
    test="tests/log/test_positions.py::test_source_can_shut_down_beside_a_receiver",
)
def shutdown_waits_for_a_batch(original: Original) -> Any:
    return without(original, "self._batches.flush()")


# Each transaction once, in its range --------------------------------------------------------------------


@override(
    "pgcdc_assets.log.receive.wholetransactions:WholeTransactions._first_new",
    rule="what the log holds is skipped when a slot is behind it",
    test="tests/log/test_crash.py::test_transactions_that_a_slot_behind_the_log_repeats_are_stored_once",
)
def known_transactions_come_again(_original: Original) -> Any:
    return lambda self, run, before, standalone: 0


@override(
    "pgcdc_assets.log.receive.wholetransactions:WholeTransactions._first_new",
    rule="a transaction is new by its commit_lsn, never by where it began",
    test="tests/traps/test_positions.py::test_transactions_over_two_ranges_are_received_in_commit_order",
)
def resume_by_begin_lsn(original: Original) -> Any:
    return with_instead(original, "run.brackets.final_lsn", "run.starts(run.brackets.begins)")


@override(
    "pgcdc_assets.log.receive.wholetransactions:WholeTransactions._first_beyond",
    rule="a transaction that ends past endpos is not taken",
    test="tests/log/test_endpos.py::test_run_takes_transactions_that_end_at_or_below_its_goal[inside a commit record]",
)
def straddling_transaction_is_taken(original: Original) -> Any:
    return without(original, "beyond.append(")


@override(
    "pgcdc_assets.core.ranges:LsnRange.holds_commit",
    rule="a transaction belongs to the one range that holds its end",
    test="tests/core/test_ranges.py::test_commit_record_that_starts_at_a_boundary_belongs_to_the_next_range",
)
def range_takes_the_next_commit(_original: Original) -> Any:
    return lambda self, commit_lsn: self.start <= commit_lsn <= self.end


@override(
    "pgcdc_assets.log.commit:LogWriter.commit",
    rule="a commit to the log is a compare-and-set of its position",
    test="tests/log/test_reader.py::test_position_is_set_by_compare_and_set",
)
def log_position_is_set_blindly(original: Original) -> Any:
    return without(original, "raise LogConflict(f'stands at")


@override(
    "pgcdc_assets.log.commit:LogWriter._refuse_others",
    rule="the log takes nothing from a writer that another leader has shut out",
    test="tests/log/test_fencing.py::test_receiver_that_lost_the_lake_cannot_commit",
)
def fenced_writer_writes(_original: Original) -> Any:
    return lambda self, version: None


@override(
    "pgcdc_assets.store.chainlease:ChainLease.check",
    rule="a process whose lease may be owned by another one writes nothing to the lake",
    test="tests/store/test_lease.py::test_nothing_guarded_is_written_while_the_lease_is_not_sure",
)
def unsure_lease_writes(_original: Original) -> Any:
    return lambda self: None


# Rows are complete and described ------------------------------------------------------------------------


@override(
    "pgcdc_assets.log.rows:_Transactions.of",
    rule="tx_ordinal counts through a transaction that spilled",
    test="tests/log/test_positions.py::test_open_transaction_spills_and_is_stored_whole",
)
def ordinals_restart_after_spill(original: Original) -> Any:
    return classmethod(with_instead(original.__func__, "-opening.ordinal if opening else 0", "0"))


@override(
    "pgcdc_assets.log.relations:_Versions._in_force",
    rule="each row is decoded by the Relation message in force when it came",
    test="tests/log/test_content.py::test_rows_of_one_transaction_carry_their_own_schema_versions",
)
def newest_schema_for_all_rows(original: Original) -> Any:
    def replaced(self: Any, relation_id: int, sequence: Any) -> Any:
        return original(self, relation_id, np.full_like(sequence, np.iinfo(np.int64).max))

    return replaced


@override(
    "pgcdc_assets.log.segment:check_content",
    rule="a segment is read only if it holds the bytes that were written",
    test="tests/log/test_reader.py::test_damaged_file_is_detected",
)
def damaged_bytes_are_read(_original: Original) -> Any:
    return lambda path: None


# Transactions in progress -------------------------------------------------------------------------------


@override(
    "pgcdc_assets.log.receive.wholetransactions:StreamPositions.holds",
    rule="a transaction in progress that the log holds is not taken again",
    test="tests/log/test_spill.py::test_transaction_below_the_position_is_not_taken_again",
)
def streamed_transaction_comes_twice(_original: Original) -> Any:
    return lambda self, commit_lsn: False


@override(
    "pgcdc_assets.log.transactions:TransactionsInProgress.abort",
    rule="a rollback to a savepoint takes its own rows alone",
    test="tests/log/test_transactions.py::test_abort_ends_only_its_subtransaction",
)
def savepoint_rollback_takes_the_whole(original: Original) -> Any:
    return with_instead(original, "message.whole", "True")


@override(
    "pgcdc_assets.log.commitfacts:CommitFacts.fill",
    rule="rows of a subtransaction that was rolled back do not count",
    test="tests/log/test_commitfacts.py::test_any_history_reads_the_same_with_early_files",
)
def rolled_back_rows_are_counted(original: Original) -> Any:
    return with_instead(original, "self.aborted", "()")


# The same source, from where the log ends ---------------------------------------------------------------


@override(
    "pgcdc_assets.source.slot.slot:check_slot",
    rule="a slot confirmed past the log is refused: changes are gone",
    test="tests/log/test_slot_truths.py::test_slot_advanced_past_the_log_is_refused",
)
def slot_ahead_is_accepted(original: Original) -> Any:
    return without(original, "raise SlotAhead")


@override(
    "pgcdc_assets.source.slot.slot:check_slot",
    "pgcdc_assets.source.stream.subscribe:check_identity",
    rule="a log ahead of the source's WAL is refused: the source was restored to an earlier time",
    test="tests/log/test_subscribe.py::test_log_ahead_of_the_source_is_refused",
)
def log_ahead_is_accepted(original: Original) -> Any:
    return without(original, "raise LogAhead")


@override(
    "pgcdc_assets.source.stream.subscribe:check_identity",
    rule="a log is continued only from the system and database that it belongs to",
    test="tests/log/test_subscribe.py::test_source_of_another_identity_is_refused",
)
def another_system_is_followed(original: Original) -> Any:
    return without(original, "raise IdentityMismatch")


@override(
    "pgcdc_assets.source.stream.subscribe:_check_timeline",
    rule="a promoted standby is followed only if the log ends before the fork",
    test="tests/log/test_subscribe.py::test_promoted_standby_is_followed_only_below_the_fork[log]",
)
def timelines_are_ignored(_original: Original) -> Any:
    return lambda stream, now, log_timeline, end: None


@override(
    "pgcdc_assets.log.receive.resendcheck:ResendCheck._fail",
    rule="a source that was restored and has gone on past the log's end is refused",
    test="tests/log/test_slot_truths.py::test_restored_source_is_noticed_by_a_transaction_the_log_lacks",
)
def restored_source_is_followed(_original: Original) -> Any:
    return lambda self, lsn: None


@override(
    "pgcdc_assets.source.stream.drain:Drain._advance_to",
    rule="the slot of a drained backlog is advanced only to what is durable in the log",
    test="tests/log/test_drain.py::test_slot_is_advanced_only_to_durable_positions",
)
def drain_confirms_what_is_not_durable(original: Original) -> Any:
    return lambda self, lsn: original(self, self.position)
