"""Prepared transactions, from their PREPARE to their end: also under a gid that is used again."""

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


def test_it_ends_with_its_commit_or_its_rollback() -> None:
    held, first, other = PreparedTransactions(), prepared(7, "g", 100), prepared(8, "h", 200)
    assert held.prepare(first)
    assert held.prepare(other)
    assert list(held) == [first, other]
    assert held.named(commit(7, "g", 300)) is first
    assert held.named(rollback(8, "h", 200)) is other
    held.end(first)
    held.end(other)
    assert len(held) == 0


def test_what_is_known_keeps_its_place() -> None:
    """Its content is kept; that which comes again is the same."""
    held, first = PreparedTransactions(), prepared(7, "g", 100)
    assert held.prepare(first)
    assert not held.prepare(prepared(7, "g", 100))
    assert held.named(commit(7, "g", 300)) is first


def test_a_gid_is_used_again() -> None:
    """A rollback that comes late, or again, is not of the later one."""
    held, later = PreparedTransactions(), prepared(17, "g", 500)
    held.prepare(later)
    assert held.named(rollback(7, "g", 100)) is None
    assert held.named(rollback(17, "g", 100)) is None
    assert held.named(commit(7, "g", 600)) is None
    assert held.named(commit(17, "g", 600)) is later


def test_one_that_is_prepared_later_does_not_commit_before() -> None:
    """The same xid and gid after the counter of xids went round."""
    held, early, late = PreparedTransactions(), prepared(7, "g", 100), prepared(7, "g", 900)
    held.prepare(early)
    held.prepare(late)
    assert held.named(commit(7, "g", 500)) is early
    held.end(early)
    assert held.named(commit(7, "g", 950)) is late


def test_what_never_came_is_told() -> None:
    held = PreparedTransactions()
    assert held.named(commit(7, "g", 100)) is None
    assert held.named(rollback(7, "g", 50)) is None


def test_what_is_known_from_before_goes_on() -> None:
    """Another process prepared it, days ago."""
    known = prepared(7, "g", 100)
    assert PreparedTransactions([known]).named(commit(7, "g", 5000)) is known
