"""The sync's side of requests: work that other commands ask of a run, done between its turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import CopyOutdated, LakeError, PgcdcError
from pgcdc_assets.flow import backfill, hold, requests
from pgcdc_assets.flow.forgetting import forget
from pgcdc_assets.flow.maintenance import Allowance, Maintenance, MaintenanceReport
from pgcdc_assets.flow.outcomes import Operation, OperationKind
from pgcdc_assets.flow.plain import to_plain
from pgcdc_assets.flow.reports import RangeReport, SyncReport
from pgcdc_assets.flow.requests import Answer, Job, Request
from pgcdc_assets.flow.work import Work
from pgcdc_assets.mirror.target import CopyReport

OUTCOMES = {
    Job.REPAIR: OperationKind.REPAIR,
    Job.CHECK: OperationKind.BACKFILL,
    Job.DERIVE: OperationKind.BACKFILL,
    Job.MESSAGES: OperationKind.BACKFILL,
    Job.APPLY: OperationKind.BACKFILL,
    Job.MAINTAIN: OperationKind.MAINTENANCE,
    Job.FORGET: OperationKind.FORGETTING,
}
"""The kind of operation as which a job's end is recorded, whoever does the job."""
COPIES = 3
"""Copies of one table for one request, if somebody alters the table after each of them."""


def ranged(work: Work, request: Request) -> RangeReport:
    """Do a job on a range of the log."""
    assert request.span is not None
    if request.job is Job.CHECK:
        return backfill.check(work, request.span)
    if request.job is Job.MESSAGES:
        return backfill.messages(work, request.span)
    if request.job is Job.REPAIR:
        (table,) = request.tables
        return backfill.repair(work, table, request.span)
    do = backfill.derive if request.job is Job.DERIVE else backfill.apply
    return do(work, request.tables, request.span)


def maintained(work: Work, operation: Operation, allowance: Allowance) -> MaintenanceReport:
    """Do a maintenance; what it could not do is recorded with the operation's end."""
    report = Maintenance(work, allowance).run()
    operation.failures += [LakeError(error) for _, error in report.failed]
    operation.given_up = allowance.stop.is_set
    return report


class ServingRun(Protocol):
    """The part of a run that serving needs."""

    @property
    def following(self) -> bool:
        """Whether the run goes on: only such a run takes requests."""

    @property
    def copying(self) -> bool:
        """Whether copies are under way."""

    @property
    def rests(self) -> str | None:
        """Why nothing is copied or applied for now."""

    @property
    def held_up(self) -> str | None:
        """What the copies under way wait for, as far as they have said."""

    def copy_anew(self, tables: Sequence[TableName]) -> None:
        """Begin copies of these; UnknownTable for one that is not published. Called while no copies are under way."""

    def heal(self, tables: Sequence[TableName]) -> None:
        """Follow these again, which were set aside; raises as :meth:`TablesProgress.heal`."""

    def rest_on(self) -> None:
        """Take mirrors and log as they are now, and publish them: they were worked on between two turns."""

    def summary(self) -> SyncReport:
        """The report of the run so far."""


@dataclass
class _Copies:
    """A request for copies that have begun."""

    request: Request
    before: SyncReport
    """The run's report at the time when the request was taken up."""
    left: dict[TableName, PgcdcError] = field(default_factory=dict)
    """Tables that could not be copied for now, and why."""


class Serving:
    """One request at a time. Every method runs in the run's own thread."""

    def __init__(self, work: Work, run: ServingRun, allowance: Callable[[float | None], Allowance]) -> None:
        self._work = work
        self._run = run
        self._allowance = allowance
        self._copies: _Copies | None = None
        self._last = ""
        """The number of the last request that was taken up: it stands until its command has read the answer."""
        self._waits: Answer | None = None
        """What the command was last told of why its work waits."""

    @property
    def busy(self) -> bool:
        """Whether a command waits for copies that this run has begun or made, and has yet to publish."""
        return self._copies is not None

    def serve(self) -> bool:
        """Do what is asked for, if anything is; returns whether anything was done."""
        request = requests.current(self._work.layout)
        if self._copies is not None:
            return self._look_after(self._copies, request)
        if request is None or request.number == self._last or not self._run.following:
            return False
        obstacle = self._obstacle(request)
        if obstacle is not None:
            self._tell(request, obstacle)
            return False
        self._last = request.number
        self._say(f"{request} begins")
        try:
            self._begin(request)
        except PgcdcError as error:
            self._answer(Answer.of_error(request.number, error))
        return True

    def not_copied(self, table: TableName, failure: PgcdcError) -> None:
        """Note that the table is left for a later copy."""
        if self._copies is not None:
            self._copies.left[table] = failure

    def _obstacle(self, request: Request) -> str | None:
        """Why the work may not begin now. It waits for copies under way that it would meet, and for a ``verify`` that
        has not got its point yet, because that compares what stands there."""
        held = hold.current(self._work.layout)
        if held is not None and (held.lsn is None or not self._work.progress.points.has(held.lsn)):
            return "waits for a verify"
        if request.job in (Job.SNAPSHOT, Job.HEAL) and self._run.rests is not None:
            return self._run.rests
        meets = request.job in (Job.SNAPSHOT, Job.MAINTAIN) or any(
            name in self._work.progress and self._unsettled(name) for name in request.tables
        )
        return self._of_copies("waits for copies under way") if self._run.copying and meets else None

    def _of_copies(self, otherwise: str) -> str:
        return f"the copy {self._run.held_up}" if self._run.held_up else otherwise

    def _tell(self, request: Request, waits: str) -> None:
        """Tell the command why its work waits."""
        answer = Answer(request.number, waits=waits)
        if answer != self._waits:
            self._waits = answer
            requests.answered(self._work.layout, answer)

    def _unsettled(self, name: TableName) -> bool:
        entry = self._work.progress[name]
        return entry.state in (TableState.WAITING, TableState.COPYING) or entry.reshaping

    def _begin(self, request: Request) -> None:
        if request.job in (Job.SNAPSHOT, Job.HEAL):
            (self._run.copy_anew if request.job is Job.SNAPSHOT else self._run.heal)(request.tables)
            self._copies = _Copies(request, self._run.summary())
            return
        with self._work.operation.within(OUTCOMES[request.job], request.command) as operation:
            report: Any
            try:
                if request.job is Job.FORGET:
                    report = forget(self._work, request.tables)
                elif request.job is Job.MAINTAIN:
                    report = maintained(self._work, operation, self._allowance(request.max_seconds))
                else:
                    report = ranged(self._work, request)
            finally:
                self._run.rest_on()
        self._answer(Answer(request.number, to_plain(report)))

    # Copies -----------------------------------------------------------------------------------

    def _look_after(self, copies: _Copies, request: Request | None) -> bool:
        """Answer once each table is in a consistent point, or is known to come into none."""
        if request is None or request.number != copies.request.number:
            self._say(f"{copies.request} waits no more: its copies go on")
            self._copies = None
            return False
        if self._run.rests is not None:
            self._tell(request, self._run.rests)
            return False
        if self._run.held_up is not None:
            self._tell(request, self._of_copies(""))
        tables = [name for name in copies.request.tables if name in self._work.progress]
        restless = next((name for name in tables if self._unsettled(name) and self._given_up(copies, name)), None)
        if restless is not None:
            self._copies = None
            failure = copies.left.get(restless) or self._restless(restless)
            self._answer(Answer.of_error(request.number, failure))
            return True
        if not all(self._ended(name) for name in tables):
            return False
        self._copies = None
        report = self._report(copies)
        self._work.operation.renew([str(copy.table) for copy in report.copied])
        self._answer(Answer(request.number, to_plain(report)))
        return True

    def _ended(self, name: TableName) -> bool:
        """Whether the table needs no more waiting: the first point that lists a copied table makes it streaming, and a
        table that is set aside is not copied."""
        return self._work.progress[name].state in (TableState.STREAMING, TableState.SET_ASIDE)

    def _given_up(self, copies: _Copies, name: TableName) -> bool:
        """Whether no copy of the table is under way, or somebody has made several copies of it useless already."""
        return not self._run.copying or len([one for one in self._made(copies) if one.table == name]) >= COPIES

    def _restless(self, name: TableName) -> CopyOutdated:
        reason = self._work.progress[name].reason or "was altered after or during each of its copies"
        return CopyOutdated(reason, thing=f"table {name}", do="the running sync copies it later: see `pgcdc status`")

    def _report(self, copies: _Copies) -> SyncReport:
        """The run's report since the request was taken up, as if that were a run of its own, with the copies that were
        asked for."""
        before, now = copies.before, self._run.summary()
        made = {copy.table: copy for copy in self._made(copies)}
        return replace(
            now,
            start=before.end,
            copied=[made[name] for name in dict.fromkeys(copies.request.tables) if name in made],
            turns=now.turns - before.turns,
            transactions=now.transactions - before.transactions,
            rows=now.rows - before.rows,
            stream_aborts=now.stream_aborts - before.stream_aborts,
            seconds=now.seconds - before.seconds,
        )

    def _made(self, copies: _Copies) -> list[CopyReport]:
        """All copies since the request was taken up, whoever asked for them."""
        return self._run.summary().copied[len(copies.before.copied) :]

    def _answer(self, answer: Answer) -> None:
        requests.answered(self._work.layout, answer)
        self._say("answered" if answer.error is None else f"failed: {answer.error['what']}")

    def _say(self, message: str) -> None:
        self._work.observer.progress("serve", message)
