"""The facts that the health rules look at: source, log and lake at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.points.untaken import UntakenRows
from pgcdc_assets.source.slot.blockers import Blocker
from pgcdc_assets.source.slot.slotstatus import SlotStatus


@dataclass(frozen=True)
class Backend:
    """The session that holds the slot."""

    pid: int
    application_name: str


@dataclass(frozen=True)
class PublicationFacts:
    """The contents of a publication. ``tables`` are leaves, or roots if it publishes via them."""

    name: str
    tables: frozenset[TableName]
    insert: bool = True
    update: bool = True
    delete: bool = True
    truncate: bool = True


@dataclass(frozen=True)
class SourceFacts:
    """Facts of the source, besides its slot."""

    identity: Identity
    flush_lsn: Lsn
    """Read after the log's position, so that a log that seems ahead of it is ahead."""
    wal_level: str = "logical"
    max_slot_wal_keep_bytes: int | None = None
    """None: no bound (-1)."""
    synchronous_standby_names: str = ""
    idle_slot_timeout: timedelta = timedelta(0)
    """idle_replication_slot_timeout, PostgreSQL 18; 0 is off."""
    holder: Backend | None = None
    oldest: Blocker | None = None
    """The oldest transaction of the whole cluster, open or prepared: it keeps ``restart_lsn`` back."""
    publications: Mapping[str, PublicationFacts | None] = field(default_factory=dict)
    """By the names of the publications that we read; None if one does not exist."""
    mirrored: frozenset[TableName] = frozenset()
    """Published tables, by the names that their mirrors have: roots, not leaves."""
    called: Mapping[int, TableName] = field(default_factory=dict)
    """Their names by OID."""
    meant: frozenset[TableName] = frozenset()
    """Tables that exist and that the setting ``tables`` means."""
    ours: bool = False
    """Whether setup made the publication, and keeps its tables as the settings say."""
    followable: frozenset[TableName] = frozenset()
    """Tables whose updates are not seen although they have a usable replica identity by now."""
    without_identity: frozenset[TableName] = frozenset()
    """Published tables whose updates and deletes fail on the source, for want of a replica identity."""


@dataclass(frozen=True)
class LogFacts:
    """Positions of the change log; None before there is a log."""

    identity: Identity
    start: Lsn
    transform_lsn: Lsn
    published: Lsn | None = None
    """The newest consistent point."""


@dataclass(frozen=True)
class TableFacts:
    """One mirrored table."""

    name: TableName
    state: TableState
    replay_lsn: Lsn | None = None
    reason: str | None = None
    lsn: Lsn | None = None
    """Where it was set aside."""
    updates_seen: bool = True
    refused: bool = False
    """Whether the table cannot be mirrored at all."""
    kept_until: datetime | None = None
    """For a table that was set aside: until when the log keeps all that its mirror lacks, at the least; None if it
    keeps that no longer."""


@dataclass(frozen=True)
class LeftFacts:
    """A mirror that is no longer followed: where it stands, and, if its table was renamed, how it goes on."""

    lsn: Lsn
    moved: str | None = None
    waits_for: TableName | None = None
    """The table's name now, if the mirror waits to go on under it."""


@dataclass(frozen=True)
class MessageFacts:
    """The feed of logical messages, where the setting asks for them."""

    complete_to: Lsn | None = None
    """None before the first run that asked for them."""
    failure: str | None = None
    """Why it cannot be read."""


@dataclass(frozen=True)
class UntakenFacts:
    """Rows of the log that no mirror took."""

    rows: UntakenRows
    table: TableName | None = None
    """The followed table that the relation belongs to now."""
    copied: Lsn | None = None
    """Consistent point of the copy that its mirror holds. If it is later than the rows, the copy contains their
    effect."""

    @property
    def held(self) -> bool:
        return self.copied is not None and self.copied > self.rows.last


@dataclass(frozen=True)
class Facts:
    """All facts that the rules look at. ``source`` or ``slot`` is None if it was not reached, or does not exist."""

    now: datetime
    slot_name: str
    source: SourceFacts | None = None
    slot: SlotStatus | None = None
    log: LogFacts | None = None
    catalog: Catalog | None = None
    tables: Sequence[TableFacts] = ()
    left: Mapping[TableName, LeftFacts] = field(default_factory=dict)
    """Mirrors of tables that the saved catalog does not have."""
    untaken: Sequence[UntakenFacts] = ()
    messages: MessageFacts | None = None
    """None where they are not asked for."""
    two_phase: bool = False
    """The setting."""
    at_work: str | None = None
    """The process that writes to the lake, in words. It reads the slot, or is about to: while it drains a backlog by
    SQL functions, the slot has no reader at moments."""


def span(of: timedelta) -> str:
    """``3 hours``: the largest whole unit."""
    seconds = int(of.total_seconds())
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'s' * (count != 1)}"
    return f"{seconds} second{'s' * (seconds != 1)}"
