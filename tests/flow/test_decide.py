"""Tables of cases: the next step of a sync, and when a sync ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
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
)
from pgcdc_assets.log.summary import BatchSummary

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
    "all is level": (view(LEVEL), Wait()),
    "a point is due": (view(LEVEL, point=PointDue(True)), turn(50, A, B)),
    "it could not list every table here": (view(LEVEL, point=PointDue(True, Lsn(50))), Wait()),
    "nor at an earlier place": (view(LEVEL, point=PointDue(True, Lsn(40))), turn(50, A, B)),
    "a table is behind, by more than a share": (view(BEHIND), turn(40, A, B)),
    "and the rest": (view([TablePosition(A, Lsn(40)), TablePosition(B, Lsn(50))]), turn(50, A, B)),
    "less than a turn is worth while more comes": (view(BEHIND, gathers=True), Wait()),
    "unless a point is due": (view(BEHIND, gathers=True, point=PointDue(True)), turn(40, A, B)),
    "as much as a turn is worth": (
        view(BEHIND, gathers=True, batches=lambda a, b: [replace(log(a, b)[0], bytes=GATHERED_BYTES)]), turn(50, A, B),
    ),
    "verify is about to name its LSN": (view(BEHIND, held=True), Wait()),
    "an operator has paused it": (view(BEHIND, paused=True, point=PointDue(True)), Wait()),
    "also where verify waits": (view(BEHIND, paused=True, exact=Lsn(50)), Wait()),
    "its LSN lies ahead": (view(LEVEL, exact=Lsn(60)), Wait()),
    "its LSN is where all stand": (view(LEVEL, exact=Lsn(50)), turn(50, A, B, exact=True)),
    "its LSN lies before the log's end": (view([TablePosition(A, Lsn(20))], exact=Lsn(30)), turn(30, A, exact=True)),
    "its LSN is nearer than more comes": (view(BEHIND, gathers=True, exact=Lsn(60)), turn(40, A, B)),
    "a late copy first, two shares of it": (view(LATE, complete=Lsn(90)), TakeLateTurn([A], Lsn(40))),
    "then the others without it": (view(LATE, complete=Lsn(90), caught_up=True), turn(60, B)),
    "late ones join where verify waits": (view(LATE, exact=Lsn(50)), turn(30, A, B)),
    "a share of many batches": (view([TablePosition(A, Lsn(0))], complete=Lsn(90), share_bytes=240), turn(40, A)),
    "every table is late": (
        view([TablePosition(A, Lsn(10), late=True)], complete=Lsn(90)), TakeLateTurn([A], Lsn(50)),
    ),
    "and has had its turn": (view([TablePosition(A, Lsn(10), late=True)], complete=Lsn(90), caught_up=True), Wait()),
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
    "arrived and level": (bounds(), REST, True),
    "not level": (bounds(), replace(REST, level=False), False),
    "not arrived": (bounds(), replace(REST, arrived=False), False),
    "follows": (bounds(), FOLLOWING, False),
    "follows for so long": (bounds(max_seconds=10), FOLLOWING, True),
    "not yet so long": (bounds(max_seconds=11), FOLLOWING, False),
    "idle for so long": (bounds(idle_seconds=5), FOLLOWING, True),
    "gives way": (bounds(), replace(FOLLOWING, awaited=True), True),
    "but not while it copies": (bounds(max_seconds=1), replace(FOLLOWING, awaited=True, copying=True), False),
    "arrived, but it copies": (bounds(), replace(REST, copying=True), False),
    "stopped, whatever it does": (bounds("stop"), replace(FOLLOWING, copying=True, level=False), True),
}


@pytest.mark.parametrize(("until", "now", "ends"), ENDS.values(), ids=ENDS.keys())
def test_sync_ends_when_one_of_its_limits_is_reached(until: Bounds, now: Situation, ends: bool) -> None:
    assert finished(until, now) == ends


def test_point_is_due_until_a_point_lists_every_table() -> None:
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
