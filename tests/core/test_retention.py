"""The rule of the log's cut, for any files, consumers and ages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.retention import GRACE, LogFile, log_cut, oldest_kept

NOW = datetime(2026, 1, 31, tzinfo=UTC)
START = Lsn(100)

ends = st.integers(101, 140).map(Lsn)
times = st.integers(0, 48).map(lambda hours: NOW - timedelta(hours=hours))
spans = st.tuples(ends, ends).map(lambda pair: (min(pair), max(pair)))
files = st.lists(st.builds(lambda span, at: LogFile(span[0], span[1], at), spans, times), max_size=12)
positions = st.lists(st.integers(100, 145).map(Lsn), max_size=5)


@given(files, positions, times)
def test_the_cut_takes_whole_batches_nobody_needs(held: list[LogFile], needed: list[Lsn], oldest: datetime) -> None:
    cut = log_cut(held, START, needed, oldest)
    assert cut >= START
    gone = [file for file in held if file.last_end <= cut]
    assert all(file.last_end <= lsn for file in gone for lsn in needed)
    assert all(file.written <= oldest for file in gone)
    # No file holds rows of a batch below the cut and of one above it.
    assert not [file for file in held if file.first_end <= cut < file.last_end]
    assert cut == START or cut in {file.last_end for file in gone}


@given(files, positions, times)
def test_the_cut_is_the_highest_that_is_allowed(held: list[LogFile], needed: list[Lsn], oldest: datetime) -> None:
    def allowed(cut: Lsn) -> bool:
        gone = [file for file in held if file.first_end <= cut]
        return all(file.last_end <= min([cut, *needed]) and file.written <= oldest for file in gone)

    candidates = [file.last_end for file in held if allowed(file.last_end)]
    assert log_cut(held, START, needed, oldest) == max([START, *candidates])


@given(st.timedeltas(timedelta(0), timedelta(days=4000)))
def test_no_setting_lets_the_youngest_go(retention: timedelta) -> None:
    assert oldest_kept(NOW, retention) <= NOW - GRACE
    assert oldest_kept(NOW, retention) <= NOW - retention


def test_without_a_consumer_age_alone_decides() -> None:
    held = [LogFile(Lsn(110), Lsn(120), NOW - timedelta(days=2)), LogFile(Lsn(130), Lsn(130), NOW)]
    assert log_cut(held, START, [], NOW - timedelta(days=1)) == 120
    assert log_cut(held, START, [], NOW) == 130
    assert log_cut(held, START, [Lsn(119)], NOW) == START
