"""Results of the stages as plain values: for metadata, progress and the commands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pgcdc_assets.core.catalog import Table
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.mirror.target import CopyReport


@dataclass(frozen=True)
class TableTurn:
    """One table's part of a range (sums over the range's turns)."""

    table: TableName
    replay_lsn: Lsn
    version: int
    """The mirror's version."""
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    """Rows changed in the mirror: net effects, so fewer than the changes."""
    changes: dict[str, int] = field(default_factory=dict)
    """Rows of the change feed by operation."""
    seconds_transform: float = 0.0
    seconds_apply: float = 0.0


@dataclass(frozen=True)
class Untaken:
    """Rows of the log that went into no mirror."""

    relation_id: int
    name: TableName
    """The last name that the stream gave the relation."""
    rows: int
    why: str


@dataclass(frozen=True)
class MessagesReport:
    """Logical messages of a range."""

    count: int
    complete_to: Lsn
    """Every message below it that was asked for is in the feed."""
    version: int
    """Delta version of the feed."""


@dataclass(frozen=True)
class RangeReport:
    """One closed LSN range."""

    span: LsnRange
    transactions: int
    rows: dict[str, int]
    """Messages by kind (I, U, D, T)."""
    bytes: int
    """Payload bytes in the change log."""
    transform_lsn: Lsn
    replay_lsn: Lsn
    lag_bytes: int
    lag_seconds: float | None
    tables: dict[TableName, TableTurn]
    """Only tables that changed."""
    seconds: dict[str, float]
    """Wall seconds by stage: transform, apply, publish."""
    untaken: list[Untaken] = field(default_factory=list)
    """By relation; all other rows went into their mirrors, or lay below their copies."""
    messages: MessagesReport | None = None
    """None where messages are not asked for."""


@dataclass(frozen=True)
class Restructured:
    """How a mirror goes on after a change of its table's structure."""

    table: TableName
    what: str
    """The change, in words."""
    before: Table
    after: Table
    since: Lsn
    """The end of the transaction that changed it, or the look at the catalog that showed the new structure."""
    copied: bool
    """By a new copy, which has been asked for; otherwise by its own rows, in ``version``."""
    version: int | None = None


@dataclass(frozen=True)
class SyncReport:
    """A whole run."""

    start: Lsn
    """replay_lsn when it began."""
    end: Lsn
    """replay_lsn when it ended."""
    transform_lsn: Lsn
    copied: list[CopyReport]
    turns: int
    transactions: int
    rows: int
    stream_aborts: int
    """Stream Aborts that were passed over: PostgreSQL 18 reports rollbacks of transactions that it never sent."""
    seconds: float
    set_aside: list[tuple[TableName, str]]
    changed: list[tuple[TableName, str]] = field(default_factory=list)
    """Followed tables of whose mirrors another writer changed rows, in words."""
    refused: frozenset[TableName] = frozenset()
    """The set-aside tables that cannot be mirrored at all."""
    paused: bool = False
    """Whether applying was paused at the run's end: an operator has paused it, or the run only received."""
    gave_way: bool = False
    """Whether it ended because a command waits for the lake."""
    left: list[tuple[TableName, str]] = field(default_factory=list)
    """Tables that a run which does not follow left behind the others, with the reason: they wait for a copy, or no
    point lists them yet."""

    lost: PgcdcError | None = None
    """How a run that follows lost the source, if that ended it."""

    def after(self, before: SyncReport) -> SyncReport:
        """Both runs as one; ``before`` is the earlier one."""
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
