"""Prepared transactions, from PREPARE to their end, also when a gid is used again."""

from __future__ import annotations

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.prepared import PreparedKey, PreparedTransaction, PreparedTransactions
from pgcdc_assets.protocol.messages import CommitPrepared, RollbackPrepared


def prepared(xid: int, gid: str, end: int) -> PreparedTransaction:
    return PreparedTransaction(PreparedKey(xid, gid, Lsn(end)), 5)


def commit(xid: int, gid: str, at: int) -> CommitPrepared:
    return CommitPrepared(0, Lsn(at), Lsn(at + 8), 6, xid, gid)


def rollback(xid: int, gid: str, prepared: int) -> RollbackPrepared:
    return RollbackPrepared(0, Lsn(prepared), Lsn(prepared + 1000), 5, 6, xid, gid)


def test_prepared_transaction_ends_with_its_commit_or_rollback() -> None:
    held, first, other = PreparedTransactions(), prepared(7, "g", 100), prepared(8, "h", 200)
    assert held.prepare(first)
    assert held.prepare(other)
    assert list(held) == [first, other]
    assert held.named(commit(7, "g", 300)) is first
    assert held.named(rollback(8, "h", 200)) is other
    held.end(first)
    held.end(other)
    assert len(held) == 0


def test_repeated_prepare_changes_nothing() -> None:
    """Its content is kept, and the repeated content is the same."""
    held, first = PreparedTransactions(), prepared(7, "g", 100)
    assert held.prepare(first)
    assert not held.prepare(prepared(7, "g", 100))
    assert held.named(commit(7, "g", 300)) is first


def test_late_end_of_an_earlier_gid_does_not_end_the_later_transaction() -> None:
    """A late or repeated rollback does not belong to the later transaction."""
    held, later = PreparedTransactions(), prepared(17, "g", 500)
    held.prepare(later)
    assert held.named(rollback(7, "g", 100)) is None
    assert held.named(rollback(17, "g", 100)) is None
    assert held.named(commit(7, "g", 600)) is None
    assert held.named(commit(17, "g", 600)) is later


def test_commit_below_a_prepare_does_not_belong_to_it() -> None:
    """The same xid and gid, after the xid counter has wrapped around."""
    held, early, late = PreparedTransactions(), prepared(7, "g", 100), prepared(7, "g", 900)
    held.prepare(early)
    held.prepare(late)
    assert held.named(commit(7, "g", 500)) is early
    held.end(early)
    assert held.named(commit(7, "g", 950)) is late


def test_end_of_an_unknown_transaction_finds_nothing() -> None:
    held = PreparedTransactions()
    assert held.named(commit(7, "g", 100)) is None
    assert held.named(rollback(7, "g", 50)) is None


def test_transaction_prepared_under_an_earlier_process_is_found() -> None:
    """Another process prepared it, days ago."""
    known = prepared(7, "g", 100)
    assert PreparedTransactions([known]).named(commit(7, "g", 5000)) is known
