"""The table that counts survived crashes by fault point and kind of crash."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pgcdc_assets.core.faultpoints import FaultPoint
from tests.crash.faults import Kind

ANY_TIME = "at a random time"


@dataclass
class Tally:
    """Counts the cycles in which the crash interrupted a change and all checks succeeded."""

    seed: int
    survived: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    levels: Counter[str] = field(default_factory=Counter)

    def add(self, level: str, point: FaultPoint | None, kind: Kind) -> None:
        self.survived[point or ANY_TIME, kind] += 1
        self.levels[level] += 1

    def markdown(self) -> str:
        """One row per fault point, in the order in which data reaches the points, and one column per kind of crash."""
        kinds = [kind for kind in Kind if any(found == kind for _, found in self.survived)]
        points = [point for point in (*FaultPoint, ANY_TIME) if any(found == point for found, _ in self.survived)]
        head = [f"| fault point | {' | '.join(kinds)} | all |", "|---" * (len(kinds) + 2) + "|"]
        rows = [self._row(f"`{point}`" if point != ANY_TIME else point, [point], kinds) for point in points]
        told = ", ".join(f"{count} {level}" for level, count in self.levels.items())
        return "\n".join([f"Seed {self.seed}: {told}.", "", *head, *rows, self._row("all", points, kinds), ""])

    def _row(self, name: str, points: list[str], kinds: list[Kind]) -> str:
        counts = [sum(self.survived[point, kind] for point in points) for kind in kinds]
        return f"| {name} | {' | '.join(str(count or '') for count in counts)} | {sum(counts)} |"
