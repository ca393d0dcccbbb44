"""The facts that the health rules read (about source, log and lake), and the problems that the rules report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from pgcdc_assets.checks.documents import ProblemDocument
from pgcdc_assets.checks.problemcodes import ProblemCode
from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import PgcdcError, SettingsError, StoreFailed, WrongLake, WrongSource
from pgcdc_assets.flow.outcomes import Outcome
from pgcdc_assets.points.untaken import UntakenRows
from pgcdc_assets.source.slot.blockers import Blocker
from pgcdc_assets.source.slot.slot import SlotStatus
from pgcdc_assets.structure.record import TableState


@dataclass(frozen=True)
class Backend:
    """The session that reads the slot."""

    pid: int
    application_name: str


@dataclass(frozen=True)
class PublicationFacts:
    """The contents of a publication. ``tables`` are leaves, or roots if the publication publishes via the root."""

    name: str
    tables: frozenset[TableName]
    insert: bool = True
    update: bool = True
    delete: bool = True
    truncate: bool = True


@dataclass(frozen=True)
class SourceFacts:
    """Facts about the source, without its slot."""

    identity: Identity
    flush_lsn: Lsn
    """This LSN is read after the log's position. So a log that seems to be ahead of the source really is ahead."""
    wal_level: str = "logical"
    max_slot_wal_keep_bytes: int | None = None
    """None: no limit (-1)."""
    synchronous_standby_names: str = ""
    idle_slot_timeout: timedelta = timedelta(0)
    """idle_replication_slot_timeout of PostgreSQL 18. 0: off."""
    holder: Backend | None = None
    oldest: Blocker | None = None
    """The oldest open or prepared transaction of the whole cluster. It keeps ``restart_lsn`` from moving up."""
    publications: Mapping[str, PublicationFacts | None] = field(default_factory=dict)
    """The project's publications by name. The value is None if the publication does not exist."""
    mirrored: frozenset[TableName] = frozenset()
    """The published tables, under the names of their mirrors: for partitioned tables the roots, not the leaves."""
    called: Mapping[int, TableName] = field(default_factory=dict)
    """The current names of the published tables, by OID. A name differs from the saved catalog after a rename."""
    meant: frozenset[TableName] = frozenset()
    """Tables that exist and that the setting ``tables`` selects."""
    ours: bool = False
    """Whether setup made the publication. In this case, setup also keeps its list of tables equal to the settings."""
    followable: frozenset[TableName] = frozenset()
    """Tables with a usable replica identity. A problem is reported if such a table is published for inserts only."""
    without_identity: frozenset[TableName] = frozenset()
    """Published tables whose updates and deletes fail on the source, because they have no usable replica identity."""


@dataclass(frozen=True)
class LogFacts:
    """Positions of the change log."""

    identity: Identity
    start: Lsn
    transform_lsn: Lsn
    published: Lsn | None = None
    """The LSN of the newest consistent point."""


@dataclass(frozen=True)
class TableFacts:
    """One mirrored table."""

    name: TableName
    state: TableState
    replay_lsn: Lsn | None = None
    reason: str | None = None
    lsn: Lsn | None = None
    """The LSN at which the table was set aside."""
    updates_seen: bool = True
    refused: bool = False
    """Whether the table cannot be mirrored at all."""
    kept_until: datetime | None = None
    """For a table that was set aside: at least until this time, the log keeps all changes that the mirror lacks. None
    if the log already lacks some of these changes."""


@dataclass(frozen=True)
class LeftFacts:
    """A mirror whose table is no longer followed under this name."""

    lsn: Lsn
    moved: str | None = None
    """If the table is already followed under a new name: a text that says so."""
    waits_for: TableName | None = None
    """The table's new name, if the mirror will be renamed to it."""


@dataclass(frozen=True)
class MessageFacts:
    """The feed of logical messages."""

    complete_to: Lsn | None = None
    """The LSN up to which the feed is complete. None before the first run with messages."""
    failure: str | None = None
    """Why the feed cannot be read."""


@dataclass(frozen=True)
class UntakenFacts:
    """Rows of one relation (a table or a leaf partition) in the log that were not applied to any mirror."""

    rows: UntakenRows
    table: TableName | None = None
    """The followed table to which the relation belongs now. None if it belongs to no followed table."""
    copied: Lsn | None = None
    """The consistent point of the snapshot copy from which the mirror of ``table`` began. A copy made after these rows
    contains their effect."""

    @property
    def held(self) -> bool:
        """Whether the mirror's copy contains the effect of these rows."""
        return self.copied is not None and self.copied > self.rows.last


@dataclass(frozen=True)
class Facts:
    """All facts that the rules check. ``source``, ``slot`` or ``log`` is None if it is missing or could not be read."""

    now: datetime
    slot_name: str
    source: SourceFacts | None = None
    slot: SlotStatus | None = None
    log: LogFacts | None = None
    catalog: Catalog | None = None
    tables: Sequence[TableFacts] = ()
    left: Mapping[TableName, LeftFacts] = field(default_factory=dict)
    """Mirrors of tables that are not in the saved catalog."""
    untaken: Sequence[UntakenFacts] = ()
    messages: MessageFacts | None = None
    """None if the setting ``messages`` is empty."""
    last: Mapping[str, Outcome] = field(default_factory=dict)
    """The outcome of the last operation of each kind."""
    unregistered: Mapping[str, str] = field(default_factory=dict)
    """Why mirrors are not registered in the catalog of query engines; see :class:`RegisteredTables`."""
    two_phase: bool = False
    at_work: str | None = None
    """The process that writes to the lake, as text. The process reads the slot or will read it soon, even if the slot
    shows no reader: while a process drains a backlog by SQL functions, it does not hold the slot between two calls."""


Severity = Literal["error", "warning"]

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Problem:
    """A problem: the affected thing, what is wrong, and what to do. An ``error`` means that the lake does not follow
    the source, or that the source is at risk. Other problems are warnings."""

    severity: Severity
    thing: str
    what: str
    do: str
    code: ProblemCode

    def to_json(self) -> ProblemDocument:
        return {"severity": self.severity, "code": self.code.value, "what": f"{self.thing} {self.what}", "do": self.do}


def error(code: ProblemCode, thing: str, what: str, do: str) -> Problem:
    return Problem("error", thing, what, do, code)


def warning(code: ProblemCode, thing: str, what: str, do: str) -> Problem:
    return Problem("warning", thing, what, do, code)


def size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def problem_of(error: Exception, thing: str) -> Problem:
    """The problem for an error that was raised while ``thing`` was read."""
    code = _code(error, thing)
    if not isinstance(error, PgcdcError):
        do = "check that its folder exists and is complete"
        return Problem("error", thing, f"cannot be read: {type(error).__name__}", do, code)
    where = f", at LSN {error.lsn}" if error.lsn is not None else ""
    log = "see the source's server log" if thing == "source" else "see run.log in the folder of the setting `state`"
    return Problem("error", error.thing or thing, f"{error.what}{where}", error.do or log, code)


def _code(error: Exception, thing: str) -> ProblemCode:
    codes = {
        WrongSource: ProblemCode.WRONG_SOURCE,
        WrongLake: ProblemCode.WRONG_LAKE,
        SettingsError: ProblemCode.WRONG_SETTINGS,
        StoreFailed: ProblemCode.LAKE_UNREACHABLE,
    }
    found = next((code for kind, code in codes.items() if isinstance(error, kind)), None)
    return found or (ProblemCode.SOURCE_UNREACHABLE if thing == "source" else ProblemCode.LAKE_UNREADABLE)


def span(of: timedelta) -> str:
    """A span of time in its largest whole unit, like ``3 hours``."""
    seconds = int(of.total_seconds())
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'s' * (count != 1)}"
    return f"{seconds} second{'s' * (seconds != 1)}"
