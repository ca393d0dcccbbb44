"""Deletes old points, and the versions between them, during a run, so that the lake does not grow with the number of
turns."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from pgcdc_assets.core import retention
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.failures import contained
from pgcdc_assets.flow.work import Work

EVERY: Final = 600
"""A mirror is thinned after this many versions: ten minutes at one turn per second."""
PRUNE_SECONDS: Final = 600.0
"""Seconds after which points are pruned even if no mirror is due, for example if many tables change, each rarely."""


def prune_points(work: Work, now: datetime) -> int:
    """Delete the points that the retention and its ladder do not keep; returns the number of deleted points."""
    span = min(work.settings.retention, retention.LONGEST_POINTS)
    followed = [entry.table.name for entry in work.progress.followed()]
    oldest = retention.oldest_kept(now, span, retention.GRACE)
    return work.progress.points.prune(oldest, followed, now)


class Thinning:
    """The thinning of one run. It remembers the version at which each mirror was last checked."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._seen = {entry.table.name: entry.version for entry in work.progress}
        self._pruned = time.monotonic()

    def after_range(self, tables: Iterable[TableName]) -> None:
        """Thin the changed tables that have got many new versions since they were last checked."""
        due = [name for name in tables if self._is_due(name)]
        # Read before the points are pruned, because readers may still use versions that the old points promised.
        promised = self._work.progress.points.versions(due) if due else {}
        if due or time.monotonic() - self._pruned >= PRUNE_SECONDS:
            prune_points(self._work, datetime.now(UTC))
            self._pruned = time.monotonic()
        for name in due:
            self._thin(name, promised.get(name, frozenset()))

    def _is_due(self, name: TableName) -> bool:
        """Whether the table has many new versions, and the newest point lists it.

        If a point lists the table, the listed version and all newer versions stay, so the run can still make them
        durable. No copy of the table is in progress either, whose files no version names yet.
        """
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
        """Delete old versions of one mirror. If the mirror cannot be read, the other mirrors are still thinned. The
        next turn that needs the mirror reports what is wrong."""
        work = self._work
        with contained() as failed:
            work.target.let_go(name, promised, retention.GRACE, lambda: True)
        if failed.reason is not None:
            work.observer.progress("maintain", f"the old versions of {name} stay: {failed.reason}")
