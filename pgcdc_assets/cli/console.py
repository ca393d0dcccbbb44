"""Writes the output of commands: lines, and progress on stderr. Control characters are made visible, because names come
from the source and may contain any character. On a terminal, progress is shown as a few changing lines and short notes.
Otherwise it is written as plain lines, or as JSON (:mod:`pgcdc_assets.logs`). Rich is imported only for progress, so
that help and ``status`` are fast."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from pgcdc_assets import logs

if TYPE_CHECKING:
    from rich.text import Text

    from pgcdc_assets.flow.maintenance import MaintenanceReport
    from pgcdc_assets.flow.reports import RangeReport, RunState, SyncReport
    from pgcdc_assets.mirror.target import CopyCount, CopyReport
    from pgcdc_assets.source.slot.blockers import Blocker

_log = logging.getLogger("pgcdc_assets.cli")
_LEVELS = {"pgcdc": logging.WARNING, "warning": logging.WARNING, "error": logging.ERROR, "info": logging.INFO}
"""The log level of a line, by the word before its first colon."""
_SHOW_SECONDS = 0.5
"""Seconds between two readings of the run's state. Each reading asks the source for its WAL position."""


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


def waits(holders: Sequence[Blocker], what: str) -> str:
    """Says for which transactions PostgreSQL waits. ``what`` continues after them. The role may see none of them."""
    who = "; ".join(str(holder) for holder in holders) or "older transactions"
    return f"PostgreSQL waits for {who}; {what} continues when these transactions end"


def show(text: str) -> None:
    """Write a result to stdout as it is. On a terminal, control characters are made visible."""
    click.echo("\n".join(map(visible, text.split("\n"))) if sys.stdout.isatty() else text, nl=False)


RATE_SECONDS: Final = 10.0
"""Rates are averages over this time, because a run counts its rows in bursts of many rows."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class LiveLines:
    """The lines that change on a terminal while a command runs. ``what``: the command. ``clock`` returns seconds; tests
    replace it."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._seen: deque[tuple[float, RunState]] = deque()
        self._copies: CopyCount | None = None
        self._copying_since = 0.0
        self.message = ""
        """The last message of the run."""

    def update(self, state: RunState) -> None:
        now = self._clock()
        self._seen.append((now, state))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_SECONDS:
            self._seen.popleft()
        if state.copies is not self._copies:
            self._copies, self._copying_since = state.copies, now

    @property
    def lines(self) -> list[str]:
        """The line of the run, the line of its copies (if there are any), and the last message (if there is one)."""
        found = [self._what]
        if self._seen:
            found = [f"{self._what}: {self._run()}"]
        if self._copies is not None:
            found.append(f"copies: {self._progress(self._copies)}")
        return [*found, *([self.message] if self.message else [])]

    def __rich__(self) -> Text:
        """Rich calls this several times a second, so the progress of copies is shown also between two updates."""
        from rich.text import Text

        return Text("\n".join(self.lines), no_wrap=True, overflow="ellipsis")

    def _run(self) -> str:
        state = self._seen[-1][1]
        parts = [str(state.phase)]
        if state.lag_bytes is not None:
            seconds = f" and {state.lag_seconds:.1f} s" if state.lag_seconds else ""
            parts += [f"at {state.replay_lsn}", f"{amount(state.lag_bytes)}{seconds} behind"]
        return ", ".join([*parts, f"{self._rate():,.0f} rows/s"])

    def _rate(self) -> float:
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return max(0, last.rows - first.rows) / (now - began) if now > began else 0.0

    def _progress(self, copies: CopyCount) -> str:
        rows, read = copies.read()
        parts = [f"table {min(copies.copied + 1, copies.tables)} of {copies.tables}", f"{rows:,} rows"]
        if copies.bytes:
            parts.append(f"{amount(min(read, copies.bytes))} of {amount(copies.bytes)}")
        if read and copies.bytes > read:
            seconds = (self._clock() - self._copying_since) * (copies.bytes - read) / read
            parts.append(f"{duration(seconds)} left")
        return ", ".join(parts)


def amount(count: int) -> str:
    """A number of bytes in the largest unit in which it is at least 1, like ``1.5 MiB``."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """A time in two units at most, like ``2 h 5 min``."""
    whole = int(timedelta(seconds=max(1.0, seconds)).total_seconds())
    if whole < 60:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class ConsoleProgress:
    """Shows a run's progress to the user of a command. :class:`DagsterObserver` calls it as its watcher. Writes to its
    own copy of stderr, because a run redirects the process's streams."""

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
        """The report of a sync; None until the sync has ended."""
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
        """Write a line that later progress does not overwrite. ``fields`` are written only in JSON."""
        if logs.as_json():
            _log.info(text, extra=fields)
            return
        from rich.markup import escape

        text = visible(text)
        if self._terminal:
            self._console.print(f"[dim]{time.monotonic() - self._started:6.1f} s[/]  {escape(text)}")
        else:
            self._console.print(f"{time.monotonic() - self._started:.1f}s {escape(text)}")

    def waiting(self, holders: Sequence[Blocker]) -> None:
        """Show the sessions whose transactions must end before PostgreSQL creates a slot or snapshot."""
        self.note(waits(holders, "the command"))

    # Called during a run, because this object is the run's watcher -----------------------------

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
            f"applied LSN range {report.span}: {report.transactions:,} transactions, {rows:,} rows, {changed} tables",
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
