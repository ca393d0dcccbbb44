from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.positions import DELAYS_UNTIL_FLUSHED, Endpos, ReportedPositions

GOAL = Lsn(1000)
DELAY = 0.2
_LSNS = st.integers(0, 1 << 40).map(Lsn)


def test_begin_message_at_or_above_the_goal_ends_the_receiver() -> None:
    goal = Endpos(GOAL, wal_writer_delay=DELAY)
    assert not goal.arrived_at_begin(999)
    assert goal.arrived_at_begin(1000)


def test_commit_boundary_above_the_goal_is_not_allowed() -> None:
    goal = Endpos(GOAL, wal_writer_delay=DELAY)
    assert goal.allows(1000)
    assert not goal.allows(1001)


def test_keepalive_below_the_goal_ends_the_receiver_only_if_the_source_flushes_late() -> None:
    goal = Endpos(GOAL, wal_writer_delay=DELAY)
    assert goal.arrived_at_wal_end(1000)
    goal.saw_source(inserted=GOAL, flushed=Lsn(900), now=10.0)
    goal.saw_source(inserted=GOAL, flushed=Lsn(900), now=10.0 + DELAYS_UNTIL_FLUSHED * DELAY)
    assert not goal.arrived_at_wal_end(999)
    assert goal.flush_wanted
    goal.saw_source(inserted=GOAL, flushed=Lsn(950), now=10.1 + DELAYS_UNTIL_FLUSHED * DELAY)
    assert not goal.flush_wanted
    assert not goal.arrived_at_wal_end(949)
    assert goal.arrived_at_wal_end(950)


def test_goal_above_the_inserted_wal_is_not_a_late_flush() -> None:
    goal = Endpos(GOAL, wal_writer_delay=DELAY)
    for now in range(100):
        goal.saw_source(inserted=Lsn(999), flushed=Lsn(999), now=float(now))
    assert not goal.arrived_at_wal_end(999)
    goal.saw_source(inserted=Lsn(1001), flushed=Lsn(999), now=100.0)
    goal.saw_source(inserted=Lsn(1001), flushed=Lsn(998), now=200.0)
    assert goal.arrived_at_wal_end(998)


@given(_LSNS, st.lists(st.tuples(st.sampled_from(["received", "durable", "applied"]), _LSNS)))
def test_reported_positions_never_fall(floor: Lsn, steps: list[tuple[str, Lsn]]) -> None:
    progress = ReportedPositions(floor)
    before = (floor, floor, floor)
    for name, lsn in steps:
        getattr(progress, name)(lsn)
        now = (progress.write, progress.flush, progress.apply)
        assert all(new >= old for new, old in zip(now, before, strict=True))
        assert progress.apply <= progress.flush <= progress.write
        before = now
    durable = max([floor, *(lsn for name, lsn in steps if name == "durable")])
    assert progress.flush == durable


def test_received_position_is_not_reported_as_flushed() -> None:
    progress = ReportedPositions(Lsn(10))
    assert progress.received(Lsn(50)) == 50
    assert progress.flush == 10
    assert progress.applied(Lsn(40)) == 10
    assert progress.durable(Lsn(45)) == 45
    assert progress.apply == 40
