"""Finds the oldest transaction of the change log that a mirror lacks, to report the mirror's lag in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pgcdc_assets.checks.health import TableFacts
from pgcdc_assets.core.catalog import Catalog, Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.log.reader import ChangeLog, Segment

READ_BYTES: Final = 64 << 20
"""The most bytes of the log that one search reads. Usually a search reads nothing, or the newest file."""


@dataclass(frozen=True)
class Pending:
    """The oldest transaction that a mirror lacks."""

    start: Lsn
    """The start of the transaction's batch. The mirror has all changes below this LSN."""
    committed: datetime
    """When the transaction committed, by the source's clock. If the log above the mirror's position is too long to be
    searched: when the transaction's file was written."""


def pending(log: ChangeLog, catalog: Catalog, tables: Iterable[TableFacts]) -> dict[TableName, Pending]:
    """For each table that lacks a transaction of the log, the oldest such transaction. Tables without a position, such
    as tables that wait for a copy, are left out."""
    groups: dict[Lsn, list[Table]] = {}
    for facts in tables:
        table = catalog.table(facts.name)
        if table is not None and facts.replay_lsn is not None:
            groups.setdefault(facts.replay_lsn, []).append(table)
    found: dict[TableName, Pending] = {}
    for replay_lsn, group in groups.items():
        found |= _above(log, replay_lsn, group)
    return found


def _above(log: ChangeLog, replay_lsn: Lsn, tables: Sequence[Table]) -> dict[TableName, Pending]:
    """The oldest transactions above ``replay_lsn``, the position of these tables."""
    owners = {oid: table.name for table in tables for oid in (table.oid, *(leaf.oid for leaf in table.leaves))}
    held = [segment for segment in log.all_segments() if segment.batch_end > replay_lsn and segment.may_hold(owners)]
    found: dict[TableName, Pending] = {}
    if not held:
        return found
    budget = READ_BYTES
    for segment, batches in log.in_order(replay_lsn):
        budget -= segment.size
        for batch in batches:
            for name in {owners[oid] for oid in batch.rows.keys() & owners.keys() if batch.end > replay_lsn}:
                if batch.first_commit_ts is not None:
                    found.setdefault(name, Pending(batch.start, batch.first_commit_ts))
        if len(found) == len(tables):
            break
        if budget < 0:
            rest = [other for other in held if other.batch_end > segment.batch_end]
            return _unread(rest, owners) | found
    return found


def _unread(segments: Iterable[Segment], owners: Mapping[int, TableName]) -> dict[TableName, Pending]:
    """For each table, the first file that may contain rows of the table, by the recorded bounds. Reads no file."""
    found: dict[TableName, Pending] = {}
    for segment in sorted(segments, key=lambda segment: segment.batch_end):
        for oid, name in owners.items():
            if name not in found and segment.may_hold([oid]):
                found[name] = Pending(segment.first_batch_end, segment.written)
    return found
