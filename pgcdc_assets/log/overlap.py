"""What the server is asked for again, held against the end of the log.

A slot behind the log (its confirmation was lost in a crash) can bring the log's newest transaction once
more. Where another one stands in that place, or none, this WAL is not the one that the log was received
from: the source was set back to an earlier state, and has gone on from there past the log's end, on the
same timeline. No position shows that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Self

import numpy as np

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LogAhead
from pgcdc_assets.log.table import ChangeLog
from pgcdc_assets.log.tape import Run
from pgcdc_assets.source.failures import NEW_LAKE

_NO_CHANGE = np.frombuffer(b"CO", np.uint8)
"""Behind a Begin: the Commit of an empty transaction (14), or an Origin, behind which one may stand."""


@dataclass
class Overlap:
    """Where a stream begins that shows the log's newest transaction first."""

    start: Lsn
    """``commit_lsn`` of that transaction; the slot's own position where the log holds none above it."""
    xid: int | None
    """Its xid; None where none is to come, or when it has come."""

    @classmethod
    def of(cls, log: ChangeLog, confirmed: Lsn | None) -> Self | None:
        """For a slot at ``confirmed``; None where it stands at the log's end (or beyond: see ``check_slot``)."""
        if confirmed is None or confirmed >= log.position():
            return None
        batches = [batch for batch in log.batches(confirmed) if batch.transactions]
        newest = max((s.commit_max for s in log.all_segments() if s.commit_max is not None), default=None)
        if not batches or newest is None or newest < confirmed:
            return cls(confirmed, None)
        return cls(newest, batches[-1].last_xid)

    def above(self, floor: Lsn) -> Self | None:
        """What is left of it once the slot stands at ``floor``: whoever held it before us may have confirmed."""
        return self if floor <= self.start else None

    def skipped(self, run: Run, count: int) -> None:
        """The first ``count`` frames belong to what the log holds. Raises LogAhead where it does not."""
        begins = run.at("B")
        begins = begins[begins < count]
        found = run.begins(begins)
        for index, final, xid in zip(begins.tolist(), found["final_lsn"].tolist(), found["xid"].tolist(), strict=True):
            if final == self.start and self.xid is not None:
                if xid != self.xid:
                    self._fail(final)
                self.xid = None
            elif final >= self.start and index + 1 < len(run) and run.kinds[index + 1] not in _NO_CHANGE:
                self._fail(final)

    def passed(self) -> None:
        """The server has sent all that commits below the log's end. Raises LogAhead where its newest was not there."""
        if self.xid is not None:
            self._fail(self.start)

    def _fail(self, lsn: int) -> NoReturn:
        raise LogAhead(
            "ends with other transactions than the source has there: the source was restored to an earlier time "
            "and has gone on since", thing="change log", lsn=Lsn(lsn), do=NEW_LAKE,
        )  # fmt: skip
