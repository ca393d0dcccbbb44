"""Decides, by pure functions, what a run of the sync does next and when it ends. :mod:`pgcdc_assets.flow.sync` carries
out these decisions.

Normally a turn applies the log to all tables up to one boundary, and a consistent point is published there. There are
two special cases. A table whose copy took long is **late**: it catches up in separate turns, so that it does not delay
the other tables. And ``verify`` may ask for a point at the exact LSN of its snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.log.summary import BatchSummary

GATHERED_BYTES = 64 << 20
"""While a run without follow mode still receives, it starts a turn only if the log has at least this many bytes of
messages that are not applied. Many small turns cost more than one large turn, and take CPU from the receiver."""
LATE_SHARE = 2
"""A turn of late tables applies this many times the bytes of a normal turn, so that late tables catch up with the other
tables, even while those tables catch up with the log."""

Batches = Callable[[Lsn, Lsn], Sequence[BatchSummary]]
"""Returns the log's batches between two LSNs."""


@dataclass(frozen=True)
class Bounds:
    """When a run ends."""

    until: Lsn | None = None
    """Receive up to this LSN and end. If it is None and ``follow`` is False, receive up to the source's flush LSN."""
    follow: bool = False
    max_seconds: float | None = None
    idle_seconds: float | None = None
    receive_only: bool = False
    """Only receive: apply nothing, and copy nothing."""
    stop: threading.Event = field(default_factory=threading.Event)
    """If set, the run ends at the next boundary, and copies in progress are cancelled."""
    give_way: threading.Event = field(default_factory=threading.Event)
    """If set, another Dagster run is queued: the run finishes its copies in progress, and ends at the next boundary."""

    @property
    def stopped(self) -> bool:
        """Whether the run was asked to end, by ``stop`` or ``give_way``."""
        return self.stop.is_set() or self.give_way.is_set()

    def from_now(self, seconds: float) -> Bounds:
        """The bounds of a run that continues this run. ``seconds``: how much of ``max_seconds`` is used up."""
        return self if self.max_seconds is None else replace(self, max_seconds=max(0.0, self.max_seconds - seconds))


@dataclass
class PointDue:
    """Whether the mirrors contain changes or copies that no consistent point lists yet."""

    due: bool
    refused_at: Lsn | None = None
    """The LSN of the last point, if that point could not list every followed table. A second point at this LSN would
    list no more tables."""

    def mark_due(self) -> None:
        """Note that something was copied or applied, so that a point is due."""
        self.due, self.refused_at = True, None

    def published(self, lsn: Lsn, *, whole: bool) -> None:
        """Note that a point was made. ``whole``: the point lists every followed table."""
        self.due, self.refused_at = not whole, None if whole else lsn

    def at(self, lsn: Lsn) -> bool:
        """Whether a point at this LSN is worth making."""
        return self.due and self.refused_at != lsn


@dataclass(frozen=True)
class TablePosition:
    """A followed table's position. ``late``: the table is below the newest point, because its copy took long."""

    name: TableName
    replay_lsn: Lsn
    late: bool = False


@dataclass(frozen=True)
class View:
    """The facts by which a run decides about the next turn."""

    complete: Lsn
    """Every transaction that commits below this LSN is in the log."""
    positions: Sequence[TablePosition]
    batches: Batches
    point: PointDue
    share_bytes: int
    """How many bytes of messages one turn applies."""
    gathers: bool = False
    """Whether the run may wait until GATHERED_BYTES have arrived: it is not in follow mode, and still receives."""
    held: bool = False
    """Whether ``verify`` has asked for a point, but has not named its LSN yet. No turn begins until it has."""
    exact: Lsn | None = None
    """The LSN at which ``verify`` has asked for a point; None if it has not, or if there is such a point already."""
    caught_up: bool = False
    """Whether the late tables have had their separate turn, so that the next turn is for the other tables."""
    paused: bool = False
    """Whether applying is paused."""

    def behind(self, limit: Lsn) -> bool:
        return any(table.replay_lsn < limit for table in self.positions)


@dataclass(frozen=True)
class Wait:
    """There is nothing to do."""


@dataclass(frozen=True)
class TakeLateTurn:
    """Take a turn of late tables only, without a point."""

    tables: Sequence[TableName]
    upto: Lsn


@dataclass(frozen=True)
class TakeTurn:
    """Take a turn, and publish a point if the turn changed anything or a point is due."""

    tables: Sequence[TableName]
    upto: Lsn
    exact: bool
    """Whether ``verify`` waits for a point at ``upto``, so that the point is made even if no mirror changes."""


Step = Wait | TakeLateTurn | TakeTurn


def next_step(view: View) -> Step:
    """What the run does next. After a TakeLateTurn the run calls this again, with ``caught_up``."""
    if view.held or view.paused:
        return Wait()
    if view.exact is None:
        if not view.caught_up and _gathering(view):
            return Wait()
        if not view.behind(view.complete) and not view.point.at(view.complete):
            return Wait()
        late = [table for table in view.positions if table.late]
        if late and not view.caught_up:
            others = min((table.replay_lsn for table in view.positions if not table.late), default=view.complete)
            return TakeLateTurn(_names(late), _boundary(view, late, others, LATE_SHARE))
    tables = [table for table in view.positions if view.exact is not None or not table.late]
    limit = view.complete if view.exact is None else min(view.complete, view.exact)
    upto = _boundary(view, tables, limit, 1)
    exact = upto == view.exact
    if not exact and not any(table.replay_lsn < upto for table in tables) and not view.point.at(upto):
        return Wait()
    return TakeTurn(_names(tables), upto, exact)


def _gathering(view: View) -> bool:
    """Whether the run still waits for more messages before the next turn, up to GATHERED_BYTES."""
    if not view.gathers or view.point.due:
        return False
    return sum(batch.bytes for batch in _waiting(view, view.positions, view.complete)) < GATHERED_BYTES


def _boundary(view: View, tables: Sequence[TablePosition], limit: Lsn, shares: int) -> Lsn:
    """The boundary at which a turn of these tables ends: the end of the batch that reaches the turn's share of bytes,
    or ``limit`` if all batches below it fit into the turn."""
    waiting = _waiting(view, tables, limit)
    taken = up_to(waiting, shares * view.share_bytes)
    return limit if len(taken) == len(waiting) else min(limit, taken[-1].end)


def up_to(batches: Sequence[BatchSummary], max_bytes: int) -> list[BatchSummary]:
    """The first batches: as many as are needed to reach ``max_bytes`` of payload, or all if they have fewer bytes."""
    taken: list[BatchSummary] = []
    size = 0
    for batch in batches:
        taken.append(batch)
        size += batch.bytes
        if size >= max_bytes:
            break
    return taken


def _waiting(view: View, tables: Sequence[TablePosition], limit: Lsn) -> Sequence[BatchSummary]:
    return view.batches(min((table.replay_lsn for table in tables), default=ZERO), limit)


def _names(tables: Sequence[TablePosition]) -> list[TableName]:
    return [table.name for table in tables]


@dataclass(frozen=True)
class Situation:
    """The facts by which a run decides whether to end."""

    running_seconds: float
    idle_seconds: float
    """Seconds since the run last made progress."""
    following: bool
    """Whether the run is in follow mode without an end LSN, and no copy has failed."""
    copying: bool
    """Whether copies or changes of mirrors are in progress. The run waits for them without a time limit, because a
    cancelled copy would start again from its beginning."""
    awaited: bool
    """Whether a command, or another run, waits for the lake."""
    arrived: bool
    """Whether the receiver has reached the LSN at which it ends."""
    level: bool
    """Whether the run has nothing left to apply: the mirrors have applied the whole log and a point lists them, or
    applying is paused."""


def finished(bounds: Bounds, now: Situation) -> bool:
    """Whether the run ends now."""
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
