"""The results of a run as plain values, and the interface of observers. Observers receive these results, for example to
write Dagster events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.mirror.target import CopyCount, CopyReport


@dataclass(frozen=True)
class TableTurn:
    """One table's changes in one turn (one pass of transform, apply, publish), or added up over a range's turns."""

    table: TableName
    replay_lsn: Lsn
    version: int
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    """``inserted``, ``updated`` and ``deleted``: rows changed in the mirror. These are net effects."""
    changes: dict[str, int] = field(default_factory=dict)
    """The number of rows in the change feed, by operation."""
    seconds_transform: float = 0.0
    seconds_apply: float = 0.0
    rows: int | None = None
    """The number of rows in the mirror at the range's end; None if unknown."""


@dataclass(frozen=True)
class Turn:
    """What one turn up to the boundary ``upto`` has done."""

    upto: Lsn
    tables: list[TableTurn]
    """The tables whose mirrors changed."""
    seconds: dict[str, float]
    """Wall seconds by stage: transform and apply."""


@dataclass(frozen=True)
class Untaken:
    """Rows of the log that were applied to no mirror."""

    relation_id: int
    name: TableName
    """The relation's newest name in the stream."""
    rows: int
    why: str


@dataclass(frozen=True)
class MessagesReport:
    """The logical messages of a range, and their feed's Delta ``version``."""

    count: int
    complete_to: Lsn
    """The feed contains every requested message below this LSN."""
    version: int


@dataclass(frozen=True)
class RangeReport:
    """One closed LSN range. ``tables``: the tables that changed in it."""

    span: LsnRange
    transactions: int
    rows: dict[str, int]
    """The number of row messages, by kind (I, U, D, T)."""
    bytes: int
    """Payload bytes in the change log."""
    transform_lsn: Lsn
    replay_lsn: Lsn
    lag_bytes: int
    lag_seconds: float | None
    tables: dict[TableName, TableTurn]
    seconds: dict[str, float]
    """Wall seconds by stage: transform and apply."""
    untaken: list[Untaken] = field(default_factory=list)
    """Rows that were applied to no mirror, by relation. All other rows were applied, or are in snapshot copies."""
    messages: MessagesReport | None = None
    """None if the setting ``messages`` is empty, or if the feed has failed."""
    committed: tuple[datetime, datetime] | None = None
    """The commit times of the first and last transaction, by the source's clock; None without transactions."""


@dataclass(frozen=True)
class StructureChange:
    """A change of a table's structure, and how the table's mirror follows it."""

    table: TableName
    what: str
    before: Table
    after: Table
    since: Lsn
    """From this LSN on, the source certainly has the new structure. It is the LSN of the catalog check that showed the
    structure, or the end LSN of the transaction that changed it."""
    copied: bool
    """Whether the table is copied again. Otherwise the mirror has the new structure from its ``version`` on."""
    version: int | None = None


@dataclass(frozen=True)
class SyncReport:
    """The result of one run of the sync. ``start``, ``end``: ``replay_lsn`` when the run began and ended."""

    start: Lsn
    end: Lsn
    transform_lsn: Lsn
    copied: list[CopyReport]
    turns: int
    transactions: int
    rows: int
    stream_aborts: int
    """Ignored Stream Abort messages: PostgreSQL 18 reports rollbacks of transactions that it never sent."""
    seconds: float
    set_aside: list[tuple[TableName, str]]
    changed: list[tuple[TableName, str]] = field(default_factory=list)
    """The followed tables with rows that another writer changed in the mirror, and a description."""
    refused: frozenset[TableName] = frozenset()
    """The tables that are set aside because no mirror can contain them."""
    paused: bool = False
    """Whether applying was paused at the run's end: by an operator, or because the run only received."""
    gave_way: bool = False
    """Whether the run ended because a command waits for the lake."""
    left: list[tuple[TableName, str]] = field(default_factory=list)
    """At the end of a run without ``follow``: the tables whose present mirrors no point lists yet, for example because
    they wait for a copy, each with the reason."""

    lost: PgcdcError | None = None
    """The error with which a run in follow mode lost its connection to the source, if this ended the run."""

    def after(self, before: SyncReport) -> SyncReport:
        """The reports of two runs as one report. ``before``: the report of the earlier run."""
        return replace(
            self,
            start=before.start,
            copied=before.copied + self.copied,
            turns=before.turns + self.turns,
            transactions=before.transactions + self.transactions,
            rows=before.rows + self.rows,
            stream_aborts=before.stream_aborts + self.stream_aborts,
            seconds=before.seconds + self.seconds,
        )


class Phase(StrEnum):
    """What a sync does now."""

    COPYING = "copying"
    """Copies of tables are in progress. Changes of the other tables are applied."""
    CATCHING_UP = "catching up"
    FOLLOWING = "following"
    """The mirrors hold all changes that have arrived."""
    PAUSED = "paused"
    """Changes are only written to the log."""


@dataclass(frozen=True)
class RunState:
    """The progress of a sync at one moment, to be shown to people."""

    phase: Phase
    replay_lsn: Lsn
    lag_bytes: int | None
    """WAL between ``replay_lsn`` and the source's flush LSN. None before the first copy."""
    lag_seconds: float
    """Age of the oldest transaction in the log that is not in all mirrors; 0 if there is none."""
    rows: int
    """Row changes that this run has applied."""
    copies: CopyCount | None = None
    """The copies that are in progress."""


class Observer(Protocol):
    """Receives a run's reports, in the run's own thread and in LSN order. If a method raises an exception, the run ends
    at a boundary."""

    def known_ranges(self) -> list[LsnRange]:
        """The ranges that were reported (in Dagster: the ranges that are registered as partitions), in LSN order. A new
        range begins where the last of them ends."""

    def copied(self, report: CopyReport) -> None:
        """Called when a table's copy was committed to its mirror."""

    def restructured(self, report: StructureChange) -> None:
        """Called when a mirror has its table's new structure, or when the table must be copied because of its new
        structure."""

    def range_closed(self, report: RangeReport) -> None:
        """Called when a range is in the log, is applied to every followed table, and a point contains its changes. The
        newest point may be below the range's end if the last transactions change no table, because they need no
        point."""

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        """Called with a message for people. No code may depend on its text."""

    def moving(self, now: Callable[[], RunState]) -> None:
        """Called when the run makes progress. ``now()`` returns the run's state. It queries the source, so an
        implementation of this method should call ``now`` rarely."""


class Silent:
    """An observer that keeps its reports in memory, and prints nothing."""

    def __init__(self) -> None:
        self.ranges: list[RangeReport] = []
        self.copies: list[CopyReport] = []
        self.structures: list[StructureChange] = []

    def known_ranges(self) -> list[LsnRange]:
        return [report.span for report in self.ranges]

    def copied(self, report: CopyReport) -> None:
        self.copies.append(report)

    def restructured(self, report: StructureChange) -> None:
        self.structures.append(report)

    def range_closed(self, report: RangeReport) -> None:
        self.ranges.append(report)

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        """Ignore the message."""

    def moving(self, now: Callable[[], RunState]) -> None:
        """Ignore the state."""
