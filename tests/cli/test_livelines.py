"""The lines that show the progress of a running command on a terminal."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from pgcdc_assets.cli.console import ConsoleProgress, LiveLines, amount, duration
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.flow.reports import Phase, RunState
from pgcdc_assets.mirror.target import CopyCount
from tests.waiting import wait_for

STATE = RunState(Phase.FOLLOWING, Lsn(0x1A2B3C), 12_288, 0.4, 0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_live_line_shows_only_the_command_until_the_run_reports_its_state() -> None:
    assert LiveLines("follow").lines == ["follow"]


def test_the_live_line_shows_phase_lsn_lag_and_rate(clock: Clock) -> None:
    live = LiveLines("follow", clock)
    live.update(STATE)
    clock.now += 2
    live.update(replace(STATE, rows=5_000))
    assert live.lines == ["follow: following, at 0/1A2B3C, 12.0 KiB and 0.4 s behind, 2,500 rows/s"]
    live.update(replace(STATE, rows=5_000, lag_bytes=0, lag_seconds=0.0))
    assert live.lines == ["follow: following, at 0/1A2B3C, 0 B behind, 2,500 rows/s"]


def test_the_live_line_shows_the_rate_of_the_last_seconds(clock: Clock) -> None:
    live = LiveLines("sync", clock)
    for rows in (0, 1_000, *(1_000 for _ in range(15))):
        live.update(replace(STATE, rows=rows))
        clock.now += 1
    assert live.lines[0].endswith("0 rows/s")


def test_the_live_line_of_copies_shows_table_rows_bytes_and_time_left(clock: Clock) -> None:
    live, read = LiveLines("sync", clock), (0, 0)
    copies = CopyCount(12, read=lambda: read)
    before = RunState(Phase.COPYING, Lsn(0), None, 0.0, 0, copies)
    live.update(before)
    assert live.lines == ["sync: copying, 0 rows/s", "copies: table 1 of 12, 0 rows"]
    copies.bytes, copies.copied, read = 40 << 30, 2, (1_200_000, 10 << 30)
    clock.now += 600
    # The line shows new progress even if the run has reported no new state, because a turn may take long while the
    # copies go on.
    assert live.lines[1] == "copies: table 3 of 12, 1,200,000 rows, 10.0 GiB of 40.0 GiB, 30 min left"
    copies.copied, read = 12, (9_000_000, 41 << 30)
    assert live.lines[1] == "copies: table 12 of 12, 9,000,000 rows, 40.0 GiB of 40.0 GiB"
    live.update(STATE)
    assert len(live.lines) == 1


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (3 << 50, "3.0 PiB")]
)
def test_bytes_are_shown_with_a_fitting_unit(count: int, text: str) -> None:
    assert amount(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (59, "59 s"), (61, "1 min"), (7_500, "2 h 5 min")])
def test_durations_are_shown_in_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Screen:
    """A pseudo-terminal as stderr."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._master, slave = pty.openpty()
        patch.setattr(sys, "stderr", os.fdopen(slave, "w"))
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        self._said = bytearray()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def words(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._said.decode(errors="replace"))

    def _read(self) -> None:
        with suppress(OSError):
            while piece := os.read(self._master, 65536):
                self._said += piece


def test_a_terminal_shows_the_runs_state_and_keeps_the_lines_about_events(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    progress = ConsoleProgress()
    asked: list[int] = []

    def state() -> RunState:
        asked.append(1)
        return replace(STATE, copies=CopyCount(3, 1))

    with progress.shown("follow"):
        progress.moving(state)
        progress.moving(state)
        progress.progress("watch", "table [b]public.a[/b]\nb: is published now")
        progress.note("copied public.a: 3 rows in 0.1 s")
    assert asked == [1], "the source is asked twice a second at most"
    wait_for(lambda: "copied public.a" in screen.words, 10, "the note")
    assert "follow: following, at 0/1A2B3C, 12.0 KiB and 0.4 s behind, 0 rows/s" in screen.words
    assert "copies: table 2 of 3, 0 rows" in screen.words
    assert "watch: table [b]public.a[/b]\\nb: is published now" in screen.words


def test_without_a_terminal_lines_have_no_escape_sequences_and_the_source_is_not_queried(
    capfd: pytest.CaptureFixture[str],
) -> None:
    progress = ConsoleProgress()
    with progress.shown("follow"):
        progress.moving(lambda: pytest.fail("asked the source"))
        progress.progress("watch", "table public.a: is published now")
    err = capfd.readouterr().err
    assert err.endswith("s watch: table public.a: is published now\n")
    assert "\x1b" not in err
