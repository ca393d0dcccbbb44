"""Stores every measurement, and computes medians and ratios to the floor of the same workload."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

LATENCY = "L"
"""The workload whose curves are lags in seconds."""


@dataclass(frozen=True)
class Run:
    """One measurement. ``cpu`` has the seconds and ``peak`` the bytes of resident memory, by kind of process."""

    workload: str
    what: str
    seconds: float
    rows: int
    bytes: int = 0
    cpu: Mapping[str, float] = field(default_factory=dict)
    peak: Mapping[str, int] = field(default_factory=dict)
    more: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[tuple[float, float]] = ()
    """A value that was read repeatedly: pairs of seconds and value."""

    def __str__(self) -> str:
        cpu = " ".join(f"{kind} {seconds:.1f}" for kind, seconds in self.cpu.items() if seconds >= 0.05)
        more = " ".join(f"{name} {value:,.2f}" for name, value in self.more.items())
        return (f"{self.workload:<4} {self.what:<34} {self.seconds:8.2f} s {self.rows / self.seconds:11,.0f} rows/s"
                f"  cpu: {cpu}  {more}")  # fmt: skip


@dataclass
class Record:
    """``floors``: for each workload, the name of the measurement with which its other measurements are compared."""

    scale: float
    floors: Mapping[str, str]
    runs: list[Run] = field(default_factory=list)

    def add(self, run: Run) -> None:
        self.runs.append(run)
        print(run, flush=True)

    def rates(self, workload: str, what: str) -> list[float]:
        """Rows per second of each measurement with this name."""
        return [run.rows / run.seconds for run in self.runs if (run.workload, run.what) == (workload, what)]

    def ratio(self, workload: str, what: str) -> float | None:
        """Median of the rates divided by the median of the floor's rates."""
        floor = self.rates(workload, self.floors.get(workload, ""))
        return statistics.median(self.rates(workload, what)) / statistics.median(floor) if floor else None

    def table(self) -> list[str]:
        """A table in Markdown, with a row for each kind of measurement."""
        lines = ["| workload | what | runs | s, median | rows/s, median (least – most) | MB/s | ratio | CPU seconds | "
                 "peak MB |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for workload, what in dict.fromkeys((run.workload, run.what) for run in self.runs):
            lines.append(self._line(workload, what))
        return lines

    def _line(self, workload: str, what: str) -> str:
        runs = [run for run in self.runs if (run.workload, run.what) == (workload, what)]
        rates, ratio = sorted(self.rates(workload, what)), self.ratio(workload, what)
        spread = f"{statistics.median(rates):,.0f} ({rates[0]:,.0f} – {rates[-1]:,.0f})"
        volume = statistics.median(run.bytes / run.seconds / 1e6 for run in runs)
        kinds = dict.fromkeys(kind for run in runs for kind in run.cpu)
        cpu = {kind: statistics.median(run.cpu.get(kind, 0.0) for run in runs) for kind in kinds}
        peak = {kind: max(run.peak.get(kind, 0) for run in runs) for kind in kinds}
        seconds = statistics.median(run.seconds for run in runs)
        cells = [
            workload, what, str(len(runs)), f"{seconds:.2f}", spread, f"{volume:.0f}" if volume else "",
            "" if ratio is None else f"{ratio:.2f}",
            ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in cpu.items() if seconds >= 0.05),
            ", ".join(f"{kind} {size / 1e6:.0f}" for kind, size in peak.items() if size),
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({**machine(), "scale": self.scale, "runs": [asdict(run) for run in self.runs]}, indent=1)
        )


def machine() -> dict[str, Any]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
    }
