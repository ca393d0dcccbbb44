"""What is spooled of a transaction in progress is derived before its commit, and counts only after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.feed.early import Claim, EarlyFeeds
from pgcdc_assets.feed.task import Derivation, Derived
from pgcdc_assets.flow import sentinel
from pgcdc_assets.log.latefacts import SUBXID
from pgcdc_assets.log.reader import Segment
from pgcdc_assets.log.spill import SPILL
from pgcdc_assets.store.local import path_of
from tests.end_to_end.command import wait_for
from tests.fix_postgres import committed
from tests.flow.rig import Rig, T, following, newest, rig  # noqa: F401

pytestmark = pytest.mark.spark

MANY = "INSERT INTO t (id, v) SELECT n, repeat('x', 1000) FROM generate_series({}, {}) n"
SPOOLED = 18_000
"""Rows of so much fill a segment in the receiver's memory, and a little more."""


class Spy:
    """Each segment that a turn asked for, and whether it was derived early."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.taken: list[bool] = []
        self.feeds: list[EarlyFeeds] = []
        asked, landed = EarlyFeeds.claimed, Claim.landed

        def claimed(feeds: EarlyFeeds, segments: Sequence[Segment], turn: Derivation) -> list[Claim]:
            claims = asked(feeds, segments, turn)
            found = {segment.path for claim in claims for segment in claim.segments}
            self.taken += [False for one in segments if one.late is not None and one.path not in found]
            return claims

        def land(claim: Claim) -> Derived | None:
            found = landed(claim)
            self.taken += [found is not None for _ in claim.segments]
            return found

        made = EarlyFeeds.__init__

        def make(feeds: EarlyFeeds, *args: object) -> None:
            made(feeds, *args)  # type: ignore[arg-type]
            self.feeds.append(feeds)

        patch.setattr(EarlyFeeds, "claimed", claimed)
        patch.setattr(Claim, "landed", land)
        patch.setattr(EarlyFeeds, "__init__", make)

    def derived(self) -> int:
        """Segments that are derived by now."""
        groups = [group for feeds in self.feeds for group in list(feeds.groups)]
        return sum(len(group.files) for group in groups if group.future is not None and group.future.done())

    def has_derived(self, draft: str) -> bool:
        groups = [group for feeds in self.feeds for group in list(feeds.groups)]
        drafts = {file.path.text: group.future for group in groups for file in group.files.values()}
        future = drafts.get(draft)
        return future is not None and future.done()


def _of_two(spill: Path) -> str:
    """A spooled segment with rows of the transaction itself and of its savepoint; empty where there is none yet."""
    for file in spill.iterdir():
        # It may be under way.
        with suppress(OSError, pa.ArrowException):
            if pc.count_distinct(pq.read_table(file, columns=[SUBXID])[SUBXID]).as_py() == 2:
                return str(file)
    return ""


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@contextmanager
def transaction(rig: Rig, *statements: str) -> Iterator[psycopg.Connection[object]]:  # noqa: F811
    with psycopg.connect(rig.settings.source or "", autocommit=True) as conn:
        conn.execute("BEGIN")
        for statement in statements:
            conn.execute(statement.encode())
        yield conn


def _flushed(rig: Rig) -> Lsn:  # noqa: F811
    """WAL that others have written is flushed by a commit; a position within that."""
    return rig.commit("INSERT INTO u VALUES (900000, 0, 0)", "DELETE FROM u WHERE a = 900000")


def test_segments_without_rollbacks_are_taken_as_they_are(rig: Rig, spy: Spy) -> None:  # noqa: F811
    rig.setup()
    rig.sync()
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        with transaction(rig, MANY.format(10_001, 10_000 + 3 * SPOOLED)) as other:
            _flushed(rig)
            wait_for(lambda: spy.derived() >= 2, what="two segments, derived")
            feed = path_of(rig.settings.layout.changes(T))
            assert not feed.exists() or DeltaTable(feed).to_pyarrow_table().num_rows == 0
            at = committed(other)
        wait_for(lambda: newest(rig).replay_lsn >= at, what="the transaction in the mirror")
    assert sum(spy.taken) >= 2
    rig.assert_equal()


def test_a_segment_with_a_rollback_is_derived_again(rig: Rig, spy: Spy) -> None:  # noqa: F811
    rig.setup()
    rig.sync()
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        with transaction(rig, MANY.format(10_001, 10_000 + 2 * SPOOLED)) as other:
            _flushed(rig)
            # By a task of their own, so that nothing of it is rolled back.
            wait_for(lambda: spy.derived() >= 1, what="the first segments, derived")
            first = spy.derived()
            other.execute("SAVEPOINT s")
            other.execute(MANY.format(200_001, 200_000 + 3 * SPOOLED).encode())
            _flushed(rig)
            wait_for(lambda: spy.derived() >= first + 2, what="two more segments, derived")
            second = spy.derived()
            other.execute(MANY.format(400_001, 400_000 + 2 * SPOOLED).encode())
            _flushed(rig)
            # By a task of its own, of which nothing is going to be left.
            wait_for(lambda: spy.derived() > second, what="one more segment, derived")
            other.execute("ROLLBACK TO s")
            other.execute("INSERT INTO t (id, v) VALUES (-5, 'last')")
            at = committed(other)
        wait_for(lambda: newest(rig).replay_lsn >= at, what="the transaction in the mirror")
        # A segment of which nothing is left is never asked for.
        staging = path_of(rig.settings.layout.staging)
        wait_for(lambda: not list(staging.rglob("*.parquet")), what="an empty folder")
    assert True in spy.taken
    rig.assert_equal()


def test_rows_that_are_rolled_back_are_not_taken(rig: Rig, spy: Spy) -> None:  # noqa: F811
    """Of the segment that holds them, others are in the log: nothing of the task is missing there. Few come at a time,
    so that no further segment, which would be missing, is derived with it."""
    rig.setup()
    rig.sync()
    spill = path_of(rig.settings.layout.change_log / SPILL)
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        with transaction(rig, MANY.format(10_001, 10_000 + 2 * SPOOLED)) as other:
            _flushed(rig)
            wait_for(lambda: spy.derived() >= 1, what="the first segments, derived")
            other.execute("SAVEPOINT s")
            begin = 200_001
            while not (mixed := _of_two(spill)):
                other.execute(MANY.format(begin, begin + 199).encode())
                begin += 200
                _flushed(rig)
            wait_for(lambda: spy.has_derived(mixed), what="the segment with rows of both, derived")
            other.execute("ROLLBACK TO s")
            other.execute("INSERT INTO t (id, v) VALUES (-5, 'last')")
            at = committed(other)
        wait_for(lambda: newest(rig).replay_lsn >= at, what="the transaction in the mirror")
    assert set(spy.taken) == {True, False}
    rig.assert_equal()


def test_a_transaction_that_is_rolled_back_leaves_nothing(rig: Rig, spy: Spy) -> None:  # noqa: F811
    rig.setup()
    rig.sync()
    staging = path_of(rig.settings.layout.staging)
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        with transaction(rig, MANY.format(10_001, 10_000 + 2 * SPOOLED)) as other:
            _flushed(rig)
            wait_for(lambda: spy.derived() >= 1, what="a segment, derived")
            assert list(staging.rglob("*.parquet"))
            other.execute("ROLLBACK")
        at = _flushed(rig)
        wait_for(lambda: not list(staging.rglob("*.parquet")), what="an empty folder")
        wait_for(lambda: newest(rig).replay_lsn >= at, what="the next transaction")
    assert spy.taken == []
    rig.assert_equal()


def test_nothing_is_derived_for_a_run_that_is_paused(
    rig: Rig, spy: Spy, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """It may be paused for days, or to spare the machine; the turn after it derives what has come."""
    heard: list[str] = []
    for name in ("spooled", "ended"):
        monkeypatch.setattr(EarlyFeeds, name, _heard(heard, name, getattr(EarlyFeeds, name)))
    rig.setup()
    rig.sync()
    layout = rig.settings.layout
    sentinel.pause_apply(layout, paused=True)
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        with transaction(rig, MANY.format(10_001, 10_000 + 2 * SPOOLED)) as other:
            _flushed(rig)
            spill = path_of(layout.change_log / SPILL)
            wait_for(lambda: spill.is_dir() and len(list(spill.iterdir())) >= 1, what="a segment")
            committed(other)
        wait_for(lambda: "ended" in heard, what="the word of its commit")
        assert "spooled" not in heard
        sentinel.pause_apply(layout, paused=False)
        at = _flushed(rig)
        wait_for(lambda: newest(rig).replay_lsn >= at, what="the turn after the pause")
    assert set(spy.taken) == {False}
    rig.assert_equal()


def _heard(heard: list[str], name: str, do: Callable[..., None]) -> Callable[..., None]:
    def hear(*args: object) -> None:
        # A connection begins with the word that all are going to come again.
        if args[-1] is not None:
            heard.append(name)
        do(*args)

    return hear
