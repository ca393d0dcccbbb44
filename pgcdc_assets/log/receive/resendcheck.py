"""Checks that transactions that the server sends again match the log. A slot is behind the log if its confirmation was
lost in a crash. If the log's newest transaction is above the slot's position, the server must then send it again. If
the server sends a different transaction at this LSN, or no transaction, the source was restored to an earlier state,
and has since written different WAL past the log's end on the same timeline. A comparison of LSNs alone would not show
this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn, Self

import numpy as np
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Ints
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LogAhead
from pgcdc_assets.log.framerun import IS_TABLE_CHANGE, FrameRun
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.messagefilter import of_origin, within_transactions
from pgcdc_assets.log.segment import read_rows
from pgcdc_assets.log.transactions import OpenTransaction, PreparedTransaction
from pgcdc_assets.protocol.layouts import TABLE_CHANGES, MessageKind
from pgcdc_assets.source.connect.failures import NEW_LAKE

_OF_TABLES = {chr(kind) for kind in TABLE_CHANGES}


@dataclass
class ResendCheck:
    """The check of the WAL from ``start`` to ``end``. In this range, the server may send only one transaction: the
    log's newest transaction."""

    start: Lsn
    """``commit_lsn`` of the log's newest transaction, or the slot's position if no transaction is expected."""
    end: Lsn
    """The position of the log."""
    newest: int | None
    """The xid of the log's newest transaction; None if no transaction is expected."""
    came: bool = False
    """Whether the log's newest transaction has arrived, or the settings allow the server to leave it out."""

    @classmethod
    def of(cls, log: ChangeLog, confirmed: Lsn | None, *, origins: bool = True) -> Self | None:
        """The check for a slot at ``confirmed``; None if the slot is not behind the log. ``origins``: whether the
        server is asked for transactions with an origin."""
        end = log.position()
        if confirmed is None or confirmed >= end:
            return None
        batches = [batch for batch in log.batches(confirmed) if batch.transactions]
        newest = max((s.commit_max for s in log.all_segments() if s.commit_max is not None), default=None)
        if not batches or newest is None or newest < confirmed:
            return cls(confirmed, end, None)
        # If the settings have changed, the server may leave out logical messages and transactions with an origin.
        return cls(newest, end, batches[-1].last_xid, came=not _comes_again(log, newest, origins=origins))

    def above(self, floor: Lsn) -> Self | None:
        """The same check, but only of the WAL above ``floor``; None if ``floor`` is not below the check's end. An
        earlier process may have confirmed the slot up to ``floor``. The server then does not send the WAL below
        ``floor`` again."""
        if floor <= self.start:
            return self
        return replace(self, start=floor, newest=None) if floor < self.end else None

    def compare(self, run: FrameRun, before: OpenTransaction | None) -> None:
        """Check the next frames. ``before``: the transaction that is open before these frames. Raises LogAhead if the
        frames contain a transaction in the range that is not the log's newest transaction."""
        found = run.brackets
        finals: Ints = np.concatenate(([before.final_lsn if before else -1], found.final_lsn))
        if self.newest is not None and not self.came:
            self.came = self.start in finals
            if self.came and self.newest not in found.xid[found.final_lsn == self.start]:
                self._fail(self.start)
        # Ignore empty transactions (PostgreSQL 14), because the publications may have changed. Ignore logical messages
        # and transactions with an origin, because earlier settings may have excluded them from the log.
        changes = IS_TABLE_CHANGE[run.kinds] & within_transactions(run, before) & ~of_origin(run, before)
        commit_lsn = finals[np.cumsum(run.kinds == MessageKind.BEGIN)]
        known = commit_lsn < self.start if self.newest is None else commit_lsn <= self.start
        others = np.flatnonzero(changes & ~known & (commit_lsn < self.end))
        if len(others):
            self._fail(int(commit_lsn[others[0]]))

    def committed(self, commit_lsn: Lsn, xid: int, prepared: PreparedTransaction | None) -> None:
        """Check a COMMIT PREPARED at ``commit_lsn``. Raises LogAhead if its transaction is in the range, but is not the
        log's newest transaction. ``prepared``: the transaction; None if its content is not known."""
        if self.newest is not None and commit_lsn == self.start:
            self.came = True
            if xid != self.newest:
                self._fail(commit_lsn)
        elif prepared is not None and prepared.changes and self.start < commit_lsn < self.end:
            self._fail(commit_lsn)

    def newest_passed(self) -> None:
        """Called when the server has sent everything below the log's end. Raises LogAhead if the log's newest
        transaction did not arrive, but should have."""
        if self.newest is not None and not self.came:
            self._fail(self.start)

    def _fail(self, lsn: int) -> NoReturn:
        raise LogAhead(
            f"its transactions up to {self.end} differ from those of the source: the source was restored to an earlier "
            "time, and then changed", thing="lake", lsn=Lsn(lsn), do=NEW_LAKE,
        )  # fmt: skip


def _comes_again(log: ChangeLog, commit_lsn: Lsn, *, origins: bool) -> bool:
    """Whether the server must send the log's transaction with this ``commit_lsn`` again: true if the transaction
    changes a table, and the settings cannot exclude it by its origin. ``origins``: see :meth:`ResendCheck.of`."""
    asked = pc.field("commit_lsn") == int(commit_lsn)
    for segment in log.all_segments():
        if segment.commit_max == commit_lsn:
            rows = read_rows(segment.file, ["kind", "origin"], asked).to_pylist()
            if any(row["kind"] in _OF_TABLES and (origins or row["origin"] is None) for row in rows):
                return True
    return False
