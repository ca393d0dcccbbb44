"""An engine that only records the calls that it gets, for tests of jobs and assets without a source and Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import psutil

from pgcdc_assets.core.lsn import ZERO, Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs.keys import Names
from pgcdc_assets.defs.observer import Watcher
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance, MaintenanceReport
from pgcdc_assets.flow.reports import MessagesReport, Observer, RangeReport, SyncReport, TableTurn
from pgcdc_assets.mirror.target import CopyReport
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.lease import ProcessName
from tests.defs.catalogs import NAMES

QUIET = {"console": {"config": {"log_level": "CRITICAL"}}}
"""Run configuration that silences Dagster's console logger."""


@dataclass
class Script:
    """What the engine reports to its observer, and the calls that it got."""

    copies: list[CopyReport] = field(default_factory=list)
    ranges: list[RangeReport] = field(default_factory=list)
    error: PgcdcError | None = None
    maintenance: MaintenanceReport = field(default_factory=lambda: MaintenanceReport(Lsn(16), Lsn(32)))
    wait: Callable[[Bounds], None] = lambda bounds: None
    asked: list[tuple[Any, ...]] = field(default_factory=list)


class RecordingEngine:
    def __init__(self, script: Script, observer: Observer, command: str) -> None:
        self._script = script
        self._observer = observer
        self._command = command

    def sync(
        self, bounds: Bounds, *, copy_anew: Sequence[TableName] = (), heal: Sequence[TableName] = ()
    ) -> SyncReport:  # fmt: skip
        script = self._script
        script.asked.append(("sync", self._command, bounds, tuple(copy_anew), self._observer.known_ranges()))
        self._observer.progress("receive", "began", lsn="0/10")
        for copy in script.copies:
            self._observer.copied(copy)
        for report in script.ranges:
            self._observer.range_closed(report)
        script.wait(bounds)
        if script.error is not None:
            raise script.error
        end = script.ranges[-1].span.end if script.ranges else ZERO
        return SyncReport(ZERO, end, end, script.copies, len(script.ranges), 0, 0, 0, 0.5, [])

    def check_range(self, span: LsnRange) -> RangeReport:
        self._script.asked.append(("check", span))
        return report_of(span)

    def transform_range(self, tables: Sequence[TableName], span: LsnRange) -> RangeReport:
        self._script.asked.append(("transform", tuple(tables), span))
        return report_of(span, *tables)

    def messages_range(self, span: LsnRange) -> RangeReport:
        self._script.asked.append(("messages", span))
        return replace(report_of(span), messages=MessagesReport(4, span.end, 2))

    def apply_range(self, tables: Sequence[TableName], span: LsnRange) -> RangeReport:
        self._script.asked.append(("apply", tuple(tables), span))
        return report_of(span, *tables)

    def maintain(self, allowance: Allowance) -> MaintenanceReport:
        self._script.asked.append(("maintain", self._command, allowance.max_seconds))
        if self._script.error is not None:
            raise self._script.error
        return self._script.maintenance

    def repair(self, table: TableName, span: LsnRange) -> RangeReport:
        self._script.asked.append(("repair", table, span))
        return report_of(span, table)


@dataclass
class RecordingEngines:
    """Replaces the resource ``<source>_engines``."""

    script: Script

    def engine(self, settings: Settings, observer: Observer, command: str) -> RecordingEngine:
        return RecordingEngine(self.script, observer, command)

    engine_at_rest = engine


def resources(script: Script, names: Names = NAMES) -> dict[str, Any]:
    """Returns the Dagster resources of a source, with an engine that only records its calls."""
    return {names.engines: RecordingEngines(script), names.watcher: Watcher()}


def report_of(span: LsnRange, *tables: TableName, version: int = 3) -> RangeReport:
    turns = {
        table: TableTurn(
            table, span.end, version, 5, 2, 1, {"insert": 5, "update_postimage": 2, "delete": 1}, 0.1, 0.2, 44
        )
        for table in tables
    }
    return RangeReport(
        span=span,
        transactions=3,
        rows={"I": 5, "U": 2, "D": 1, "T": 0},
        bytes=1000,
        transform_lsn=span.end,
        replay_lsn=span.end,
        lag_bytes=16,
        lag_seconds=0.75,
        committed=(datetime(2026, 1, 1, 14, tzinfo=UTC), datetime(2026, 1, 1, 14, 1, tzinfo=UTC)),
        tables=turns,
        seconds={"transform": 0.1, "apply": 0.2, "publish": 0.01},
    )


def span(start: int, end: int) -> LsnRange:
    return LsnRange(Lsn(start), Lsn(end))


def dead_mark() -> str:
    """The process name of a process that has ended, in the form in which a run's tag contains it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    created = int(psutil.Process(child.pid).create_time())
    child.communicate()
    return str(replace(ProcessName.own(), pid=child.pid, started=created))
