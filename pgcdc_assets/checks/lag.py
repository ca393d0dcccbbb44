"""How far each table is behind the source, in bytes of WAL and in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from pgcdc_assets.checks.health import Facts, TableFacts
from pgcdc_assets.checks.pending import Pending, pending
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.names import TableName
from pgcdc_assets.log.reader import ChangeLog


@dataclass(frozen=True)
class Lag:
    """The lag of one table. ``seconds``: the age of the oldest transaction that the mirror lacks; None if not known."""

    bytes: int | None = None
    seconds: float | None = None


def lags(facts: Facts, layout: Layout) -> dict[TableName, Lag]:
    """The lag of each table that has a position."""
    waiting: Mapping[TableName, Pending] = {}
    received: datetime | None = None
    if facts.log is not None and facts.catalog is not None:
        log = ChangeLog(layout)
        waiting = pending(log, facts.catalog, facts.tables)
        received = max((segment.written for segment in log.all_segments()), default=None)
    return {table.name: _lag(facts, table, waiting.get(table.name), received)
            for table in facts.tables if table.replay_lsn is not None}  # fmt: skip


def _lag(facts: Facts, table: TableFacts, lacks: Pending | None, received: datetime | None) -> Lag:
    assert table.replay_lsn is not None
    if facts.source is None or facts.log is None:
        return Lag(None, None if lacks is None else _age(facts, lacks.committed))
    behind = max(0, facts.source.flush_lsn - table.replay_lsn)
    if lacks is not None:
        return Lag(behind, _age(facts, lacks.committed))
    if facts.at_work is not None or facts.log.transform_lsn >= facts.source.flush_lsn:
        # A process receives changes: changes that it has not received yet are at most some seconds old.
        return Lag(behind, 0.0)
    stopped = facts.slot.inactive_since if facts.slot is not None else None
    since = stopped or received
    return Lag(behind, None if since is None else _age(facts, since))


def _age(facts: Facts, since: datetime) -> float:
    return max(0.0, (facts.now - since).total_seconds())
