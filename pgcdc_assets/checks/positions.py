"""Up to which LSN changes are received, durable and applied, at which LSN syncs end, and whether applying is paused.
The model is ``pgcopydb stream sentinel get``. Reads by plain SQL and from small tables. Works while a sync runs.

Also how far each table is behind the source, in bytes of WAL and in seconds. The seconds count from the oldest
transaction of the change log that the mirror lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from typing_extensions import TypedDict

from pgcdc_assets.checks.facts import lowest_replayed, read_tables
from pgcdc_assets.checks.health import Facts, TableFacts
from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow import lock
from pgcdc_assets.flow.requests import operator_requests
from pgcdc_assets.log.reader import ChangeLog, Segment
from pgcdc_assets.project import load_catalog
from pgcdc_assets.projectsource import source_of
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.slot.slot import flush_lsn

READ_BYTES: Final = 64 << 20
"""The most bytes of the log that a search for missing transactions reads. Usually it reads nothing, or the newest
file."""
FILE_BYTES: Final = 256 << 10
"""A file counts as at least this many bytes, because an object store takes as long for a smaller file."""
_WRITTEN = """
SELECT r.write_lsn::text FROM pg_catalog.pg_replication_slots s
JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid WHERE s.slot_name = %s
"""


class PositionsDocument(TypedDict):
    """What ``pgcdc positions --json`` prints."""

    source: str
    """The source's flush LSN."""
    write_lsn: str | None
    """Changes up to this LSN are received."""
    flush_lsn: str | None
    """Changes up to this LSN are durable in the change log."""
    replay_lsn: str | None
    """All followed mirrors contain the changes up to this LSN."""
    endpos: str | None
    """The LSN at which syncs end, if ``pgcdc until`` set one."""
    apply: str
    """Whether changes are applied to mirrors: ``running`` or ``paused``."""
    at_work: str | None
    """The command that writes to the lake."""


def positions(settings: Settings) -> PositionsDocument:
    """The current positions of the project; null if a position does not exist yet. Raises SourceUnavailable or
    LakeError."""
    layout, catalog = settings.layout, load_catalog(settings.catalog_file)
    with connect(source_of(settings), application_name=f"{APPLICATION}/positions") as conn:
        row = conn.execute(_WRITTEN, [settings.slot]).fetchone()
        # Replay is read before flush, and flush before the source's position, so that replay never seems to be ahead of
        # flush, and flush never ahead of the source.
        replayed = lowest_replayed(read_tables(layout, catalog)) if catalog is not None else None
        log = ChangeLog(layout)
        flushed = log.position() if log.exists else None
        source = flush_lsn(conn)
    written = Lsn.parse(row[0]) if row and row[0] else None
    told, holder = operator_requests(layout), lock.holder(layout)
    write = max((lsn for lsn in (written, flushed) if lsn is not None), default=None)
    return {
        "source": str(source), "write_lsn": text(write), "flush_lsn": text(flushed), "replay_lsn": text(replayed),
        "endpos": text(told.endpos), "apply": "paused" if told.paused else "running",
        "at_work": holder.command if holder else None,
    }  # fmt: skip


def text(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(lsn)


# Lag --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """The oldest transaction that a mirror lacks, as a search in the log found it. The search reads at most about
    READ_BYTES."""

    start: Lsn
    """The start of the batch that has the transaction. If the search stopped before it reached the transaction: the end
    of the first batch in the first file that may contain the transaction, which may be above the true start."""
    committed: datetime
    """The first commit time in this batch, by the source's clock. If the search stopped before it reached the
    transaction: when the file was written."""

    def age(self, now: datetime) -> float:
        """Seconds since :attr:`committed`."""
        return max(0.0, (now - self.committed).total_seconds())


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
        return Lag(None, None if lacks is None else lacks.age(facts.now))
    behind = max(0, facts.source.flush_lsn - table.replay_lsn)
    if lacks is not None:
        return Lag(behind, lacks.age(facts.now))
    if facts.at_work is not None or facts.log.transform_lsn >= facts.source.flush_lsn:
        # Either a process is receiving, so that changes that it lacks are at most some seconds old, or the log already
        # contains everything.
        return Lag(behind, 0.0)
    stopped = facts.slot.inactive_since if facts.slot is not None else None
    since = stopped or received
    return Lag(behind, None if since is None else max(0.0, (facts.now - since).total_seconds()))


def pending(log: ChangeLog, catalog: Catalog, tables: Sequence[TableFacts]) -> dict[TableName, Pending]:
    """For each table that lacks a transaction of the log, the oldest such transaction. Tables without a position, such
    as tables that wait for a copy, are left out."""
    found: dict[TableName, Pending] = {}
    # Two searches, each with its own limit: a table that was set aside may be far behind, and a common search would
    # reach the limit before it reached the transactions that the followed tables lack.
    for followed in (True, False):
        positions = {facts.name: facts.replay_lsn for facts in tables
                     if facts.replay_lsn is not None and facts.state.readable is followed}  # fmt: skip
        owners = {oid: (table.name, positions[table.name]) for table in catalog.tables if table.name in positions
                  for oid in (table.oid, *(leaf.oid for leaf in table.leaves))}  # fmt: skip
        found |= _oldest(log, owners)
    return found


def _oldest(log: ChangeLog, owners: Mapping[int, tuple[TableName, Lsn]]) -> dict[TableName, Pending]:
    """One search of :func:`pending`. ``owners``: by relation OID, the table to which the relation's rows belong, and
    the position of the table's mirror. Reads each file of the log at most once, also for many tables."""
    found: dict[TableName, Pending] = {}
    lowest = min((position for _, position in owners.values()), default=Lsn(0))
    above = [segment for segment in log.all_segments() if segment.batch_end > lowest]
    if not any(segment.may_hold(owners) for segment in above):
        return found
    names, budget = {name for name, _ in owners.values()}, READ_BYTES
    for segment, batches in log.in_order(lowest):
        budget -= max(segment.size, FILE_BYTES)
        for batch in batches:
            for name, position in (owners[oid] for oid in batch.rows.keys() & owners.keys()):
                if batch.end > position and batch.first_commit_ts is not None:
                    found.setdefault(name, Pending(batch.start, batch.first_commit_ts))
        if len(found) == len(names):
            break
        if budget < 0:
            left = {oid: owner for oid, owner in owners.items() if owner[0] not in found}
            return _unread([other for other in above if other.batch_end > segment.batch_end], left) | found
    return found


def _unread(
    segments: Sequence[Segment], owners: Mapping[int, tuple[TableName, Lsn]]
) -> dict[TableName, Pending]:  # fmt: skip
    """For the tables that the search did not reach: an estimate that reads no file. It takes the first file above the
    mirror's position whose recorded lowest and highest OIDs include the table's OID."""
    found: dict[TableName, Pending] = {}
    for segment in sorted(segments, key=lambda segment: segment.batch_end):
        for oid, (name, position) in owners.items():
            if name not in found and segment.batch_end > position and segment.may_hold([oid]):
                found[name] = Pending(segment.first_batch_end, segment.written)
    return found
