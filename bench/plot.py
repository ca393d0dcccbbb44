"""Draws the rates of each workload next to its floor, with a dot for every measurement, and two values over time: the
WAL that a slot keeps, and the lag."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bench.record import LATENCY, Record, Run


def draw(record: Record, path: Path) -> None:
    """Draw the rates. The bars are medians. Draws nothing if no workload with a floor was measured."""
    workloads = [name for name in record.floors if any(run.workload == name for run in record.runs)]
    if not workloads:
        return
    columns = min(2, len(workloads))
    rows = -(-len(workloads) // columns)
    figure = Figure(figsize=(5 * columns, 3 * rows), layout="constrained")
    for number, workload in enumerate(workloads, 1):
        axes = figure.add_subplot(rows, columns, number)
        names = list(dict.fromkeys(run.what for run in record.runs if run.workload == workload))
        for place, what in enumerate(names):
            rates = [rate / 1000 for rate in sorted(record.rates(workload, what))]
            colour = "tab:gray" if what == record.floors[workload] else "tab:blue"
            axes.barh(place, rates[len(rates) // 2], color=colour)
            axes.plot(rates, [place] * len(rates), "k.", markersize=4)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_title(workload)
        axes.set_xlabel("thousand rows a second")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_lag(record: Record, path: Path) -> None:
    """Draw the time from each marked row's commit until the row was readable. Draws nothing if latency was not
    measured."""
    runs = [run for run in record.runs if run.workload == LATENCY and run.curve]
    if not runs:
        return
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot(*zip(*run.curve, strict=True), ".-", linewidth=0.5, markersize=4, label=run.what.split(", ", 1)[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("seconds from commit to readable")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_curves(record: Record, path: Path) -> None:
    """Draw the WAL that the slot keeps, with a colour for each kind of measurement and a line for every measurement.
    Draws nothing if it was not measured."""
    curves: dict[str, list[Run]] = {}
    for run in record.runs:
        if run.curve and run.workload != LATENCY:
            curves.setdefault(run.what, []).append(run)
    if not curves:
        return
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for place, (what, runs) in enumerate(curves.items()):
        for number, run in enumerate(runs):
            seconds, values = zip(*run.curve, strict=True)
            axes.plot(seconds, [value / 1e6 for value in values], f"C{place}", label=None if number else what)
    axes.axvline(0, color="tab:gray", linestyle=":")
    axes.set_xlabel("seconds after the later commit")
    axes.set_ylabel("MB of WAL that the slot keeps")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
