"""Power cuts in a history: each of its runs loses the power at some moment, and the next goes on with what is left.

What is left has lost any part of what was not synced. What a run has told, and what was published before, must all
be there, and every point reads right, or says in words that it cannot be read before the next run.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError, UnknownTable
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.lake import Lake
from pgcdc_assets.log.reader import ChangeLog
from tests.history.driver import Project, beside_it
from tests.history.tables import Spec
from tests.journal import published
from tests.oracle import RAW, written
from tests.power.images import Image, told
from tests.power.outages import Outages

AGAIN = 0.3
"""How often the power goes in the recovering run too, and how often a maintenance follows a run."""
PATIENCE = 5.0
"""How long a recovering run may go on beside open transactions."""
Points = list[tuple[int, dict[str, int]]]


@dataclass
class Cuts:
    power: Outages
    read: int = 0
    """Tables of points that were read as a cut left them."""

    def during(self, at: Project, act: Callable[[], Any]) -> None:
        """Run it, lose the power in it or right after it, and recover."""
        before = published(at.lake)
        image = self._cut(at, act)
        try:
            self._read_as_left(at)
            if self.power.chance.random() < AGAIN:
                again = self._cut(at, lambda: _sync(at))
                image.lost += ["in the recovering run:", *again.lost]
                self._read_as_left(at)
            _sync(at)
            now = published(at.lake)
            assert now[: len(before)] == before, "points were lost, or are others"
            _assert_told(at, now)
        except BaseException as error:
            error.add_note(told(image.lost))
            raise

    def _cut(self, at: Project, act: Callable[[], Any]) -> Image:
        def run() -> None:
            act()
            if self.power.chance.random() < AGAIN:
                at.engine().maintain(Allowance())

        image = self.power.cut(run)
        at.workload.release()
        return image

    def _read_as_left(self, at: Project) -> None:
        """What can be read is right: the newest points, and some other one."""
        try:
            points = [int(point.replay_lsn) for point in Lake(at.lake)._points.all()]
        except LakeError:
            return
        commits = at.journal.commits()
        for lsn in {*points[-2:], *self.power.chance.sample(points, min(1, len(points)))}:
            for spec in at.specs:
                # A table may come only with a later point of the same LSN.
                with suppress(LakeError, UnknownTable):
                    _assert_rows(at, lsn, spec, commits)
                    self.read += 1


def _sync(at: Project) -> None:
    """A copy that is made again waits for the transactions that are open: then they end."""
    ended = threading.Event()

    def run() -> None:
        try:
            at.sync()
        finally:
            ended.set()

    def act() -> None:
        if not ended.wait(PATIENCE):
            at.workload.finish(random.Random(0))

    beside_it(run, act)


def _assert_told(at: Project, points: Points) -> None:
    """What a run has told to be in the mirrors is there: whoever was told relies on it. All tables are listed.

    A range may end in transactions that change no table, as one of a message alone: those ask for no point.
    """
    assert points, "nothing is published"
    assert set(points[-1][1]) == {spec.title for spec in at.specs}
    newest = Lsn(points[-1][0])
    told = max((report.span.end for report in at.observer.ranges), default=newest)
    changes = [batch for batch in ChangeLog(at.settings.layout).open().batches(newest, told) if batch.counts]
    assert not any(newest < batch.end <= told for batch in changes), f"told {told}, but the newest point is {newest}"


def _assert_rows(at: Project, lsn: int, spec: Spec, commits: dict[int, str]) -> None:
    """By the way that users read, which compares what the point says."""
    data = Lake(at.lake).at(lsn).arrow(TableName(spec.schema, spec.name))
    columns, expected = at.journal.rows_at(spec.title, lsn, commits)
    misfits = [dict(entry or ()) for entry in data[RAW].to_pylist()]
    found = Counter(zip(*(written(column, data[column], misfits) for column in columns), strict=True))
    assert found == expected, f"{spec.title} at {Lsn(lsn)}: missing {expected - found}, too many {found - expected}"
