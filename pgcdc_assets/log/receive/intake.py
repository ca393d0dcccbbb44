"""Decides what a run of frames means for the positions: which part of it is taken, and where the boundaries lie. No
I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pgcdc_assets.core.endpos import Endpos
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.log.framerun import IS_CONTROL, FrameRun
from pgcdc_assets.log.receive.choice import Choice
from pgcdc_assets.log.receive.overlap import Overlap
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.transactions import OpenTransaction, transaction_after
from pgcdc_assets.protocol.layouts import MessageKind
from pgcdc_assets.protocol.messages import LogicalMessage, Relation, Type
from pgcdc_assets.protocol.shape import RelationFacts

RelationKey = tuple[int, frozenset[int]]
"""OID of a relation and the types of its columns, which a run may change."""
Described = dict[RelationKey, RelationFacts]
Describe = Callable[[Sequence[Relation]], Described]
"""What the catalog says of relations, all of a run at once."""


@dataclass(frozen=True)
class Taken:
    """The part of a run that belongs to the log."""

    run: FrameRun
    whole: int
    """Number of leading frames that belong to complete transactions, or stand between transactions."""
    after: OpenTransaction | None
    """The transaction that is open after it."""
    arrived: bool
    """The goal was reached within the run; the frames after it are left out."""


class Intake:
    """Keeps the stream's state: open transaction, last boundary, relations in force."""

    def __init__(
        self, describe: Describe, relations: Relations, transform_lsn: Lsn, overlap: Overlap | None = None,
        choice: Choice | None = None,
    ) -> None:  # fmt: skip
        self._describe = describe
        self._relations = relations
        self._transform_lsn = transform_lsn
        self._overlap = overlap
        self._choice = choice or Choice()
        self.boundary = transform_lsn
        """The last transaction boundary that has been received: all that ends at or below it is taken."""
        self.seen = ZERO
        """All transactions that commit below it have been received (it need be no boundary)."""
        self.transaction: OpenTransaction | None = None
        self.goal: Endpos | None = None
        self.sequence = 0
        self.stream_aborts = 0
        """Stream Aborts that were passed over. PostgreSQL 18 sends them for transactions that it never sends."""

    def sent(self, wal_end: int) -> None:
        """All that commits below it has been sent."""
        if self._overlap is not None and wal_end > self._transform_lsn:
            self._overlap.newest_passed()
        self.passed(wal_end)

    def reached(self, lsn: int) -> None:
        self.boundary = max(self.boundary, Lsn(lsn))

    def passed(self, lsn: int) -> None:
        self.seen = max(self.seen, Lsn(lsn))

    def take(self, run: FrameRun) -> Taken:
        """Take in the frames of whole and open transactions between ``transform_lsn`` and the goal."""
        self.sequence += len(run)
        self.stream_aborts += len(run.at(MessageKind.STREAM_ABORT))
        before = self.transaction
        run = self._choice.kept(run, before)
        after = transaction_after(run, before)
        standalone = self._control(run)
        first = self._first_new(run, before, standalone)
        self._compare(run, before, first)
        end, arrived = self._first_beyond(run, before, standalone)
        end = max(first, end)
        self._pass_begins(run)
        self.transaction = after
        taken = run.part(first, end)
        whole = self._whole(taken, first, standalone)
        if arrived:
            after = None
        return Taken(taken, whole, after, arrived)

    def _compare(self, run: FrameRun, before: OpenTransaction | None, first: int) -> None:
        """Compare what comes with what the lake holds; ``first`` is the first frame that is new to the log."""
        if self._overlap is None:
            return
        self._overlap.compare(run, before)
        if first < len(run):
            self._overlap.newest_passed()
        if self.seen >= self._overlap.end:
            self._overlap = None

    def _control(self, run: FrameRun) -> dict[int, Lsn]:
        """Relation and Type messages take effect, in transactions that are skipped too: they come but once
        in a connection. Returns the non-transactional messages' places."""
        standalone: dict[int, Lsn] = {}
        messages = {index: run.message(index) for index in np.flatnonzero(IS_CONTROL[run.kinds]).tolist()}
        facts = self._describe([message for message in messages.values() if isinstance(message, Relation)])
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
        """Where the log goes on: the first frame of a transaction that it does not hold yet.

        ``commit_lsn < transform_lsn`` says that it does: no boundary lies inside a commit record.
        """
        if before is not None and before.final_lsn >= self._transform_lsn:
            return 0
        new = run.brackets.begins[run.brackets.final_lsn >= self._transform_lsn]
        places = [index for index, lsn in standalone.items() if lsn > self._transform_lsn]
        return min([*new[:1].tolist(), *places[:1]], default=len(run))

    def _first_beyond(
        self, run: FrameRun, before: OpenTransaction | None, standalone: dict[int, Lsn]
    ) -> tuple[int, bool]:
        """The first frame that lies past the goal, and whether there is one."""
        if self.goal is None:
            return len(run), False
        if before is not None and self.goal.arrived_at_begin(before.final_lsn):
            return 0, True
        begins = run.brackets.begins
        beyond = begins[run.brackets.final_lsn >= self.goal.lsn][:1].tolist()
        for index in run.brackets.commits[run.brackets.end_lsn > self.goal.lsn][:1].tolist():
            # Ends past the goal though it began before: endpos lies in its commit record. Its commit_lsn
            # is the boundary; nothing of it is taken.
            own = begins[begins < index]
            beyond.append(int(own[-1]) if len(own) else 0)
        beyond += [index for index, lsn in standalone.items() if lsn > self.goal.lsn][:1]
        if not beyond:
            return len(run), False
        end = min(beyond)
        self._reach_begin(run, end, before)
        return end, True

    def _reach_begin(self, run: FrameRun, index: int, before: OpenTransaction | None) -> None:
        """The first transaction not taken starts its commit record at a boundary, if that is not past the goal."""
        if run.kinds[index] == MessageKind.BEGIN:
            final = int(run.brackets.final_lsn[np.searchsorted(run.brackets.begins, index)])
        elif before is not None:
            final = before.final_lsn
        else:
            return
        if self.goal is not None and self.goal.allows(final):
            self.reached(final)

    def _pass_begins(self, run: FrameRun) -> None:
        if len(run.brackets.begins):
            self.passed(int(run.brackets.final_lsn[-1]))

    def _whole(self, taken: FrameRun, first: int, standalone: dict[int, Lsn]) -> int:
        """How many of the frames taken are whole transactions that leave something; moves the boundary."""
        brackets = taken.brackets
        ends = [int(brackets.commits[-1]) + 1] if len(brackets.commits) else []
        if ends:
            self.reached(int(brackets.end_lsn[-1]))
        for index, lsn in standalone.items():
            if 0 <= index - first < len(taken):
                self.reached(lsn)
                ends.append(index - first + 1)
        return max(ends, default=0)


def described(relation: Relation) -> RelationKey:
    """The key by which the facts of a relation are asked for."""
    return relation.relation_id, frozenset(column.type_oid for column in relation.columns)
