from __future__ import annotations

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.decide import up_to
from pgcdc_assets.flow.ranges import OpenRange, rows_by_kind, summed
from pgcdc_assets.flow.reports import TableTurn
from pgcdc_assets.log.summary import BatchSummary

ORDERS = TableName("public", "orders")


def batch(start: int, end: int, size: int = 10, transactions: int = 1) -> BatchSummary:
    return BatchSummary(
        start=Lsn(start), end=Lsn(end), timeline=1, transactions=transactions, last_xid=1, first_commit_ts=None,
        last_commit_ts=None, counts={7: {"I": transactions}} if transactions else {}, others={"C": transactions},
        bytes=size, relations={}, schemas=(),
    )  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def open_range(clock: Clock) -> OpenRange:
    return OpenRange(Lsn(100), max_bytes=30, min_seconds=60, clock=clock)


def test_range_is_closed_when_it_reaches_its_size() -> None:
    gathered = open_range(Clock())
    gathered.add([batch(100, 110), batch(110, 120)], [], {})
    assert not gathered.due
    gathered.add([batch(120, 130)], [], {})
    assert gathered.due


def test_range_is_closed_when_its_first_transaction_reaches_an_age() -> None:
    clock = Clock()
    gathered = open_range(clock)
    clock.now = 1000.0
    gathered.add([batch(100, 110)], [], {})
    assert not gathered.due
    clock.now = 1060.0
    assert gathered.due


def test_wal_without_rows_opens_no_range_and_is_part_of_the_next_range() -> None:
    clock = Clock()
    gathered = open_range(clock)
    gathered.add([batch(100, 150, 0, 0)], [], {})
    clock.now = 1e6
    assert gathered.empty
    assert not gathered.due
    gathered.add([batch(150, 160)], [], {})
    span, _, _ = gathered.close()
    assert span == LsnRange(Lsn(100), Lsn(160))
    assert gathered.start == Lsn(160)
    assert gathered.empty


def test_counts_of_two_turns_are_summed() -> None:
    left = TableTurn(ORDERS, Lsn(1), 4, 1, 2, 3, {"insert": 1}, 0.5, 0.5)
    right = TableTurn(ORDERS, Lsn(2), 5, 10, 20, 30, {"insert": 2, "delete": 1}, 1.0, 1.0)
    assert summed(left, right) == TableTurn(ORDERS, Lsn(2), 5, 11, 22, 33, {"insert": 3, "delete": 1}, 1.5, 1.5)


def test_a_turn_applies_whole_batches_until_the_size_is_reached() -> None:
    batches = [batch(0, 1), batch(1, 2), batch(2, 3)]
    assert up_to(batches, 1) == batches[:1]
    assert up_to(batches, 20) == batches[:2]
    assert up_to(batches, 1000) == batches


def test_only_row_messages_are_counted() -> None:
    assert rows_by_kind([batch(0, 1, transactions=3)]) == {"I": 3, "U": 0, "D": 0, "T": 0}
