"""Draws the rates of each workload beside its floor, with a point for every run."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bench.record import Record


def draw(record: Record, path: Path) -> None:
    """Draw the plot; bars are medians. Draws nothing if no workload with a floor was measured."""
    workloads = [name for name in record.floors if any(run.workload == name for run in record.runs)]
    if not workloads:
        return
    figure = Figure(figsize=(4 * len(workloads), 4), layout="constrained")
    for axes, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
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
