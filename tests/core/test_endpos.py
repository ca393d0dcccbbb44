from __future__ import annotations

from pgcdc_assets.core.endpos import DELAYS_UNTIL_FLUSHED, Endpos
from pgcdc_assets.core.lsn import Lsn

GOAL = Lsn(1000)
DELAY = 0.2


def test_a_begin_at_or_past_the_goal_ends_the_run() -> None:
    goal = Endpos(GOAL, wal_writer_delay=DELAY)
    assert not goal.arrived_at_begin(999)
    assert goal.arrived_at_begin(1000)


def test_boundary_past_the_goal_is_not_allowed() -> None:
    goal = Endpos(GOAL, wal_writer_delay=DELAY)
    assert goal.allows(1000)
    assert not goal.allows(1001)


def test_a_keepalive_below_the_goal_counts_only_from_a_late_flush() -> None:
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


def test_a_goal_beyond_the_source_has_no_late_flush() -> None:
    goal = Endpos(GOAL, wal_writer_delay=DELAY)
    for now in range(100):
        goal.saw_source(inserted=Lsn(999), flushed=Lsn(999), now=float(now))
    assert not goal.arrived_at_wal_end(999)
    goal.saw_source(inserted=Lsn(1001), flushed=Lsn(999), now=100.0)
    goal.saw_source(inserted=Lsn(1001), flushed=Lsn(998), now=200.0)
    assert goal.arrived_at_wal_end(998)
