"""LSNs, LSN ranges, the endpos at which a run must stop, and the LSNs that are reported to the source."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import DELAYS_UNTIL_FLUSHED, Endpos, Lsn, LsnRange, ReportedPositions, merged
from pgcdc_assets.errors import BadRange, RangeGap


@given(st.integers(0, (1 << 64) - 1))
def test_lsn_is_unchanged_after_a_text_round_trip(value: int) -> None:
    lsn = Lsn(value)
    assert Lsn.parse(str(lsn)) == lsn == value
    assert int(f"{lsn:012X}", 16) == value


def test_lsn_is_written_as_postgres_writes_it() -> None:
    assert str(Lsn.parse("16/b374d848")) == "16/B374D848"
    assert f"{Lsn(0x16B374D848)}" == "16/B374D848"
    assert str(Lsn(0)) == "0/0"


@pytest.mark.parametrize("text", ["", "0", "0/", "/0", "x/1", "0/123456789", "0/0/0", "-1/0"])
def test_text_that_is_not_an_lsn_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        Lsn.parse(text)


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_number_that_is_not_an_lsn_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        Lsn(value)


_POINTS = st.lists(st.integers(0, (1 << 64) - 1).map(Lsn), min_size=2, max_size=8, unique=True).map(sorted)


def _chain(points: list[Lsn]) -> list[LsnRange]:
    return [LsnRange(start, end) for start, end in itertools.pairwise(points)]


@given(_POINTS)
def test_lsn_range_is_unchanged_after_a_round_trip_as_partition_key_or_text(points: list[Lsn]) -> None:
    span = LsnRange(points[0], points[-1])
    assert LsnRange.from_key(span.key) == LsnRange.parse(span.key) == LsnRange.parse(str(span)) == span


@given(st.lists(st.integers(0, (1 << 48) - 1).map(Lsn), min_size=3, max_size=8, unique=True).map(sorted))
def test_partition_keys_sort_like_their_lsn_ranges(points: list[Lsn]) -> None:
    """An LSN in a key has 12 hexadecimal digits. So keys sort like their ranges only below LSN 2^48, which is 256 TiB
    of WAL."""
    keys = [span.key for span in _chain(points)]
    assert keys == sorted(keys)


@given(_POINTS, st.randoms())
def test_contiguous_lsn_ranges_merge_in_any_order(points: list[Lsn], chance: object) -> None:
    chain = _chain(points)
    chance.shuffle(chain)  # type: ignore[attr-defined]
    assert merged(chain) == LsnRange(points[0], points[-1])


@given(_POINTS, st.integers(0, (1 << 64) - 1))
def test_a_commit_belongs_to_exactly_one_lsn_range(points: list[Lsn], commit_lsn: int) -> None:
    holders = [span for span in _chain(points) if span.holds_commit(commit_lsn)]
    assert len(holders) == (points[0] <= commit_lsn < points[-1])


def test_commit_record_that_starts_at_a_boundary_belongs_to_the_next_range() -> None:
    """If the slot's ``confirmed_flush_lsn`` is this boundary, the server sends the transaction again. So the range that
    ends at the boundary must not contain the transaction."""
    before, after = LsnRange(Lsn(10), Lsn(20)), LsnRange(Lsn(20), Lsn(30))
    assert not before.holds_commit(20)
    assert after.holds_commit(20)


def test_empty_lsn_range_contains_no_commit() -> None:
    assert not LsnRange(Lsn(10), Lsn(10)).holds_commit(10)


def test_merging_lsn_ranges_with_a_gap_is_an_error_that_names_the_gap() -> None:
    with pytest.raises(RangeGap, match=r"0/3\.\.0/4 does not begin where 0/1\.\.0/2 ends") as gap:
        merged([LsnRange(Lsn(3), Lsn(4)), LsnRange(Lsn(1), Lsn(2))])
    assert gap.value.lsn == 2
    with pytest.raises(BadRange):
        merged([])


@pytest.mark.parametrize("text", ["", "0/2..0/1", "0/1..", "0-1", "0000015D3F88-0000015D3F8", "0/1..x"])
def test_text_that_is_not_an_lsn_range_is_refused(text: str) -> None:
    with pytest.raises(BadRange):
        LsnRange.parse(text)


GOAL = Lsn(1000)
DELAY = 0.2
_LSNS = st.integers(0, 1 << 40).map(Lsn)


def test_begin_message_at_or_above_the_endpos_ends_the_run() -> None:
    goal = Endpos(GOAL, wal_writer_delay=DELAY)
    assert not goal.arrived_at_begin(999)
    assert goal.arrived_at_begin(1000)


def test_run_must_not_end_at_a_commit_boundary_above_its_endpos() -> None:
    goal = Endpos(GOAL, wal_writer_delay=DELAY)
    assert goal.allows(1000)
    assert not goal.allows(1001)


def test_keepalive_below_the_endpos_ends_the_run_if_the_source_flushes_the_endpos_too_late() -> None:
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


def test_run_does_not_end_below_the_endpos_before_the_source_has_inserted_the_endpos() -> None:
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
