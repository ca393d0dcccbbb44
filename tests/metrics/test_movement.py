"""Whether replication is *ready*: it makes progress, or has nothing to do. This depends only on LSNs, and not on
whether a connection exists."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.announcements import Announcement
from pgcdc_assets.metrics.movement import Lags, Movement, StageLag
from pgcdc_assets.metrics.readings import LakeReading, SourceReading
from pgcdc_assets.structure.record import TableState
from tests.metrics.moments import NOW, T, lake, source


@dataclass
class Scraper:
    seconds: float = 0.0
    movement: Movement = field(init=False)

    def __post_init__(self) -> None:
        self.movement = Movement(within=60, clock=lambda: self.seconds)

    def scrape(
        self, of_source: SourceReading | None, of_lake: LakeReading | None, *, after: float = 15
    ) -> tuple[Lags, list[str]]:
        self.seconds += after
        lags = self.movement.see(of_source, of_lake, NOW)
        return lags, self.movement.reasons(of_source, of_lake, lags, NOW)


@pytest.fixture
def scraper() -> Scraper:
    return Scraper()


def test_replication_of_an_idle_source_is_ready_without_any_progress(scraper: Scraper) -> None:
    for _ in range(10):
        lags, reasons = scraper.scrape(source(), lake(ago=86400))
        assert (lags.receive, lags.apply, lags.publish) == (StageLag(0, 0), StageLag(0, 0), StageLag(0, 0))
        assert reasons == []


def test_lag_in_seconds_is_zero_while_a_busy_sources_wal_is_received(scraper: Scraper) -> None:
    """Each scrape sees a few bytes that were not received yet."""
    for number in range(10):
        at = 1000 + 500 * number
        lags, reasons = scraper.scrape(source(at + 40), lake(at, at))
        assert lags.receive == StageLag(40, 0)
        assert reasons == []


def test_replication_is_not_ready_if_a_live_connection_receives_nothing(scraper: Scraper) -> None:
    """The slot is active, and the walsender answers, but no position moves."""
    scraper.scrape(source(), lake(), after=0)
    found = [scraper.scrape(source(1000 + 100 * number), lake()) for number in range(1, 8)]
    assert [bool(reasons) for _, reasons in found] == [False] * 5 + [True] * 2
    assert found[-1][0].receive == StageLag(700, 90)
    assert found[-1][1] == ["no WAL was received for 90 s, although the source has 700 more bytes of it"]


def test_replication_is_ready_while_a_backlog_is_received(scraper: Scraper) -> None:
    for number in range(10):
        lags, reasons = scraper.scrape(source(100_000), lake(1000 + number))
    assert lags.receive is not None
    assert lags.receive.seconds > 60
    assert reasons == []


def test_a_large_transaction_that_is_being_received_counts_as_progress(scraper: Scraper) -> None:
    for number in range(10):
        held = Announcement(1, 1000 * number, 5, Lsn(1000), NOW)
        _, reasons = scraper.scrape(source(100_000), lake(in_progress=held))
    assert reasons == []


def test_replication_is_not_ready_at_the_first_scrape_if_the_sync_is_dead(scraper: Scraper) -> None:
    """The process of the metrics was started after the sync had died."""
    dead = source(2000, active=False)
    lags, reasons = scraper.scrape(dead, lake(ago=7200))
    assert lags.receive == StageLag(1000, 7200)
    assert reasons == ["no WAL was received for 7200 s, although the source has 1000 more bytes of it"]


def test_lag_between_two_runs_starts_when_the_source_writes_new_wal(scraper: Scraper) -> None:
    between = source(1000, active=False)
    for _ in range(3):
        lags, _ = scraper.scrape(between, lake(ago=7200))
    assert lags.receive == StageLag(0, 0)
    lags, reasons = scraper.scrape(replace(between, flush_lsn=Lsn(1100)), lake(ago=7200))
    assert (lags.receive, reasons) == (StageLag(100, 0), [])


def test_wal_without_published_changes_counts_as_received(scraper: Scraper) -> None:
    for number in range(10):
        at = 1000 + 500 * number
        lags, reasons = scraper.scrape(source(at), lake(1000, 1000, complete=at))
        assert (lags.receive, lags.publish, reasons) == (StageLag(0, 0), StageLag(0, 0), [])


def test_replication_is_not_ready_if_a_transaction_waits_too_long_in_the_change_log(scraper: Scraper) -> None:
    waits = lake(1000, 600, pending={T: (700, 90)}, ago=500)
    lags, reasons = scraper.scrape(source(), waits)
    assert lags.publish == lags.apply == StageLag(300, 90)
    assert lags.tables == {"public.t": StageLag(300, 90), "public.u": StageLag(0, 0)}
    assert reasons == [
        "a transaction in the change log has waited for 90 s to be applied to mirrors, and no new consistent point was "
        "published"
    ]
    _, reasons = scraper.scrape(source(), replace(waits, paused=True))
    assert reasons[0].endswith("was published, because apply is paused")


def test_new_points_count_as_progress_even_while_a_table_lags(scraper: Scraper) -> None:
    for number in range(10):
        _, reasons = scraper.scrape(source(), lake(1000, 600 + number, pending={T: (700, 900)}, ago=500))
        # At the first scrape, nothing shows progress yet, because the newest point is old. Each later scrape sees a
        # newer point, which shows progress.
        assert bool(reasons) == (number == 0)
    _, reasons = Scraper().scrape(source(), lake(1000, 600, pending={T: (700, 900)}, ago=5))
    assert reasons == [], "the point is young"


def test_the_lag_of_a_table_that_catches_up_counts_for_apply_but_not_for_publish(scraper: Scraper) -> None:
    found = lake(pending={T: (700, 90)})
    late = tuple(replace(one, state=TableState.CATCHING_UP) if one.name == T else one for one in found.status.tables)
    lags, reasons = scraper.scrape(source(), replace(found, status=replace(found.status, tables=late)))
    assert (lags.apply, lags.publish, reasons) == (StageLag(300, 90), StageLag(0, 0), [])


@pytest.mark.parametrize(
    ("of_source", "of_lake", "reason"),
    [
        (replace(source(), slot=None), lake(), "the replication slot does not exist"),
        (
            source(wal_status="lost"),
            lake(),
            "the replication slot is lost, because the source removed WAL that it needs",
        ),
        (source(), lake(1000, None), "no consistent point was published yet"),
    ],
    ids=["missing slot", "lost slot", "no point"],
)
def test_without_slot_or_point_replication_is_not_ready(
    scraper: Scraper, of_source: SourceReading, of_lake: LakeReading, reason: str
) -> None:
    assert reason in scraper.scrape(of_source, of_lake)[1]


def test_lags_are_unknown_if_the_source_cannot_be_read(scraper: Scraper) -> None:
    assert scraper.scrape(None, lake())[0] == Lags()
    only = scraper.scrape(source(), None)[0]
    assert (only.receive, only.publish) == (StageLag(100, 0), None), "what was confirmed to the slot"


def test_metrics_need_bounded_memory_during_a_long_outage(scraper: Scraper) -> None:
    for number in range(5000):
        lags, _ = scraper.scrape(source(2000 + number), lake(now=NOW + timedelta(0)))
    assert len(scraper.movement._samples) <= 2001
    assert lags.receive == StageLag(5999, 15 * 4999)
