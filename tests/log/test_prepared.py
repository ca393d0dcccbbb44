"""Prepared transactions, from their PREPARE to their end: also under a gid that is used again."""

from __future__ import annotations

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.prepared import PreparedKey, PreparedTransaction, PreparedTransactions
from pgcdc_assets.protocol.messages import CommitPrepared, Prepare, RollbackPrepared, StreamPrepare


def prepare(xid: int, gid: str, end: int) -> Prepare:
    return Prepare(0, Lsn(end - 8), Lsn(end), 5, xid, gid)


def commit(xid: int, gid: str, at: int) -> CommitPrepared:
    return CommitPrepared(0, Lsn(at), Lsn(at + 8), 6, xid, gid)


def rollback(xid: int, gid: str, prepared: int) -> RollbackPrepared:
    return RollbackPrepared(0, Lsn(prepared), Lsn(prepared + 1000), 5, 6, xid, gid)


def test_it_ends_with_its_commit_or_its_rollback() -> None:
    held = PreparedTransactions()
    first, again = held.prepare(prepare(7, "g", 100))
    assert again is None
    assert first == PreparedTransaction(PreparedKey(7, "g", Lsn(100)), Lsn(92), 5)
    other, _ = held.prepare(StreamPrepare(0, Lsn(192), Lsn(200), 5, 8, "h"), [9, 10])
    assert other.aborted == {9, 10}
    assert list(held) == [first, other]
    assert held.commit(commit(7, "g", 300)) == first
    assert held.rollback(rollback(8, "h", 200)) == other
    assert len(held) == 0


def test_one_that_comes_again_takes_its_own_place() -> None:
    held = PreparedTransactions()
    first, _ = held.prepare(prepare(7, "g", 100), [8])
    second, again = held.prepare(prepare(7, "g", 100))
    assert again == first
    assert second.aborted == frozenset()
    assert list(held) == [second]


def test_a_gid_is_used_again() -> None:
    """A rollback that comes late, or again, is not of the later one."""
    held = PreparedTransactions()
    held.prepare(prepare(7, "g", 100))
    assert held.rollback(rollback(7, "g", 100)) is not None
    later, _ = held.prepare(prepare(17, "g", 500))
    assert held.rollback(rollback(7, "g", 100)) is None
    assert held.rollback(rollback(17, "g", 100)) is None
    assert held.commit(commit(7, "g", 600)) is None
    assert held.commit(commit(17, "g", 600)) == later


def test_one_that_is_prepared_later_does_not_commit_before() -> None:
    """The same xid and gid after the counter of xids went round."""
    held = PreparedTransactions()
    early, _ = held.prepare(prepare(7, "g", 100))
    late, _ = held.prepare(prepare(7, "g", 900))
    assert held.commit(commit(7, "g", 500)) == early
    assert held.commit(commit(7, "g", 950)) == late


def test_what_never_came_is_told() -> None:
    held = PreparedTransactions()
    assert held.commit(commit(7, "g", 100)) is None
    assert held.rollback(rollback(7, "g", 50)) is None


def test_what_is_known_from_before_goes_on() -> None:
    """Another process prepared it, days ago."""
    known = PreparedTransaction(PreparedKey(7, "g", Lsn(100)), Lsn(92), 5, frozenset([8]))
    held = PreparedTransactions([known])
    assert held.commit(commit(7, "g", 5000)) == known
