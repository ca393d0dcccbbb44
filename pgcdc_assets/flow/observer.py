"""The interface of a run's observers, such as Dagster's events, the progress in a terminal, or the list of a test."""

from __future__ import annotations

from typing import Protocol

from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.flow.reports import RangeReport, StructureChange
from pgcdc_assets.mirror.target import CopyReport


class Observer(Protocol):
    """All methods are called in the run's own thread, in LSN order. An exception ends the run at a boundary."""

    def known_ranges(self) -> list[LsnRange]:
        """The registered ranges, in order. A new range begins where the last range ends."""

    def copied(self, report: CopyReport) -> None:
        """A table's copy was committed to its mirror."""

    def restructured(self, report: StructureChange) -> None:
        """A mirror has followed a change of its table's structure, or its table waits for a copy because of the
        change."""

    def range_closed(self, report: RangeReport) -> None:
        """A range is in the log, is applied to every followed table, and its changes are published.

        Transactions that change no table need no point, for example a transaction that only has a message. The newest
        point may then be below the range's end.
        """

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        """A message for people. No code may depend on it."""


class Silent:
    """An observer that keeps its reports in memory, and prints nothing."""

    def __init__(self) -> None:
        self.ranges: list[RangeReport] = []
        self.copies: list[CopyReport] = []
        self.structures: list[StructureChange] = []

    def known_ranges(self) -> list[LsnRange]:
        return [report.span for report in self.ranges]

    def copied(self, report: CopyReport) -> None:
        self.copies.append(report)

    def restructured(self, report: StructureChange) -> None:
        self.structures.append(report)

    def range_closed(self, report: RangeReport) -> None:
        self.ranges.append(report)

    def progress(self, stage: str, message: str, **numbers: float | str) -> None:
        """Ignore the message."""
