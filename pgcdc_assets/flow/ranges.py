"""Decides when a range is closed, and sums up what it held.

Batches serve latency. Ranges serve people and backfills. A range is one or more whole batches. It is closed when it has
reached a size, or a minimum age. What a closed range held is counted from the log's own summaries. So if a run dies
before its range is closed, the next run counts everything.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.flow.reports import TableTurn
from pgcdc_assets.log.summary import ROW_KINDS, BatchSummary


@dataclass
class OpenRange:
    """The range that collects the applied batches."""

    start: Lsn
    max_bytes: int
    min_seconds: float
    clock: Callable[[], float] = time.monotonic
    _end: Lsn | None = None
    """The end of the last batch."""
    _bytes: int = 0
    _opened: float | None = None
    _turns: dict[TableName, TableTurn] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)

    def add(self, batches: Sequence[BatchSummary], turns: Sequence[TableTurn], seconds: dict[str, float]) -> None:
        """Add what one turn applied. Batches without transactions open no range."""
        if batches:
            self._end = batches[-1].end
        self._bytes += sum(batch.bytes for batch in batches)
        if self._opened is None and any(batch.transactions for batch in batches):
            self._opened = self.clock()
        for turn in turns:
            before = self._turns.get(turn.table)
            self._turns[turn.table] = summed(before, turn) if before else turn
        for stage, spent in seconds.items():
            self._seconds[stage] = self._seconds.get(stage, 0.0) + spent

    @property
    def due(self) -> bool:
        if self._opened is None:
            return False
        return self._bytes >= self.max_bytes or self.clock() - self._opened >= self.min_seconds

    @property
    def empty(self) -> bool:
        return self._opened is None

    def close(self) -> tuple[LsnRange, dict[TableName, TableTurn], dict[str, float]]:
        """End the range at its last batch, and open the next one there."""
        assert self._end is not None
        closed = LsnRange(self.start, self._end), self._turns, self._seconds
        self.start, self._end, self._bytes, self._opened = self._end, None, 0, None
        self._turns, self._seconds = {}, {}
        return closed


def summed(left: TableTurn, right: TableTurn) -> TableTurn:
    """The sum of two turns of one table, with the position and version of the later turn, ``right``."""
    return TableTurn(
        table=right.table,
        replay_lsn=right.replay_lsn,
        version=right.version,
        inserted=left.inserted + right.inserted,
        updated=left.updated + right.updated,
        deleted=left.deleted + right.deleted,
        changes=dict(Counter(left.changes) + Counter(right.changes)),
        seconds_transform=left.seconds_transform + right.seconds_transform,
        seconds_apply=left.seconds_apply + right.seconds_apply,
    )


def rows_by_kind(batches: Sequence[BatchSummary]) -> dict[str, int]:
    """The number of row messages of some batches, by pgoutput's letter for the kind."""
    total: Counter[str] = Counter()
    for batch in batches:
        for kinds in batch.rows.values():
            total.update(kinds)
    return {kind: total[kind] for kind in ROW_KINDS}


def up_to(batches: Sequence[BatchSummary], max_bytes: int) -> list[BatchSummary]:
    """The first batches that together reach ``max_bytes`` of payload. One turn takes at most these."""
    taken: list[BatchSummary] = []
    size = 0
    for batch in batches:
        taken.append(batch)
        size += batch.bytes
        if size >= max_bytes:
            break
    return taken
