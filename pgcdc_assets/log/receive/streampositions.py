"""Where a stream stands, and how far the run is to receive. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.core.endpos import Endpos
from pgcdc_assets.core.lsn import ZERO, Lsn


@dataclass
class StreamPositions:
    """Of one connection."""

    transform_lsn: Lsn
    """Where the log stood as it began."""
    boundary: Lsn = ZERO
    """The last transaction boundary that has been received: all that ends at or below it is taken."""
    seen: Lsn = ZERO
    """All transactions that commit below it have been received (it need be no boundary)."""
    goal: Endpos | None = None
    arrived: bool = False
    """The goal was reached; the frames after it are left out."""

    def __post_init__(self) -> None:
        self.boundary = self.transform_lsn

    def holds(self, commit_lsn: int) -> bool:
        """Whether the log has the transaction that commits there: no boundary lies inside a commit record."""
        return commit_lsn < self.transform_lsn

    def reached(self, lsn: int) -> None:
        self.boundary = max(self.boundary, Lsn(lsn))

    def passed(self, lsn: int) -> None:
        self.seen = max(self.seen, Lsn(lsn))

    def is_beyond(self, lsn: Lsn, end_lsn: Lsn) -> bool:
        """Whether a record lies past the goal; then the goal is reached. ``lsn`` is its start, a boundary."""
        if self.goal is None or not (self.goal.arrived_at_begin(lsn) or not self.goal.allows(end_lsn)):
            return False
        self.arrived = True
        if self.goal.allows(lsn):
            self.reached(lsn)
        return True
