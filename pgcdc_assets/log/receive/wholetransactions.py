"""Handles transactions that the server sends in one piece, after their commit. Decides which frames are added to the
log, and moves the positions. Does no I/O itself, except that a :class:`ResendCheck` reads the log when it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn, Self

import numpy as np
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Ints
from pgcdc_assets.core.lsn import ZERO, Endpos, Lsn
from pgcdc_assets.errors import LogAhead
from pgcdc_assets.log.framerun import IS_CONTROL, IS_TABLE_CHANGE, FrameRun
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.messagefilter import MessageFilter
from pgcdc_assets.log.receive.relationfacts import Describe, described
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.rows import changed_relations
from pgcdc_assets.log.segment import read_rows
from pgcdc_assets.log.transactions import (
    OpenTransaction,
    PreparedTransaction,
    of_origin,
    transaction_after,
    within_transactions,
)
from pgcdc_assets.protocol.layouts import TABLE_CHANGES, MessageKind
from pgcdc_assets.protocol.messages import LogicalMessage, Relation, Type
from pgcdc_assets.source.connect.failures import NEW_LAKE

_OF_TABLES = {chr(kind) for kind in TABLE_CHANGES}


@dataclass
class StreamPositions:
    """The positions of one connection."""

    transform_lsn: Lsn
    """The log's position when the connection began."""
    boundary: Lsn = ZERO
    """The last boundary that was received. Every transaction that ends at or below this LSN is in the log, or was given
    to the batches."""
    seen: Lsn = ZERO
    """All transactions that commit below this LSN have been received. This LSN need not be a boundary."""
    goal: Endpos | None = None
    arrived: bool = False
    """Whether the goal (the LSN of the order UNTIL) is reached. Frames past the goal are not added to the log."""

    def __post_init__(self) -> None:
        self.boundary = self.transform_lsn

    def holds(self, commit_lsn: int) -> bool:
        """Whether the log already contains the transaction that commits at ``commit_lsn``. The comparison is exact,
        because no boundary is inside a commit record."""
        return commit_lsn < self.transform_lsn

    def reached(self, lsn: int) -> None:
        self.boundary = max(self.boundary, Lsn(lsn))

    def passed(self, lsn: int) -> None:
        self.seen = max(self.seen, Lsn(lsn))

    def is_beyond(self, lsn: Lsn, end_lsn: Lsn) -> bool:
        """Whether a commit or prepare record from ``lsn`` to ``end_lsn`` ends past the goal. If so, also sets
        ``arrived``, and moves the boundary to the record's start, unless this is past the goal."""
        if self.goal is None or not (self.goal.arrived_at_begin(lsn) or not self.goal.allows(end_lsn)):
            return False
        self.arrived = True
        if self.goal.allows(lsn):
            self.reached(lsn)
        return True


@dataclass(frozen=True)
class Taken:
    """Frames to add to the log, from transactions that are sent in one piece."""

    run: FrameRun
    whole: int
    """The number of frames, from the start, that belong to complete transactions or are between transactions."""
    after: OpenTransaction | None
    """The transaction that is open after these frames."""


@dataclass
class ResendCheck:
    """Checks that transactions that the server sends again match the log. A slot is behind the log if its confirmation
    was lost in a crash. If the log's newest transaction is above the slot's position, the server must then send it
    again. If the server sends a different transaction at this LSN, or no transaction, the source was restored to an
    earlier state, and has since written different WAL past the log's end on the same timeline. A comparison of LSNs
    alone would not show this.

    It checks the WAL from ``start`` to ``end``. In this range, the server may send only one transaction: the log's
    newest transaction."""

    start: Lsn
    """``commit_lsn`` of the log's newest transaction, or the slot's position if no transaction is expected."""
    end: Lsn
    """The position of the log."""
    newest: int | None
    """The xid of the log's newest transaction; None if the server need not send it again."""
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
        """Raises LogAhead if the log's newest transaction did not arrive, but should have."""
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


class WholeTransactions:
    """The transactions of one connection that are sent in one piece. At most one of them is open."""

    def __init__(
        self, positions: StreamPositions, describe: Describe, relations: Relations, wanted: MessageFilter,
        resend_check: ResendCheck | None,
    ) -> None:  # fmt: skip
        self._positions = positions
        self._describe = describe
        self._relations = relations
        self._wanted = wanted
        self.resend_check = resend_check
        """The check of transactions that the server sends again; None once the server has sent everything below the
        log's end."""
        self.open: OpenTransaction | None = None

    def take(self, run: FrameRun) -> Taken:
        """Process frames outside of blocks, and return those that belong to the log. The frames must not contain the
        ends of transactions that were sent in blocks or prepared. Raises LogAhead."""
        before = self.open
        run = self._wanted.kept(run, before)
        after = transaction_after(run, before)
        standalone = self._control(run)
        first = self._first_new(run, before, standalone)
        self._compare(run, before, first)
        end, self._positions.arrived = self._first_beyond(run, before, standalone)
        end = max(first, end)
        self._pass_begins(run)
        self.open = after
        taken = run.part(first, end)
        whole = self._whole(taken, first, standalone)
        return Taken(taken, whole, None if self._positions.arrived else after)

    def _compare(self, run: FrameRun, before: OpenTransaction | None, first: int) -> None:
        """Check transactions that the server sends again. ``first``: the number of the first frame that is new to the
        log."""
        if self.resend_check is not None:
            self.resend_check.compare(run, before)
        if first < len(run):
            self.end_resend_check()

    def end_resend_check(self) -> None:
        """Called when the server has sent everything below the log's end. Raises LogAhead."""
        if self.resend_check is not None:
            self.resend_check.newest_passed()
            self.resend_check = None

    def _control(self, run: FrameRun) -> dict[int, Lsn]:
        """Record all Relation and Type messages, because the server sends them only once per connection. Some of them
        are in transactions that are not added to the log. Returns the LSNs of the non-transactional messages, by frame
        number."""
        standalone: dict[int, Lsn] = {}
        messages = {index: run.message(index) for index in np.flatnonzero(IS_CONTROL[run.kinds]).tolist()}
        late = self._relations.undescribed(changed_relations(run)) if self._relations.any_undescribed else []
        came = [message for message in messages.values() if isinstance(message, Relation)]
        facts = self._describe([*came, *(seen.relation for seen in late)])
        for seen in late:
            self._relations.see(seen.relation, seen.payload, facts[described(seen.relation)], seen.sequence)
        for index, message in messages.items():
            if isinstance(message, Relation):
                known = facts[described(message)]
                self._relations.see(message, run.payload(index), known, int(run.sequence[index]))
            elif isinstance(message, Type):
                self._relations.see_type(message.type_oid, run.payload(index))
            elif isinstance(message, LogicalMessage) and not message.transactional:
                standalone[index] = message.lsn
        return standalone

    def _first_new(self, run: FrameRun, before: OpenTransaction | None, standalone: dict[int, Lsn]) -> int:
        """The number of the first frame that is new to the log. The log already contains a transaction exactly if its
        ``commit_lsn`` is below ``transform_lsn``, the log's position. This position is a boundary, and no boundary is
        inside a commit record."""
        if before is not None and before.final_lsn >= self._positions.transform_lsn:
            return 0
        new = run.brackets.begins[run.brackets.final_lsn >= self._positions.transform_lsn]
        places = [index for index, lsn in standalone.items() if lsn > self._positions.transform_lsn]
        return min([*new[:1].tolist(), *places[:1]], default=len(run))

    def _first_beyond(
        self, run: FrameRun, before: OpenTransaction | None, standalone: dict[int, Lsn]
    ) -> tuple[int, bool]:
        """The number of the first frame past the goal, and whether there is such a frame."""
        if self._positions.goal is None:
            return len(run), False
        if before is not None and self._positions.goal.arrived_at_begin(before.final_lsn):
            return 0, True
        begins = run.brackets.begins
        beyond = begins[run.brackets.final_lsn >= self._positions.goal.lsn][:1].tolist()
        for index in run.brackets.commits[run.brackets.end_lsn > self._positions.goal.lsn][:1].tolist():
            # The goal is inside the commit record of this transaction (commit_lsn < goal < end_lsn). Nothing of the
            # transaction is added to the log, so the log ends at this commit_lsn.
            own = begins[begins < index]
            beyond.append(int(own[-1]) if len(own) else 0)
        beyond += [index for index, lsn in standalone.items() if lsn > self._positions.goal.lsn][:1]
        if not beyond:
            return len(run), False
        end = min(beyond)
        self._reach_begin(run, end, before)
        return end, True

    def _reach_begin(self, run: FrameRun, index: int, before: OpenTransaction | None) -> None:
        """Move the boundary to the ``commit_lsn`` of the first transaction past the goal, if this LSN itself is not
        past the goal."""
        if run.kinds[index] == MessageKind.BEGIN:
            final = int(run.brackets.final_lsn[np.searchsorted(run.brackets.begins, index)])
        elif before is not None:
            final = before.final_lsn
        else:
            return
        if self._positions.goal is not None and self._positions.goal.allows(final):
            self._positions.reached(final)

    def _pass_begins(self, run: FrameRun) -> None:
        if len(run.brackets.begins):
            self._positions.passed(int(run.brackets.final_lsn[-1]))

    def _whole(self, taken: FrameRun, first: int, standalone: dict[int, Lsn]) -> int:
        """The number of frames at the start of ``taken`` that belong to complete transactions or are non-transactional
        messages. Also moves the boundary to the end of these frames."""
        brackets = taken.brackets
        ends = [int(brackets.commits[-1]) + 1] if len(brackets.commits) else []
        if ends:
            self._positions.reached(int(brackets.end_lsn[-1]))
        for index, lsn in standalone.items():
            if 0 <= index - first < len(taken):
                self._positions.reached(lsn)
                ends.append(index - first + 1)
        return max(ends, default=0)
