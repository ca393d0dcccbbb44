"""The tables that hold transactions in progress and prepared transactions."""

from __future__ import annotations

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.transactions import PreparedKey, PreparedTransaction, PreparedTransactions, TransactionsInProgress
from pgcdc_assets.protocol.messages import (
    CommitPrepared,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
)

AT = Lsn(0x123)


def commit(xid: int) -> StreamCommit:
    return StreamCommit(xid, 0, Lsn(100), Lsn(108), 0)


def test_commit_ends_a_transaction() -> None:
    held = TransactionsInProgress()
    assert held.start(StreamStart(7, True), AT, 1.0) is None
    held.add(7, changes=3, size=90, origin="elsewhere")
    held.start(StreamStart(7, False), Lsn(0x999), 5.0)
    held.add(7, changes=2, size=10)
    assert (len(held), held.bytes, 7 in held) == (1, 100, True)
    done = held.end(commit(7), AT)
    assert (done.xid, done.lsn, done.since, done.changes, done.origin) == (7, AT, 1.0, 5, "elsewhere")
    assert (len(held), held.bytes) == (0, 0)
    assert not done.ambiguous


def test_prepare_ends_a_transaction() -> None:
    held = TransactionsInProgress()
    held.start(StreamStart(7, True), AT, 1.0)
    assert held.end(StreamPrepare(0, AT, AT, 0, 7, "g"), AT).xid == 7
    assert 7 not in held


def test_abort_ends_only_its_subtransaction() -> None:
    held = TransactionsInProgress()
    for xid in (7, 17):
        held.start(StreamStart(xid, True), AT, 1.0)
    assert held.abort(StreamAbort(7, 8)) is None
    assert held.abort(StreamAbort(7, 9)) is None
    assert held[7].aborted == {8, 9}
    assert held[17].aborted == set()
    assert held.abort(StreamAbort(17, 18)) is None
    gone = held.abort(StreamAbort(17, 17))
    assert gone is not None
    assert gone.xid == 17
    assert held.end(commit(7), AT).aborted == {8, 9}
    assert held.unknown_aborts == 0


def test_abort_of_an_unknown_transaction_is_counted() -> None:
    held = TransactionsInProgress()
    assert held.abort(StreamAbort(7, 8)) is None
    assert held.abort(StreamAbort(7, 7)) is None
    assert held.unknown_aborts == 2
    assert len(held) == 0


def test_transaction_without_its_first_block_is_refused() -> None:
    held = TransactionsInProgress()
    with pytest.raises(ProtocolError, match="the first block of transaction 7 is missing, at LSN 0/123"):
        held.start(StreamStart(7, False), AT, 1.0)
    with pytest.raises(ProtocolError, match="no block of transaction 7 arrived, although it is complete, at LSN 0/123"):
        held.end(commit(7), AT)


def test_oldest_transaction_in_progress_is_found() -> None:
    held = TransactionsInProgress()
    assert held.oldest is None
    for xid, since in ((9, 2.0), (7, 1.0), (8, 3.0)):
        held.start(StreamStart(xid, True), AT, since)
    assert held.oldest is held[7]
    held.end(commit(7), AT)
    assert held.oldest is held[9]


def test_message_before_an_abort_is_ambiguous() -> None:
    held = TransactionsInProgress()
    held.start(StreamStart(7, True), AT, 1.0)
    held.abort(StreamAbort(7, 8))
    held.add(7, changes=1, size=10, messages=1)
    assert not held[7].ambiguous
    held.abort(StreamAbort(7, 9))
    assert held[7].ambiguous


def prepared(xid: int, gid: str, end: int) -> PreparedTransaction:
    return PreparedTransaction(PreparedKey(xid, gid, Lsn(end)), 5)


def commit_prepared(xid: int, gid: str, at: int) -> CommitPrepared:
    return CommitPrepared(0, Lsn(at), Lsn(at + 8), 6, xid, gid)


def rollback(xid: int, gid: str, prepared: int) -> RollbackPrepared:
    return RollbackPrepared(0, Lsn(prepared), Lsn(prepared + 1000), 5, 6, xid, gid)


def test_prepared_transaction_ends_with_its_commit_or_rollback() -> None:
    held, first, other = PreparedTransactions(), prepared(7, "g", 100), prepared(8, "h", 200)
    assert held.prepare(first)
    assert held.prepare(other)
    assert list(held) == [first, other]
    assert held.named(commit_prepared(7, "g", 300)) is first
    assert held.named(rollback(8, "h", 200)) is other
    held.end(first)
    held.end(other)
    assert len(held) == 0


def test_repeated_prepare_changes_nothing() -> None:
    """The content of the first PREPARE is kept. The repeated PREPARE has the same content."""
    held, first = PreparedTransactions(), prepared(7, "g", 100)
    assert held.prepare(first)
    assert not held.prepare(prepared(7, "g", 100))
    assert held.named(commit_prepared(7, "g", 300)) is first


def test_late_rollback_or_commit_with_a_reused_gid_does_not_end_the_newer_transaction() -> None:
    """The gid was used before. A late end of the earlier transaction must not end the newer transaction."""
    held, later = PreparedTransactions(), prepared(17, "g", 500)
    held.prepare(later)
    assert held.named(rollback(7, "g", 100)) is None
    assert held.named(rollback(17, "g", 100)) is None
    assert held.named(commit_prepared(7, "g", 600)) is None
    assert held.named(commit_prepared(17, "g", 600)) is later


def test_commit_prepared_below_a_prepare_belongs_to_an_earlier_transaction() -> None:
    """A later transaction has the same xid and gid, because the xid counter has wrapped around."""
    held, early, late = PreparedTransactions(), prepared(7, "g", 100), prepared(7, "g", 900)
    held.prepare(early)
    held.prepare(late)
    assert held.named(commit_prepared(7, "g", 500)) is early
    held.end(early)
    assert held.named(commit_prepared(7, "g", 950)) is late


def test_end_of_an_unknown_transaction_finds_nothing() -> None:
    held = PreparedTransactions()
    assert held.named(commit_prepared(7, "g", 100)) is None
    assert held.named(rollback(7, "g", 50)) is None


def test_transaction_prepared_during_an_earlier_process_is_found() -> None:
    """The transaction was prepared while another receiver process ran, perhaps days ago."""
    known = prepared(7, "g", 100)
    assert PreparedTransactions([known]).named(commit_prepared(7, "g", 5000)) is known
