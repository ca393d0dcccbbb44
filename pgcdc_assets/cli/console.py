"""Writes the output of commands: lines, and progress on stderr. Control characters are made visible, because names come
from the source and may contain any character. On a terminal, progress is a few changing lines and short notes,
otherwise plain lines, or JSON (:mod:`pgcdc_assets.logs`). Rich is imported only for progress, so that help and
``status`` are fast."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from pgcdc_assets import logs
from pgcdc_assets.cli.livelines import LiveLines

if TYPE_CHECKING:
    from pgcdc_assets.flow.maintenance import MaintenanceReport
    from pgcdc_assets.flow.reports import RangeReport, RunState, SyncReport
    from pgcdc_assets.mirror.target import CopyReport
    from pgcdc_assets.source.slot.blockers import Blocker

_log = logging.getLogger("pgcdc_assets.cli")
_LEVELS = {"pgcdc": logging.WARNING, "warning": logging.WARNING, "error": logging.ERROR, "info": logging.INFO}
"""The levels of lines with these beginnings."""
_SHOW_SECONDS = 0.5
"""Seconds between two looks at the run's state. Each look asks the source for its position."""


def visible(text: str) -> str:
    r"""The text on one line. Control characters, and characters that change the direction of text, are written as
    escapes, like ``\n`` and ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def say(text: str, *, err: bool = False, **fields: Any) -> None:
    """Write one line to stdout, or with ``err`` to stderr: as text, or as JSON with these fields."""
    if err and logs.as_json():
        prefix, _, rest = text.partition(": ")
        level = _LEVELS.get(prefix)
        _log.log(level or logging.INFO, rest if level else text, extra=fields)
    else:
        click.echo(visible(text), err=err)


def show(text: str) -> None:
    """Write a result to stdout as it is. On a terminal, control characters are made visible."""
    click.echo("\n".join(map(visible, text.split("\n"))) if sys.stdout.isatty() else text, nl=False)


class ConsoleProgress:
    """Shows a run's progress to the user of a command, as the watcher of :class:`DagsterObserver`. Writes to its own
    copy of stderr, because a run redirects the process's streams."""

    def __init__(self) -> None:
        from rich.console import Console

        self._terminal = sys.stderr.isatty() and not logs.as_json()
        stream = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
        weakref.finalize(self, stream.close)
        self._console = Console(file=stream, force_terminal=self._terminal, highlight=False, soft_wrap=True)
        self._live: LiveLines | None = None
        self._due = 0.0
        self._started = time.monotonic()
        self.stop = threading.Event()
        """Set this event to end the run at a boundary."""
        self.copies: list[CopyReport] = []
        self.report: SyncReport | None = None
        """The report of a sync, once it has ended."""
        self.maintenance: MaintenanceReport | None = None
        self.ranges: list[RangeReport] = []

    @contextmanager
    def shown(self, what: str) -> Iterator[ConsoleProgress]:
        if not self._terminal:
            yield self
            return
        self._live = LiveLines(visible(what))
        with self._console.status(self._live):
            yield self
        self._live = None

    def note(self, text: str, **fields: Any) -> None:
        """Write a line that stays. JSON has ``fields`` too, text does not."""
        if logs.as_json():
            _log.info(text, extra=fields)
            return
        text = visible(text)
        if self._terminal:
            self._console.print(f"[dim]{time.monotonic() - self._started:6.1f} s[/]  {_escaped(text)}")
        else:
            self._console.print(f"{time.monotonic() - self._started:.1f}s {_escaped(text)}")

    def waiting(self, holders: Sequence[Blocker]) -> None:
        """Show the sessions that a snapshot or slot waits for."""
        self.note(f"PostgreSQL waits for {'; '.join(str(holder) for holder in holders)}")

    # Methods of the watcher -------------------------------------------------------------------

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        line = f"{stage}: {logs.in_words(message, numbers)}"
        if self._live is not None:
            self._live.message = visible(line)
        elif logs.as_json():
            self.note(message, stage=stage, **numbers)
        else:
            self.note(line)

    def moving(self, now: Callable[[], RunState]) -> None:
        if self._live is not None and time.monotonic() >= self._due:
            self._live.update(now())
            self._due = time.monotonic() + _SHOW_SECONDS

    def copied(self, report: CopyReport) -> None:
        self.copies.append(report)
        self.note(
            f"copied {report.table}: {report.rows:,} rows in {report.seconds:.1f} s", stage="snapshot",
            table=str(report.table), lsn=str(report.consistent_point), rows=report.rows, bytes=report.bytes,
            seconds=round(report.seconds, 3),
        )  # fmt: skip

    def range_closed(self, report: RangeReport) -> None:
        self.ranges.append(report)
        changed = len(report.tables)
        rows = sum(report.rows.values())
        self.note(
            f"range {report.span}: {report.transactions:,} transactions, {rows:,} rows, {changed} tables",
            stage="publish", start_lsn=str(report.span.start), lsn=str(report.span.end), rows=rows,
            transactions=report.transactions, bytes=report.bytes, lag_bytes=report.lag_bytes,
        )  # fmt: skip
        for table, turn in report.tables.items() if logs.as_json() else ():
            self.note(
                f"applied to {table}: {turn.inserted} rows inserted, {turn.updated} updated, {turn.deleted} deleted",
                stage="apply", table=str(table), lsn=str(turn.replay_lsn), inserted=turn.inserted,
                updated=turn.updated, deleted=turn.deleted, seconds=round(turn.seconds_apply, 3),
            )  # fmt: skip

    def finished(self, report: SyncReport) -> None:
        self.report = report

    def maintained(self, report: MaintenanceReport) -> None:
        self.maintenance = report


def _escaped(text: str) -> str:
    """The text without markup of Rich."""
    from rich.markup import escape

    return escape(text)
