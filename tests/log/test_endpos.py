"""Tests the case table of endpos (docs/explanation/lsns.md) on a real server: where a run ends, and that the next run
loses nothing. The endpos of a run is called its goal here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.reader import ChangeLog
from tests.log.conftest import Source, batch_ends, content, in_each_place, rows, until_event

pytestmark = in_each_place


@dataclass
class Stream:
    """Three transactions in the source. A second log (``scout``) has already received them, so that the test knows
    their LSNs."""

    source: Source
    log: ChangeLog
    """The tested log. It has received nothing yet."""
    scout: ChangeLog
    """A log that has received all three transactions."""
    commits: list[tuple[Lsn, Lsn]]
    """The commit_lsn and end_lsn of each transaction."""

    def finish(self) -> None:
        """Receives the remaining transactions into ``log``, in another run. Then ``log`` must have the same content as
        ``scout``."""
        self.source.receive(self.log, self.source.lsn())
        assert content(self.log) == content(self.scout)


@pytest.fixture
def stream(source: Source) -> Stream:
    log, scout = source.log(), source.log("scout")
    for number in range(3):
        source.transaction(*(f"INSERT INTO a VALUES ({number * 10 + row}, 'x')" for row in range(3)))
        source.run("INSERT INTO foreign_table VALUES (1, 'between')")
    source.receive(scout, source.lsn())
    commits = [(Lsn(row["commit_lsn"]), Lsn(row["lsn"])) for row in rows(scout, "kind = 'C'")]
    assert len(commits) == 3
    return Stream(source, log, scout, commits)


def _transactions(log: ChangeLog) -> int:
    return len(rows(log, "kind = 'C'"))


GOALS: dict[str, tuple[Callable[[Stream], Lsn], int]] = {
    "on a commit boundary": (lambda stream: stream.commits[1][1], 2),
    "between transactions": (lambda stream: Lsn(stream.commits[0][1] + 8), 1),
    "at the start of a commit record": (lambda stream: stream.commits[1][0], 1),
    "inside a commit record": (lambda stream: Lsn(stream.commits[1][0] + 8), 1),
    "inside a transaction": (lambda stream: Lsn(rows(stream.scout, "kind = 'I'")[4]["lsn"]), 1),
}
"""For each case: the goal, and the number of transactions that end at or below the goal."""


@pytest.mark.parametrize(("goal", "transactions"), GOALS.values(), ids=GOALS)
def test_run_stores_transactions_that_end_at_or_below_its_goal(
    stream: Stream, goal: Callable[[Stream], Lsn], transactions: int
) -> None:
    at, (commit_lsn, end_lsn) = goal(stream), stream.commits[1]
    assert stream.commits[0][1] < at <= end_lsn
    stream.source.receive(stream.log, at)
    assert stream.log.position() <= at
    assert not commit_lsn < stream.log.position() < end_lsn
    if at in (commit_lsn, end_lsn):
        assert stream.log.position() == at
    assert _transactions(stream.log) == transactions
    stream.finish()


def test_goal_in_wal_without_published_changes_is_reached(source: Source) -> None:
    log = source.log()
    source.run("INSERT INTO foreign_table SELECT g, 'x' FROM generate_series(1, 1000) g")
    goal = source.lsn()
    source.run("INSERT INTO foreign_table SELECT g, 'x' FROM generate_series(1, 1000) g")
    before = log.position()
    source.receive(log, goal)
    assert before <= log.position() <= goal
    assert not log.batches(log.start)


def test_goal_at_an_unflushed_position_of_an_idle_source_is_reached(source: Source) -> None:
    """The WAL of an asynchronous commit is inserted but not flushed, and no other traffic flushes it."""
    log = source.log()
    source.run("SET synchronous_commit = off", "INSERT INTO a VALUES (1, 'x')")
    goal = source.lsn()
    source.receive(log, goal)
    assert _transactions(log) == 1


def test_goal_above_a_wal_page_header_is_reached(source: Source) -> None:
    """After a WAL switch, the insert position is above the page header of the next WAL segment. No record follows this
    header yet."""
    log = source.log()
    source.run("INSERT INTO a VALUES (1, 'x')", "SELECT pg_switch_wal()")
    goal = source.lsn()
    started = time.monotonic()
    source.receive(log, goal)
    assert time.monotonic() - started < 10
    assert _transactions(log) == 1
    assert log.position() <= goal


def test_goal_is_reached_while_an_idle_transaction_is_open(source: Source) -> None:
    log = source.log()
    with source.database.connect() as other:
        other.execute("BEGIN")
        other.execute("INSERT INTO a VALUES (1, 'open')")
        source.run("INSERT INTO a VALUES (2, 'x')")
        source.receive(log, source.lsn())
        assert _transactions(log) == 1
        other.execute("COMMIT")
    source.receive(log, source.lsn())
    assert _transactions(log) == 2


def test_run_with_a_goal_below_the_end_of_the_log_receives_nothing(stream: Stream) -> None:
    stream.source.receive(stream.log, stream.source.lsn())
    position, version = stream.log.position(), len(rows(stream.log))
    events = stream.source.receive(stream.log, stream.commits[0][1])
    assert events[-1].lsn == stream.log.position() == position
    assert len(rows(stream.log)) == version


@pytest.mark.long
def test_receiver_waits_until_the_wal_of_the_source_reaches_the_goal(source: Source) -> None:
    log = source.log()
    goal = Lsn(source.lsn() + (1 << 20))
    receiver = source.receiver(log)
    receiver.until(goal)
    until_event(receiver, "started")
    source.run("INSERT INTO a VALUES (1, 'x')")
    until_event(receiver, "batch")
    # The run must not end during this sleep, because the goal is in WAL that does not exist yet. If the goal were in
    # existing WAL, the run would end during the sleep: it would wait at most for three times wal_writer_delay (50 ms
    # here).
    time.sleep(0.8)
    assert not any(event.name == "arrived" for event in receiver.events(0))
    source.run("INSERT INTO foreign_table SELECT g, repeat('x', 100) FROM generate_series(1, 10000) g")
    assert source.lsn() > goal
    until_event(receiver, "arrived")
    assert log.position() <= goal


def test_any_lsn_may_be_a_goal_and_a_second_run_to_the_same_goal_stores_nothing(stream: Stream) -> None:
    """The goals are LSNs of random bytes in the WAL."""
    (first, _), (_, last) = stream.commits[0], stream.commits[-1]
    chance = random.Random(5)
    for goal in sorted(Lsn(chance.randrange(first - 200, last + 200)) for _ in range(3)):
        stream.source.receive(stream.log, goal)
        position, taken = stream.log.position(), content(stream.log)
        assert position <= goal
        assert taken == [row for row in content(stream.scout) if _end(stream, row[0]) <= goal]
        events = stream.source.receive(stream.log, goal)
        assert events[-1].lsn == stream.log.position()
        assert position <= stream.log.position() <= goal
        assert content(stream.log) == taken
        assert len(stream.log.batches(stream.log.start)) == len(set(batch_ends(stream.log)))
    stream.finish()


def _end(stream: Stream, commit_lsn: int) -> Lsn:
    return dict(stream.commits)[Lsn(commit_lsn)]
