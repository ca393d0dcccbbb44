"""A bounded sync does not end before it has copied every table that it can copy."""

from __future__ import annotations

from itertools import count

import pytest

from pgcdc_assets.cli.sync import _code
from pgcdc_assets.flow.reports import Silent
from tests.flow.rig import Rig, T, newest

pytestmark = [pytest.mark.spark, pytest.mark.long]


class Rewriting(Silent):
    """Rewrites the table up to ``times`` times, each time after the receiver has reached the goal of the sync, so that
    a copy cannot catch up with the same goal."""

    def __init__(self, rig: Rig, times: int) -> None:
        super().__init__()
        self._rig = rig
        self._times = times
        self._numbers = count()

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        if message.startswith("copying"):
            # This change causes a turn with a point. The catalog is checked before the point.
            self._rig.conn.execute("INSERT INTO u SELECT max(a) + 1, 0 FROM u")
        if message.startswith("the log is complete to") and (number := next(self._numbers)) < self._times:
            self._rig.conn.execute(f"ALTER TABLE t ADD r{number} float DEFAULT random()".encode())


@pytest.fixture
def rewritten(rig: Rig) -> Rig:
    rig.setup()
    rig.sync()
    rig.conn.execute("INSERT INTO t VALUES (1000, 'new', NULL)")
    return rig


def test_sync_copies_a_table_that_was_rewritten_after_the_goal_was_reached(rewritten: Rig) -> None:
    rewritten.observer = Rewriting(rewritten, 1)
    report = rewritten.sync()
    assert [copy.table for copy in report.copied] == [T]
    assert (report.left, _code(report)) == ([], 0)
    assert newest(rewritten).replay_lsn == report.end
    rewritten.assert_equal()
