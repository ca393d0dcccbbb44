"""Observers of a run: Dagster's events, a terminal's progress, a test's list."""

from __future__ import annotations

from typing import Protocol

from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.flow.reports import RangeReport, Restructured
from pgcdc_assets.mirror.target import CopyReport


class Observer(Protocol):
    """Called in the run's own thread, in LSN order; an exception ends the run at a boundary."""

    def known_ranges(self) -> list[LsnRange]:
        """The registered ranges, in order; new ones continue where the last ends."""

    def copied(self, report: CopyReport) -> None:
        """A table's copy stands in its mirror."""

    def restructured(self, report: Restructured) -> None:
        """A mirror has followed a change of its table's structure, or waits for a copy because of it."""

    def range_closed(self, report: RangeReport) -> None:
        """A range is in the log and applied to every followed table; what it changed is published.

        Transactions that change no table, such as one with only a message, need no point: the newest point may then
        stand below the range's end.
        """

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        """For people; nothing may depend on it."""


class Silent:
    """An observer that keeps its ranges in memory and says nothing."""

    def __init__(self) -> None:
        self.ranges: list[RangeReport] = []
        self.copies: list[CopyReport] = []
        self.structures: list[Restructured] = []

    def known_ranges(self) -> list[LsnRange]:
        return [report.span for report in self.ranges]

    def copied(self, report: CopyReport) -> None:
        self.copies.append(report)

    def restructured(self, report: Restructured) -> None:
        self.structures.append(report)

    def range_closed(self, report: RangeReport) -> None:
        self.ranges.append(report)

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        """Say nothing."""
