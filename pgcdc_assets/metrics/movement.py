"""Decides whether replication makes progress. Compares the source's WAL with what was received, and the change log with
what readers can read. It does not check connections, because an open connection does not prove progress. A source
without changes needs no progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.metrics.readings import LakeReading, SourceReading
from pgcdc_assets.structure.record import TableState

WITHIN_SECONDS: Final = 60.0
"""Replication is not ready if no position has moved for this long, although changes wait. This is at least ten times
the usual time from a commit to a readable row, and shorter than the time after which most alarms are raised."""
_MOST_SAMPLES = 2000


@dataclass(frozen=True)
class StageLag:
    """How far a stage is behind the source. ``seconds``: how long the oldest transaction that the stage lacks has
    waited."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Lags:
    """The lag of each stage. A lag is None if the stage has no position, or if the source cannot be reached."""

    receive: StageLag | None = None
    apply: StageLag | None = None
    publish: StageLag | None = None
    tables: dict[str, StageLag] = field(default_factory=dict)


@dataclass
class _Moving:
    """When a value last changed."""

    value: object = None
    at: float | None = None

    def see(self, value: object, now: float, at: float | None = None) -> None:
        """Remember the value, and the time ``now`` if it differs from the value of the last call. ``at``: used at the
        first call instead of ``now``: when the value was reached, if known."""
        if value != self.value:
            self.at = now if self.value is not None else at
            self.value = value

    def moved(self, now: float, within: float) -> bool:
        return self.at is not None and now - self.at <= within


class Movement:
    """Remembers the positions of earlier scrapes."""

    def __init__(self, within: float = WITHIN_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._within = within
        self._clock = clock
        self._samples: deque[tuple[float, Lsn]] = deque()
        """The source's positions that are not received yet, with the times at which scrapes saw them."""
        self._level = False
        """Whether the received LSN has ever reached a position of the source that a scrape had seen. Then ``_samples``
        shows since when later WAL waits."""
        self._receive, self._publish = _Moving(), _Moving()

    def see(self, source: SourceReading | None, lake: LakeReading | None, now: datetime) -> Lags:
        """Remember the readings of one scrape, and return the lags."""
        clock = self._clock()
        if lake is not None and lake.point is not None:
            self._publish.see(lake.point.replay_lsn, clock, clock - (now - lake.point.at).total_seconds())
        if source is None:
            return Lags()
        received = received_lsn(source, lake)
        in_progress = lake.status.in_progress if lake is not None else None
        self._receive.see((received, in_progress and in_progress.bytes), clock)
        if received is None:
            return Lags()
        receive = StageLag(max(0, source.flush_lsn - received), self._waited(source, lake, received, clock, now))
        if lake is None or not lake.answers:
            return Lags(receive)
        tables = {str(table.name): _lag_of(table.name, source, lake, receive, now)
                  for table in lake.status.tables if table.replay_lsn is not None}  # fmt: skip
        readable = {str(t.name): t.state for t in lake.status.tables if t.state.readable and t.replay_lsn is not None}
        followed = [tables[name] for name in readable]
        listed = [tables[name] for name, state in readable.items() if state is TableState.STREAMING]
        return Lags(receive, _worst(followed), _worst(listed), tables)

    def reasons(
        self, source: SourceReading | None, lake: LakeReading | None, lags: Lags, now: datetime
    ) -> list[str]:  # fmt: skip
        """Why replication makes no progress; empty if it makes progress or has nothing to do."""
        clock, within = self._clock(), self._within
        found = []
        if source is not None and source.slot is None:
            found.append("the replication slot does not exist")
        elif source is not None and source.slot is not None and source.slot.lost:
            found.append("the replication slot is lost, because the source removed WAL that it needs")
        if lake is not None and lake.answers and lake.point is None:
            found.append("no consistent point was published yet")
        receive, waited = lags.receive, 0.0 if lake is None else _unpublished(lake, now)
        if receive is not None and receive.seconds > within and not self._receive.moved(clock, within):
            found.append(f"no WAL was received for {receive.seconds:.0f} s, although the source has {receive.bytes} "
                         "more bytes of it")  # fmt: skip
        if waited > within and not self._publish.moved(clock, within):
            paused = ", because apply is paused" if lake is not None and lake.paused else ""
            found.append(f"a transaction in the change log has waited for {waited:.0f} s to be applied to mirrors, and "
                         f"no new consistent point was published{paused}")  # fmt: skip
        return found

    def _waited(
        self, source: SourceReading, lake: LakeReading | None, received: Lsn, clock: float, now: datetime
    ) -> float:
        """Seconds for which WAL has waited to be received, counted from the first scrape that saw this WAL on the
        source. If the receiver is not connected, and had stopped before the first scrape, the seconds are counted from
        the run's last write to the lake (:attr:`LakeReading.alive`)."""
        samples = self._samples
        samples.append((clock, source.flush_lsn))
        while samples and samples[0][1] <= received:
            samples.popleft()
            self._level = True
        if len(samples) > _MOST_SAMPLES:
            # Keep the first sample, because the wait is measured from it. The later samples are less important.
            del samples[-2]
        if not samples:
            return 0.0
        waited = clock - samples[0][0]
        alive = lake.alive if lake is not None else None
        if not self._level and alive is not None and not (source.slot and source.slot.active):
            waited = max(waited, (now - alive).total_seconds())
        return waited


def received_lsn(source: SourceReading, lake: LakeReading | None) -> Lsn | None:
    """The LSN up to which all of the source's WAL was received, as the lake or the slot's confirmed position shows."""
    confirmed = source.slot.confirmed_flush_lsn if source.slot is not None else None
    complete = lake.complete if lake is not None else None
    return max((lsn for lsn in (complete, confirmed) if lsn is not None), default=None)


def _unpublished(lake: LakeReading, now: datetime) -> float:
    """Seconds since the commit of the oldest transaction in the log that the mirror of a streaming table lacks."""
    streaming = {table.name for table in lake.status.tables if table.state is TableState.STREAMING}
    return max((found.age(now) for name, found in lake.pending.items() if name in streaming), default=0.0)


def _lag_of(name: TableName, source: SourceReading, lake: LakeReading, receive: StageLag, now: datetime) -> StageLag:
    """The lag of a table's mirror. It lacks what was not received yet, and the table's unapplied transactions in the
    log."""
    found = lake.pending.get(name)
    if found is None:
        return receive
    return StageLag(max(receive.bytes, source.flush_lsn - found.start), max(receive.seconds, found.age(now)))


def _worst(lags: list[StageLag]) -> StageLag | None:
    if not lags:
        return None
    return StageLag(max(lag.bytes for lag in lags), max(lag.seconds for lag in lags))
