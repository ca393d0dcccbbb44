"""Marks: LSNs up to which the log must be recorded, before a consistent point is published there."""

from __future__ import annotations

import pytest

from tests.log.conftest import SECONDS, Source, rows, until_event

FOREIGN = "INSERT INTO foreign_table SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g"


@pytest.mark.parametrize("goal", [True, False], ids=["goal", "no goal"])
def test_log_reaches_a_mark_if_the_server_sends_only_keepalives(source: Source, goal: bool) -> None:
    """The LSN of a snapshot is such a mark: no published change is near it, and the server is already far above it."""
    log, before = source.log(), source.run("INSERT INTO a VALUES (1, 'x')")
    mark = source.run(FOREIGN)
    source.run(FOREIGN)
    receiver = source.receiver(log)
    receiver.mark(mark)
    if goal:
        receiver.until(mark)
    until_event(receiver, "complete")
    # A consistent point could now be published at the mark.
    assert log.position() >= mark > before
    if goal:
        receiver.join(SECONDS)
        assert log.position() == mark == source.confirmed(log)
    receiver.stop()
    source.receive(log, source.run("INSERT INTO a VALUES (2, 'y')"))
    assert len(rows(log, "kind = 'I'")) == 2


def test_mark_inside_an_open_batch_closes_the_batch(source: Source) -> None:
    log, mark = source.log(), source.run("INSERT INTO a VALUES (1, 'x')")
    source.run("INSERT INTO a VALUES (2, 'y')")
    receiver = source.receiver(log, batch_seconds=3600)
    receiver.mark(mark)
    until_event(receiver, "complete")
    assert log.position() >= mark
    receiver.stop()
