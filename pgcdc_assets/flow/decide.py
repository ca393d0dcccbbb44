"""Decides what a run does next, and when it ends: pure functions of what the run sees.
:class:`pgcdc_assets.flow.sync.Sync` carries it out.

A turn brings tables to one boundary, and then publishes a point there. Tables whose copy took long catch up by turns of
their own, so that they do not delay the others. ``verify`` may ask for a point at an LSN of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow.ranges import up_to
from pgcdc_assets.log.summary import BatchSummary

GATHERED_BYTES = 64 << 20
"""Bytes of messages that make a turn worth its cost while a bounded run still receives. Many small turns cost more than
a large one, and take the cores from the receiver."""
LATE_SHARE = 2
"""A turn of late copies takes this many times as much as a turn of the others, so that they catch up even in a
backlog."""

Batches = Callable[[Lsn, Lsn], Sequence[BatchSummary]]
"""The log's batches between two positions."""


@dataclass(frozen=True)
class Bounds:
    """When a run ends."""

    until: Lsn | None = None
    """Receive to here and end; None with ``follow`` False means the source's flush position."""
    follow: bool = False
    max_seconds: float | None = None
    idle_seconds: float | None = None
    receive_only: bool = False
    """Apply nothing, and copy nothing."""
    stop: threading.Event = field(default_factory=threading.Event)
    """End at the next boundary; a copy under way is given up."""
    give_way: threading.Event = field(default_factory=threading.Event)
    """End at the next boundary, but not before copies are done: another run waits in Dagster's queue."""

    @property
    def stopped(self) -> bool:
        """Whether the run is to end whatever else it could do."""
        return self.stop.is_set() or self.give_way.is_set()

    def from_now(self, seconds: float) -> Bounds:
        """The bounds of a run that goes on with this one's work, ``seconds`` after it began."""
        return self if self.max_seconds is None else replace(self, max_seconds=max(0.0, self.max_seconds - seconds))


@dataclass
class PointDue:
    """Whether the mirrors hold something that no consistent point lists yet."""

    due: bool
    refused_at: Lsn | None = None
    """The LSN of the last point, if that could not list every table: a second one there could not either."""

    def owe(self) -> None:
        """Note that something was copied or applied."""
        self.due, self.refused_at = True, None

    def published(self, lsn: Lsn, *, whole: bool) -> None:
        """Note that a point was made; ``whole`` if it lists every followed table."""
        self.due, self.refused_at = not whole, None if whole else lsn

    def at(self, lsn: Lsn) -> bool:
        """Whether a point at this LSN is worth making."""
        return self.due and self.refused_at != lsn


@dataclass(frozen=True)
class Standing:
    """A followed table: where its mirror stands, and whether its copy came later than those of the others."""

    name: TableName
    replay_lsn: Lsn
    late: bool = False


@dataclass(frozen=True)
class View:
    """What a run sees before a turn."""

    complete: Lsn
    """Every transaction that commits below it is in the log."""
    standings: Sequence[Standing]
    batches: Batches
    point: PointDue
    share_bytes: int
    """Bytes of messages that one turn takes."""
    gathers: bool = False
    """More is on its way, and nothing needs a turn now: a small turn is not worth its cost."""
    held: bool = False
    """``verify`` is about to name the LSN at which it wants a point: nothing may pass it."""
    exact: Lsn | None = None
    """The LSN at which ``verify`` wants a point."""
    caught_up: bool = False
    """Late tables have had their own turn since the last turn of the others."""
    paused: bool = False
    """Nothing is to be applied for now."""

    def behind(self, limit: Lsn) -> bool:
        return any(table.replay_lsn < limit for table in self.standings)


@dataclass(frozen=True)
class Wait:
    """There is nothing to do."""


@dataclass(frozen=True)
class TakeLateTurn:
    """A turn of late tables alone; no point."""

    tables: Sequence[TableName]
    upto: Lsn


@dataclass(frozen=True)
class TakeTurn:
    """A turn, and a point if it brought anything or one is due."""

    tables: Sequence[TableName]
    upto: Lsn
    exact: bool
    """``verify`` waits for a point here, even if no mirror changes."""


Step = Wait | TakeLateTurn | TakeTurn


def next_step(view: View) -> Step:
    """What to do now. After a TakeLateTurn the run asks again, with ``caught_up``."""
    if view.held or view.paused:
        return Wait()
    if view.exact is None:
        if not view.caught_up and _gathering(view):
            return Wait()
        if not view.behind(view.complete) and not view.point.at(view.complete):
            return Wait()
        late = [table for table in view.standings if table.late]
        if late and not view.caught_up:
            others = min((table.replay_lsn for table in view.standings if not table.late), default=view.complete)
            return TakeLateTurn(_names(late), _boundary(view, late, others, LATE_SHARE))
    tables = [table for table in view.standings if view.exact is not None or not table.late]
    limit = view.complete if view.exact is None else min(view.complete, view.exact)
    upto = _boundary(view, tables, limit, 1)
    exact = upto == view.exact
    if not exact and not any(table.replay_lsn < upto for table in tables) and not view.point.at(upto):
        return Wait()
    return TakeTurn(_names(tables), upto, exact)


def _gathering(view: View) -> bool:
    """Whether the log still holds too little for a turn."""
    if not view.gathers or view.point.due:
        return False
    return sum(batch.bytes for batch in _waiting(view, view.standings, view.complete)) < GATHERED_BYTES


def _boundary(view: View, tables: Sequence[Standing], limit: Lsn, shares: int) -> Lsn:
    """Where a turn of these tables ends: at the end of the batch that fills its share, or at ``limit``."""
    waiting = _waiting(view, tables, limit)
    taken = up_to(waiting, shares * view.share_bytes)
    return limit if len(taken) == len(waiting) else min(limit, taken[-1].end)


def _waiting(view: View, tables: Sequence[Standing], limit: Lsn) -> Sequence[BatchSummary]:
    """The batches between the lowest of these tables and ``limit``."""
    return view.batches(min((table.replay_lsn for table in tables), default=ZERO), limit)


def _names(tables: Sequence[Standing]) -> list[TableName]:
    return [table.name for table in tables]


@dataclass(frozen=True)
class Situation:
    """What decides whether a run ends."""

    running_seconds: float
    idle_seconds: float
    """Seconds since anything moved."""
    following: bool
    """The run is to follow, and no copy has failed."""
    copying: bool
    """Copies are under way. A copy that is given up begins from nothing, so the run waits for it however long it
    takes."""
    awaited: bool
    """Another command, or another run, waits for the lake."""
    arrived: bool
    """The receiver has reached its goal."""
    level: bool
    """The mirrors hold all that the log holds, and a point lists them; or nothing is to be applied."""


def finished(bounds: Bounds, now: Situation) -> bool:
    """Whether the run ends here."""
    if bounds.stop.is_set():
        return True
    if now.copying:
        return False
    if now.awaited:
        return True
    if bounds.max_seconds is not None and now.running_seconds >= bounds.max_seconds:
        return True
    if bounds.idle_seconds is not None and now.idle_seconds >= bounds.idle_seconds:
        return True
    return not now.following and now.arrived and now.level
