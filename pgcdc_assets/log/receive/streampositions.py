"""The positions of a stream, and the goal of the run. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from pgcdc_assets.core.endpos import Endpos
from pgcdc_assets.core.lsn import ZERO, Lsn


@dataclass
class StreamPositions:
    """The positions of one connection."""

    transform_lsn: Lsn
    """The log's position when the connection began."""
    boundary: Lsn = ZERO
    """The last transaction boundary that was received: everything that ends at or below it is taken."""
    seen: Lsn = ZERO
    """All transactions that commit below it have been received. It does not have to be a boundary."""
    goal: Endpos | None = None
    arrived: bool = False
    """Whether the goal was reached. The frames past the goal are not taken."""

    def __post_init__(self) -> None:
        self.boundary = self.transform_lsn

    def holds(self, commit_lsn: int) -> bool:
        """Whether the log has the transaction that commits at ``commit_lsn``. This comparison is enough, because no
        boundary is inside a commit record."""
        return commit_lsn < self.transform_lsn

    def reached(self, lsn: int) -> None:
        self.boundary = max(self.boundary, Lsn(lsn))

    def passed(self, lsn: int) -> None:
        self.seen = max(self.seen, Lsn(lsn))

    def is_beyond(self, lsn: Lsn, end_lsn: Lsn) -> bool:
        """Whether a record is past the goal. If so, the goal is reached. ``lsn`` is the start of the record, a
        boundary."""
        if self.goal is None or not (self.goal.arrived_at_begin(lsn) or not self.goal.allows(end_lsn)):
            return False
        self.arrived = True
        if self.goal.allows(lsn):
            self.reached(lsn)
        return True
