"""While a run goes on: old points and the versions between them go, so that nothing grows with the turns."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from pgcdc_assets.core import retention
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.failures import of_one_table
from pgcdc_assets.flow.work import Work

EVERY: Final = 600
"""Versions of a mirror from one thinning to the next: ten minutes' at a turn a second."""
PRUNE_SECONDS: Final = 600.0
"""From one look at all points to the next, where many tables change now and then."""


def prune_points(work: Work, now: datetime) -> int:
    """Take back the promise of the points that the retention and the ladder let go; how many."""
    span = min(work.settings.retention, retention.LONGEST_POINTS)
    followed = [entry.table.name for entry in work.progress.followed()]
    oldest = retention.oldest_kept(now, span, retention.GRACE)
    return work.progress.points.prune(oldest, followed, now)


class Thinning:
    """One run's: it remembers at which version each mirror was looked at."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._seen = {entry.table.name: entry.version for entry in work.progress}
        self._pruned = time.monotonic()

    def after_range(self, tables: Iterable[TableName]) -> None:
        """Thin those of the changed tables whose versions have come to be many since they were looked at."""
        due = [name for name in tables if self._is_due(name)]
        # Before the points are thinned: what was promised until now may be being read.
        promised = self._work.progress.points.versions(due) if due else {}
        if due or time.monotonic() - self._pruned >= PRUNE_SECONDS:
            prune_points(self._work, datetime.now(UTC))
            self._pruned = time.monotonic()
        for name in due:
            self._thin(name, promised.get(name, frozenset()))

    def _is_due(self, name: TableName) -> bool:
        """Only of a table that the newest point lists: from there on all its versions stay, for the run to settle; and
        no copy is under way, whose files nobody refers to yet."""
        progress = self._work.progress
        if name not in progress or progress[name].state is not TableState.STREAMING:
            return False
        version = progress[name].version
        before = self._seen.setdefault(name, version)
        if version // EVERY == before // EVERY:
            return False
        self._seen[name] = version
        return True

    def _thin(self, name: TableName, promised: frozenset[int]) -> None:
        """A mirror that cannot be read keeps no other from it; a turn that needs it says what is wrong."""
        work = self._work
        try:
            work.target.let_go(name, promised, retention.GRACE, lambda: True)
        except Exception as error:
            if (failure := of_one_table(error)) is None:
                raise
            work.observer.progress("maintain", f"the old versions of {name} stay: {failure}")
