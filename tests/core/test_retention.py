"""Which parts of the change log, and which consistent points, retention deletes.

The cut is the LSN below which batches of the change log are deleted. A consumer is a table that still needs batches
above an LSN. The cut is tested with random files, consumers and ages.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.retention import EVERY_POINT, GRACE, LADDER, LogFile, log_cut, oldest_kept, sparse

NOW = datetime(2026, 1, 31, tzinfo=UTC)
START = Lsn(100)

ends = st.integers(101, 140).map(Lsn)
times = st.integers(0, 48).map(lambda hours: NOW - timedelta(hours=hours))
spans = st.tuples(ends, ends).map(lambda pair: (min(pair), max(pair)))
files = st.lists(st.builds(lambda span, at: LogFile(span[0], span[1], at), spans, times), max_size=12)
positions = st.lists(st.integers(100, 145).map(Lsn), max_size=5)


@given(files, positions, times)
def test_cut_removes_only_whole_batches_that_no_consumer_needs(
    held: list[LogFile], needed: list[Lsn], oldest: datetime
) -> None:
    cut = log_cut(held, START, needed, oldest)
    assert cut >= START
    gone = [file for file in held if file.last_end <= cut]
    assert all(file.last_end <= lsn for file in gone for lsn in needed)
    assert all(file.written <= oldest for file in gone)
    # No file holds rows of batches on both sides of the cut.
    assert not [file for file in held if file.first_end <= cut < file.last_end]
    assert cut == START or cut in {file.last_end for file in gone}


@given(files, positions, times)
def test_cut_is_the_highest_allowed_lsn(held: list[LogFile], needed: list[Lsn], oldest: datetime) -> None:
    def allowed(cut: Lsn) -> bool:
        gone = [file for file in held if file.first_end <= cut]
        return all(file.last_end <= min([cut, *needed]) and file.written <= oldest for file in gone)

    candidates = [file.last_end for file in held if allowed(file.last_end)]
    assert log_cut(held, START, needed, oldest) == max([START, *candidates])


@given(st.timedeltas(timedelta(0), timedelta(days=4000)))
def test_log_files_younger_than_the_grace_period_are_kept_with_any_retention(retention: timedelta) -> None:
    assert oldest_kept(NOW, retention) <= NOW - GRACE
    assert oldest_kept(NOW, retention) <= NOW - retention


def test_cut_without_consumers_depends_only_on_the_age_of_the_files() -> None:
    held = [LogFile(Lsn(110), Lsn(120), NOW - timedelta(days=2)), LogFile(Lsn(130), Lsn(130), NOW)]
    assert log_cut(held, START, [], NOW - timedelta(days=1)) == 120
    assert log_cut(held, START, [], NOW) == 130
    assert log_cut(held, START, [Lsn(119)], NOW) == START


def test_old_log_file_is_kept_if_a_young_file_has_rows_of_the_same_batch() -> None:
    old = NOW - timedelta(days=2)
    held = [LogFile(Lsn(101), Lsn(110), old), LogFile(Lsn(105), Lsn(108), old), LogFile(Lsn(110), Lsn(120), NOW)]
    assert log_cut(held, START, [], NOW - timedelta(days=1)) == START


MINUTE = 60_000_000
"""One minute in microseconds."""
ages = st.lists(st.integers(0, 5 * 24 * 60), max_size=300, unique=True).map(lambda found: sorted(found, reverse=True))


def left(times: list[int], now: int) -> list[int]:
    held = np.array(times, np.int64)
    return list(held[sparse(held, None, now)]) if times else []


@given(ages, st.integers(0, 3 * 24 * 60))
def test_points_are_thinned_out_with_age(minutes: list[int], later: int) -> None:
    """Thinning keeps all young points. Of the older points, it keeps the newest point of each interval. Thinning once
    or several times has the same result."""
    now = 10**15
    times = [now - minute * MINUTE for minute in minutes]
    kept = left(times, now)
    assert [time for time in times if now - time <= 60 * MINUTE] == [time for time in kept if now - time <= 60 * MINUTE]
    assert kept[-1:] == times[-1:]
    for time in times:
        span = 0 if now - time <= 60 * MINUTE else 10 * MINUTE if now - time <= 24 * 60 * MINUTE else 60 * MINUTE
        near = [other for other in kept if time <= other <= time + span]
        assert near, "nothing near is left of it"
    for step in (10, 60):
        age = 24 * 60 if step == 60 else 60
        old = [time // (step * MINUTE) for time in kept if now - time > (age + step) * MINUTE]
        assert len(old) == len(set(old))
    after = now + later * MINUTE
    assert left(kept, after) == left(times, after)


def test_points_in_several_files_are_thinned_out_like_points_in_one_file() -> None:
    now = 10**15
    times = np.arange(now - 7 * 3600 * 10**6, now, 10**6, dtype=np.int64)
    whole = list(times[sparse(times, None, now)])
    halves = [times[:9_000], times[9_000:]]
    parts = [*halves[0][sparse(halves[0], int(halves[1][0]), now)], *halves[1][sparse(halves[1], None, now)]]
    assert parts == whole
    assert 3600 + 6 * 6 <= len(whole) <= 3600 + 6 * 6 + 1


def test_each_interval_between_points_is_a_multiple_of_the_next_shorter_one() -> None:
    """For example, an hour consists of whole ten-minute intervals. The newest point of an hour is therefore also the
    newest point of a ten-minute interval, and thinning in one step or in two steps keeps the same points."""
    assert [age for age, _ in LADDER] == sorted((age for age, _ in LADDER), reverse=True)
    assert LADDER[-1][0] == EVERY_POINT >= GRACE
    for (_, longer), (_, shorter) in pairwise(LADDER):
        assert longer % shorter == timedelta(0)
