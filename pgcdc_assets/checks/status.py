"""Reports the state of slot, positions and tables, and the problems. Uses plain SQL and delta-rs, no JVM. Works before
setup, without a lake, without the source, and during a sync. A part that cannot be read is reported as a problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, cast

import psycopg

from pgcdc_assets.checks import slothealth, tablehealth
from pgcdc_assets.checks.documents import (
    InProgressDocument,
    OldestDocument,
    OutcomeDocument,
    PreparedDocument,
    SlotDocument,
    StatusDocument,
)
from pgcdc_assets.checks.facts import lowest_replayed, read_source, with_lake, with_log
from pgcdc_assets.checks.health import Facts, MessageFacts, Problem, Severity, TableFacts, problem_of
from pgcdc_assets.checks.positions import Lag, lags, text
from pgcdc_assets.checks.problemcodes import ProblemCode
from pgcdc_assets.core.formats import EPOCH
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo import shop
from pgcdc_assets.errors import (
    PgcdcError,
    SettingsError,
    SetupNeeded,
    SourceUnavailable,
    StoreFailed,
    WrongLake,
    WrongSource,
)
from pgcdc_assets.flow import lock
from pgcdc_assets.flow.outcomes import Outcome
from pgcdc_assets.flow.ownlake import refuse_other_lake
from pgcdc_assets.flow.requests import UNNAMED_SECONDS, VerifyRequest, verify_request
from pgcdc_assets.log.announcements import Announcement, announced
from pgcdc_assets.log.spill import PreparedFolder
from pgcdc_assets.log.transactions import PreparedTransaction
from pgcdc_assets.project import load_catalog
from pgcdc_assets.projectsource import is_embedded, source_of
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.connection import APPLICATION, connect
from pgcdc_assets.source.connect.failures import of_exception
from pgcdc_assets.source.slot.slot import Decoded, SlotStatus, slot_status
from pgcdc_assets.store import storage
from pgcdc_assets.structure.record import TableState

LIMITS: dict[str, Any] = {"connect_timeout": 3, "options": {"statement_timeout": "4s"}}
"""Arguments of a connection that must not wait long for a server that does not answer, or for a lock on a table."""

_LEFT_OUT = ("connected_to", "temporary", "wal_lsn")
"""Fields of the slot that status leaves out, because they are not columns of pg_replication_slots or never change."""


@dataclass(frozen=True)
class Status:
    """The state of the project. ``replay_lsn``: the lowest position of the followed tables. ``lag_bytes``: the source's
    flush LSN minus ``replay_lsn``."""

    slot: SlotStatus | None
    transform_lsn: Lsn | None
    replay_lsn: Lsn | None
    lag_bytes: int | None
    tables: tuple[TableFacts, ...]
    problems: tuple[Problem, ...]
    messages: MessageFacts | None = None
    """None if the setting ``messages`` is empty."""
    last: Mapping[str, Outcome] = field(default_factory=dict)
    """The outcome of the last operation of each kind."""
    in_progress: Announcement | None = None
    """Transactions that are not committed yet, and of which the running receiver has already received a part."""
    prepared: tuple[PreparedTransaction, ...] = ()
    """Prepared transactions, oldest first. The lake keeps them until COMMIT PREPARED or ROLLBACK PREPARED."""
    hold: VerifyRequest | None = None
    """The request of a running ``verify`` for a consistent point at the LSN of its snapshot. Until the snapshot's LSN
    is known, the sync applies nothing, up to a time limit."""
    at_work: str | None = None
    """See :attr:`Facts.at_work`."""
    time: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When the facts were read."""
    lags: Mapping[TableName, Lag] = field(default_factory=dict)
    """How far each table with a position is behind the source."""
    uncopied: int = 0
    """The number of tables without a mirror that the next run of the sync will copy."""

    @property
    def lag_seconds(self) -> float | None:
        """The largest lag of the followed tables; None if it is not known."""
        found = [self.lags[table.name].seconds for table in self.tables
                 if table.state.readable and table.name in self.lags]  # fmt: skip
        known = [seconds for seconds in found if seconds is not None]
        return max(known) if known and len(known) == len(found) else None

    @property
    def ok(self) -> bool:
        """Whether there is no problem that is an error. Warnings are ignored."""
        return not any(problem.severity == "error" for problem in self.problems)

    def to_json(self) -> StatusDocument:
        document: StatusDocument = {
            "ok": self.ok,
            "time": self.time.isoformat(timespec="seconds"),
            "version": version("pgcdc_assets"),
            "slot": {} if self.slot is None else _slot_json(self.slot),
            "at_work": self.at_work,
            "transform_lsn": text(self.transform_lsn),
            "replay_lsn": text(self.replay_lsn),
            "lag_bytes": self.lag_bytes,
            "lag_seconds": _seconds(self.lag_seconds),
            "in_progress": _in_progress_json(self.in_progress),
            "prepared": [_prepared_json(transaction) for transaction in self.prepared],
            "hold": None if self.hold is None else {"by": str(self.hold.by or ""), "lsn": text(self.hold.lsn)},
            "tables": [
                {
                    "name": str(table.name),
                    "state": str(table.state),
                    "replay_lsn": text(table.replay_lsn),
                    "lag_bytes": self.lags.get(table.name, Lag()).bytes,
                    "lag_seconds": _seconds(self.lags.get(table.name, Lag()).seconds),
                    "reason": table.reason,
                }
                for table in self.tables
            ],
            "problems": [problem.to_json() for problem in self.problems],
            "last": {kind: cast("OutcomeDocument", outcome.to_json()) for kind, outcome in self.last.items()},
        }
        if self.messages is not None:
            document["messages"] = {
                "replay_lsn": text(self.messages.complete_to), "reason": self.messages.failure,
            }  # fmt: skip
        return document


def status(settings: Settings, *, thorough: bool = True) -> Status:
    """Read the state of source, log and lake. Does not start the embedded server. Raises WrongSource or WrongLake if
    source or lake is not the project's own, and StoreFailed if the lake is out of reach.

    Without ``thorough``, ``lags`` is empty, and streaming mirrors are not checked for new commits of other writers.
    This check takes a request to the store for each table."""
    # Check first whether the store answers. If it does not, each of the many reads below would wait for its timeout.
    storage.head(settings.layout.outcomes)
    refuse_other_lake(settings)
    facts = Facts(datetime.now(UTC), settings.slot, two_phase=settings.two_phase, at_work=_at_work(settings.layout))
    unread: list[Problem] = []
    try:
        facts = replace(facts, catalog=load_catalog(settings.catalog_file))
    except SetupNeeded as error:
        do = error.do or "run `pgcdc setup`"
        unread.append(Problem("error", str(settings.catalog_file), error.what, do, ProblemCode.CATALOG_UNREADABLE))
    except OSError as error:
        found = problem_of(error, str(settings.catalog_file))
        unread.append(replace(found, code=ProblemCode.CATALOG_UNREADABLE))
    try:
        facts = _with_source(facts, settings, reachable(settings))
    except (SettingsError, WrongSource):
        raise
    except SetupNeeded:
        # The saved catalog cannot be read. The code above already reports this.
        pass
    except PgcdcError as error:
        unread.append(problem_of(error, "source"))
    except psycopg.Error as error:
        unread.append(problem_of(of_exception(error).typed("source"), "source"))
    facts, more = with_lake(facts, settings, thorough=thorough)
    prepared, damaged = _prepared(settings.layout)
    told = _status(facts, problems(facts, [*unread, *more, *damaged, *_nameless(settings.layout)]))
    return replace(
        told, in_progress=announced(settings.layout), prepared=tuple(prepared), hold=verify_request(settings.layout),
        lags=_lags(facts, settings.layout) if thorough else {},
    )  # fmt: skip


def _lags(facts: Facts, layout: Layout) -> dict[TableName, Lag]:
    """The lag of each table; empty if the log cannot be read, which is reported as a problem."""
    with suppress(PgcdcError, OSError):
        return lags(facts, layout)
    return {}


def problems(facts: Facts, unread: Iterable[Problem] = ()) -> list[Problem]:
    """The problems in ``unread``, and the problems that the rules find, errors first."""
    found = [problem for rule in (*slothealth.RULES, *tablehealth.RULES) for problem in rule(facts)]
    return sorted([*unread, *found], key=lambda problem: problem.severity != "error")


def refused(error: SettingsError | StoreFailed) -> Status:
    """A status with only this problem: a wrong setting, or a source or lake that is out of reach or not the project's
    own."""
    thing = "lake" if isinstance(error, StoreFailed | WrongLake) else "source"
    return Status(None, None, None, None, (), (problem_of(error, thing),))


def _at_work(layout: Layout) -> str | None:
    """The process that writes to the lake, as text. None if no process does, or if the lock's holder gives no pid: such
    a holder is not pgcdc."""
    found = lock.holder(layout)
    return str(found) if found is not None and found.pid else None


def reachable(settings: Settings) -> str:
    """The source's conninfo. Raises SourceUnavailable if the embedded server is the source and does not run."""
    if is_embedded(settings) and not shop.server(settings.state).running:
        raise SourceUnavailable("is not running", thing="embedded PostgreSQL",
                                do="`pgcdc sync`, `pgcdc follow` and `pgcdc up` start it")  # fmt: skip
    return source_of(settings)


def _with_source(facts: Facts, settings: Settings, conninfo: str) -> Facts:
    """Adds the facts about the source. Reads the slot's position first, then the log's position, then the end of the
    source's WAL. Positions only move up, so an LSN that is read later cannot be too low. So if the slot's position is
    above the log's position, changes are really lost, and if the log is above the WAL, it is really ahead of the
    source."""
    application = f"{APPLICATION}/status"
    with connect(conninfo, application_name=application, **LIMITS) as conn:
        slot = slot_status(conn, settings.slot)
        facts, _ = with_log(replace(facts, slot=slot), settings.layout)
        return replace(facts, source=read_source(conn, settings, slot, facts.catalog))


def _status(facts: Facts, found: Sequence[Problem]) -> Status:
    replay_lsn = lowest_replayed(facts.tables)
    behind = facts.source.flush_lsn - replay_lsn if facts.source and replay_lsn is not None else None
    return Status(
        slot=facts.slot,
        transform_lsn=facts.log.transform_lsn if facts.log else None,
        replay_lsn=replay_lsn,
        lag_bytes=None if behind is None else max(0, behind),
        tables=tuple(facts.tables),
        problems=tuple(found),
        messages=facts.messages,
        last=facts.last,
        time=facts.now,
        at_work=facts.at_work,
        uncopied=_uncopied(facts),
    )


def _uncopied(facts: Facts) -> int:
    """See :attr:`Status.uncopied`. Tables that wait with a reason, or whose mirror will be renamed, are not counted,
    because the health rules report them."""
    renamed = {left.waits_for for left in facts.left.values()}
    waiting = (table for table in facts.tables if table.state is TableState.WAITING and not table.reason)
    return sum(table.name not in renamed for table in waiting)


def _slot_json(slot: SlotStatus) -> SlotDocument:
    found = {one.name: _plain(getattr(slot, one.name)) for one in fields(slot) if one.name not in _LEFT_OUT}
    return cast("SlotDocument", found)


def _plain(value: object) -> object:
    if isinstance(value, Lsn):
        return str(value)
    if isinstance(value, Decoded):
        return vars(value)
    return value.isoformat() if isinstance(value, datetime) else value


def _in_progress_json(found: Announcement | None) -> InProgressDocument | None:
    if found is None:
        return None
    oldest: OldestDocument = {
        "xid": found.xid,
        "lsn": str(found.lsn),
        "age_seconds": round(found.age.total_seconds(), 1),
    }
    return {"transactions": found.number, "bytes": found.bytes, "oldest": oldest}


def _prepared(layout: Layout) -> tuple[list[PreparedTransaction], list[Problem]]:
    try:
        # Prepared transactions that changed no published table are stored too, but are not reported.
        found = [kept for kept in PreparedFolder(layout.change_log).pending() if kept.counted]
    except PgcdcError as error:
        return [], [problem_of(error, "prepared transactions")]
    return sorted(found, key=lambda transaction: transaction.key.end_lsn), []


def _nameless(layout: Layout) -> list[Problem]:
    """Problems for lock files that another program holds. Such a lock file does not name its holder."""
    stopped: dict[Location, tuple[Severity, str]] = {
        layout.lock: ("error", "nothing can be written to the lake"),
        layout.hold: (
            "warning",
            f"a sync updates no mirror for up to {UNNAMED_SECONDS:g} s, and `pgcdc verify` is refused",
        ),
        layout.waiting: ("warning", "commands that wait for a running sync are refused"),
    }
    do = "end that process, which may be a backup that locks files; `fuser` and `lslocks` show its pid"
    return [
        Problem(severity, f"file {place}", "is locked by an unknown process, or by a process of another account, so "
                f"{what}", do, ProblemCode.LAKE_LOCKED)
        for place in lock.nameless(layout) for severity, what in [stopped[place]]
    ]  # fmt: skip


def _prepared_json(found: PreparedTransaction) -> PreparedDocument:
    prepared = EPOCH + timedelta(microseconds=found.prepare_ts)
    return {
        "gid": found.key.gid, "xid": found.key.xid, "lsn": str(found.key.end_lsn),
        "prepared": prepared.isoformat(), "changes": found.counted,
    }  # fmt: skip


def _seconds(lag: float | None) -> float | None:
    return None if lag is None else round(lag, 1)
