"""The lines that a running command shows on a terminal: what the run does, how far it is, how fast it goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.text import Text

    from pgcdc_assets.flow.reports import RunState
    from pgcdc_assets.mirror.target import CopyCount

RATE_SECONDS: Final = 10.0
"""Rates are averages over this time, so that they do not jump with each turn."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class LiveLines:
    """``what``: the command. Texts are without control characters. ``clock``: seconds, for tests."""

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
        """The line of the run, the line of its copies, and the last message. Absent lines are left out."""
        found = [self._what]
        if self._seen:
            found = [f"{self._what}: {self._run()}"]
        if self._copies is not None:
            found.append(f"copies: {self._progress(self._copies)}")
        return [*found, *([self.message] if self.message else [])]

    def __rich__(self) -> Text:
        """Rich calls this several times a second, so that copies are seen to go on during a long turn."""
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
    """A number of bytes in the largest unit that leaves a whole number, like ``1.5 MiB``."""
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
