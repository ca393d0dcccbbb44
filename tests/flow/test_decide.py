"""What a sync does next, when a sync ends, and when an LSN range ends. No test does I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.feed.plan import Router
from pgcdc_assets.flow.decide import (
    GATHERED_BYTES,
    Bounds,
    PointDue,
    Situation,
    Step,
    TablePosition,
    TakeLateTurn,
    TakeTurn,
    View,
    Wait,
    finished,
    next_step,
    up_to,
)
from pgcdc_assets.flow.ranges import OpenRange, rows_by_kind, summed
from pgcdc_assets.flow.reports import Silent, TableTurn
from pgcdc_assets.flow.turns import take_turn
from pgcdc_assets.flow.work import Work
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.span import LogSpan
from pgcdc_assets.log.summary import BatchSummary
from pgcdc_assets.structure.record import Strange, TableRecord, TableState, UnreadRows

A, B = TableName("public", "a"), TableName("public", "b")
SHARE = 100
LEVEL = [TablePosition(A, Lsn(50)), TablePosition(B, Lsn(50))]
BEHIND = [TablePosition(A, Lsn(20)), TablePosition(B, Lsn(50))]
LATE = [TablePosition(A, Lsn(10), late=True), TablePosition(B, Lsn(40))]


def log(start: Lsn, end: Lsn) -> Sequence[BatchSummary]:
    """Batches of 60 bytes, one for every 10 bytes of WAL."""
    return [
        BatchSummary(Lsn(at), Lsn(at + 10), 1, 1, None, None, None, {}, {}, 60, {}, ()) for at in range(start, end, 10)
    ]


def view(positions: Sequence[TablePosition], **more: object) -> View:
    base = View(Lsn(50), positions, log, PointDue(False), SHARE)
    return replace(base, **more)  # type: ignore[arg-type]


def turn(upto: int, *names: TableName, exact: bool = False) -> TakeTurn:
    return TakeTurn(list(names), Lsn(upto), exact)


NEXT = {
    "everything is applied and no point is due": (view(LEVEL), Wait()),
    "a point is due": (view(LEVEL, point=PointDue(True)), turn(50, A, B)),
    "a point at this LSN could not list every table": (view(LEVEL, point=PointDue(True, Lsn(50))), Wait()),
    "a point at a lower LSN could not list every table": (view(LEVEL, point=PointDue(True, Lsn(40))), turn(50, A, B)),
    "a table is behind by more than one turn applies": (view(BEHIND), turn(40, A, B)),
    "a table is behind by less than one turn applies": (
        view([TablePosition(A, Lsn(40)), TablePosition(B, Lsn(50))]), turn(50, A, B),
    ),
    "too few bytes for a turn, and more arrive": (view(BEHIND, gathers=True), Wait()),
    "too few bytes for a turn, but a point is due": (view(BEHIND, gathers=True, point=PointDue(True)), turn(40, A, B)),
    "enough bytes for a turn": (
        view(BEHIND, gathers=True, batches=lambda a, b: [replace(log(a, b)[0], bytes=GATHERED_BYTES)]), turn(50, A, B),
    ),
    "verify has not named its LSN yet": (view(BEHIND, held=True), Wait()),
    "applying is paused": (view(BEHIND, paused=True, point=PointDue(True)), Wait()),
    "applying is paused, and verify waits for a point": (view(BEHIND, paused=True, exact=Lsn(50)), Wait()),
    "verify's LSN is above the log": (view(LEVEL, exact=Lsn(60)), Wait()),
    "all tables are at verify's LSN": (view(LEVEL, exact=Lsn(50)), turn(50, A, B, exact=True)),
    "verify's LSN is below the log's end": (view([TablePosition(A, Lsn(20))], exact=Lsn(30)), turn(30, A, exact=True)),
    "too few bytes for a turn, but verify waits": (view(BEHIND, gathers=True, exact=Lsn(60)), turn(40, A, B)),
    "late tables are first, with twice the bytes": (view(LATE, complete=Lsn(90)), TakeLateTurn([A], Lsn(40))),
    "after the late tables come the other tables": (view(LATE, complete=Lsn(90), caught_up=True), turn(60, B)),
    "late tables are in a turn that verify waits for": (view(LATE, exact=Lsn(50)), turn(30, A, B)),
    "one turn applies several batches": (
        view([TablePosition(A, Lsn(0))], complete=Lsn(90), share_bytes=240), turn(40, A),
    ),
    "every table is late": (
        view([TablePosition(A, Lsn(10), late=True)], complete=Lsn(90)), TakeLateTurn([A], Lsn(50)),
    ),
    "every table is late and has had its turn": (
        view([TablePosition(A, Lsn(10), late=True)], complete=Lsn(90), caught_up=True), Wait(),
    ),
    "no table at all": (view([]), Wait()),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "step"), NEXT.values(), ids=NEXT.keys())
def test_next_step_depends_on_the_state_of_log_and_tables(seen: View, step: Step) -> None:
    assert next_step(seen) == step


REST = Situation(
    running_seconds=10, idle_seconds=5, following=False, copying=False, awaited=False, arrived=True, level=True
)
FOLLOWING = replace(REST, following=True)


def bounds(*events: str, **more: float) -> Bounds:
    made = Bounds(**more)  # type: ignore[arg-type]
    for event in events:
        getattr(made, event).set()
    return made


ENDS = {
    "all is received and applied": (bounds(), REST, True),
    "not all is applied": (bounds(), replace(REST, level=False), False),
    "not all is received": (bounds(), replace(REST, arrived=False), False),
    "follow mode": (bounds(), FOLLOWING, False),
    "follow mode, max_seconds reached": (bounds(max_seconds=10), FOLLOWING, True),
    "follow mode, max_seconds not reached": (bounds(max_seconds=11), FOLLOWING, False),
    "follow mode, idle_seconds reached": (bounds(idle_seconds=5), FOLLOWING, True),
    "a command waits for the lake": (bounds(), replace(FOLLOWING, awaited=True), True),
    "a command waits for the lake during a copy": (
        bounds(max_seconds=1),
        replace(FOLLOWING, awaited=True, copying=True),
        False,
    ),
    "all is received and applied, during a copy": (bounds(), replace(REST, copying=True), False),
    "stopped during a copy": (bounds("stop"), replace(FOLLOWING, copying=True, level=False), True),
}


@pytest.mark.parametrize(("until", "now", "ends"), ENDS.values(), ids=ENDS.keys())
def test_sync_ends_when_one_of_its_limits_is_reached(until: Bounds, now: Situation, ends: bool) -> None:
    assert finished(until, now) == ends


def test_another_point_is_due_until_a_point_lists_every_table() -> None:
    point = PointDue(False)
    assert not point.at(Lsn(5))
    point.mark_due()
    assert point.at(Lsn(5))
    point.published(Lsn(5), whole=False)
    assert (point.due, point.at(Lsn(5)), point.at(Lsn(6))) == (True, False, True)
    point.mark_due()
    assert point.at(Lsn(5))
    point.published(Lsn(5), whole=True)
    assert not point.at(Lsn(6))


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


def test_lsn_range_ends_when_its_batches_reach_max_bytes() -> None:
    gathered = open_range(Clock())
    gathered.add([batch(100, 110), batch(110, 120)], [], {})
    assert not gathered.due
    gathered.add([batch(120, 130)], [], {})
    assert gathered.due


def test_lsn_range_ends_min_seconds_after_its_first_transaction() -> None:
    clock = Clock()
    gathered = open_range(clock)
    clock.now = 1000.0
    gathered.add([batch(100, 110)], [], {})
    assert not gathered.due
    clock.now = 1060.0
    assert gathered.due


def test_wal_without_transactions_starts_no_lsn_range_but_is_part_of_the_next_range() -> None:
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


def test_counts_of_two_turns_of_a_table_are_added() -> None:
    left = TableTurn(ORDERS, Lsn(1), 4, 1, 2, 3, {"insert": 1}, 0.5, 0.5)
    right = TableTurn(ORDERS, Lsn(2), 5, 10, 20, 30, {"insert": 2, "delete": 1}, 1.0, 1.0)
    assert summed(left, right) == TableTurn(ORDERS, Lsn(2), 5, 11, 22, 33, {"insert": 3, "delete": 1}, 1.5, 1.5)


def test_a_turn_applies_whole_batches_until_their_bytes_reach_the_limit_of_a_turn() -> None:
    batches = [batch(0, 1), batch(1, 2), batch(2, 3)]
    assert up_to(batches, 1) == batches[:1]
    assert up_to(batches, 20) == batches[:2]
    assert up_to(batches, 1000) == batches


def test_only_inserts_updates_deletes_and_truncates_of_batches_are_counted() -> None:
    assert rows_by_kind([batch(0, 1, transactions=3)]) == {"I": 3, "U": 0, "D": 0, "T": 0}


# A turn also searches the batches above its own end for rows of unknown partitions ------------------

ROOT = Table(100, TableName("public", "root"), (Column(1, "id", PgType(23, "int4")),), key=(1,))
UNKNOWN_LEAF = 200


@dataclass
class Progress:
    """A stand-in for :class:`TablesProgress`, with only the parts that a turn uses in this test."""

    records: dict[TableName, TableRecord]
    router: Router = field(default_factory=lambda: Router.of([ROOT]))

    def __getitem__(self, name: TableName) -> TableRecord:
        return self.records[name]

    def hold(self, name: TableName, unread: UnreadRows) -> None:
        self.records[name] = replace(self.records[name], unread=unread)

    def moved(self, name: TableName, lsn: Lsn) -> None:
        self.records[name] = replace(self.records[name], replay_lsn=lsn)


def batch_of(start: int, end: int, *leaves: int) -> BatchSummary:
    partitions = {ROOT.oid: leaves} if leaves else {}
    return BatchSummary(Lsn(start), Lsn(end), 1, 1, None, None, None, {}, {}, 0, {}, (), partitions)


@pytest.mark.parametrize(
    ("stray_batch", "held"),
    [(1, True), (2, True), (None, False)],
    ids=["rows in the turn's batch", "rows in a later batch", "no such rows"],
)
def test_a_table_waits_for_a_catalog_check_if_the_log_has_rows_of_an_unknown_partition(
    stray_batch: int | None, held: bool
) -> None:
    """Such rows, even in a batch above the turn's end, show that a partition was attached. The partition may have been
    attached below the turn's end, with older rows that are not in the stream. So the turn applies nothing to the
    table."""
    batches = [batch_of(number * 16, number * 16 + 16, *([UNKNOWN_LEAF] if number == stray_batch else []))
               for number in (1, 2)]  # fmt: skip
    log = cast(ChangeLog, SimpleNamespace(batches=lambda start: [one for one in batches if one.end > start]))
    progress = Progress({ROOT.name: TableRecord(ROOT, TableState.STREAMING, Lsn(16))})
    work: Any = SimpleNamespace(progress=progress, observer=Silent())
    take_turn(cast(Work, work), LogSpan(log, LsnRange(Lsn(16), Lsn(48))), Lsn(32), [*progress.records.values()])
    record = progress[ROOT.name]
    assert (record.replay_lsn, record.unread is not None) == ((Lsn(16), True) if held else (Lsn(32), False))
    assert record.unread is None or record.unread.how is Strange.PARTITION
