"""Decides what a run of frames means for the positions: which part of it is taken, and where the boundaries lie. No
I/O.

A transaction in progress belongs where its Stream Commit says, like any other. Its blocks move no position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pgcdc_assets.core.endpos import Endpos
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.framerun import IS_CONTROL, FrameRun
from pgcdc_assets.log.inprogress import TransactionsInProgress
from pgcdc_assets.log.receive.blocks import Block, Blocks, Dropped
from pgcdc_assets.log.receive.choice import Choice
from pgcdc_assets.log.receive.overlap import Overlap
from pgcdc_assets.log.relations import Overlay, Relations
from pgcdc_assets.log.rows import ABSENT
from pgcdc_assets.log.spool import StreamEnd
from pgcdc_assets.log.streamed import StreamPlace, commit_frame, located
from pgcdc_assets.log.transactions import OpenTransaction, transaction_after
from pgcdc_assets.protocol.layouts import MessageKind
from pgcdc_assets.protocol.messages import LogicalMessage, Relation, StreamAbort, StreamCommit, Type
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.protocol.streamed import decode_any

_PREPARED = (
    MessageKind.BEGIN_PREPARE,
    MessageKind.PREPARE,
    MessageKind.COMMIT_PREPARED,
    MessageKind.ROLLBACK_PREPARED,
    MessageKind.STREAM_PREPARE,
)

RelationKey = tuple[int, frozenset[int]]
"""OID of a relation and the types of its columns, which a run may change."""
Described = dict[RelationKey, RelationFacts]
Describe = Callable[[Sequence[Relation]], Described]
"""What the catalog says of relations, all of a run at once."""


@dataclass(frozen=True)
class Taken:
    """The part of a run that belongs to the log, of transactions that come as a whole."""

    run: FrameRun
    whole: int
    """Number of leading frames that belong to complete transactions, or stand between transactions."""
    after: OpenTransaction | None
    """The transaction that is open after it."""


@dataclass(frozen=True)
class StreamEnded:
    """A transaction in progress has committed, and belongs to the log."""

    xid: int
    end: StreamEnd
    commit: FrameRun
    """Its Commit, as one frame."""


Part = Taken | Block | Dropped | StreamEnded


class StreamUnsure(Exception):
    """A transaction in progress has committed, and what came does not say which of its messages count, or whether it
    has an origin. As a whole it says so: the stream has to begin anew with version 1, until ``end_lsn`` is passed."""

    def __init__(self, end_lsn: Lsn) -> None:
        super().__init__()
        self.end_lsn = end_lsn


class Intake:
    """Keeps the stream's state: open transaction, last boundary, relations in force."""

    def __init__(
        self, describe: Describe, relations: Relations, transform_lsn: Lsn, overlap: Overlap | None = None,
        choice: Choice | None = None, origins: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """``origins``: whether the source knows any origin, as it is now."""
        self._describe = describe
        self._origins = origins
        self._relations = relations
        self._transform_lsn = transform_lsn
        self._overlap = overlap
        self._choice = choice or Choice()
        self._place = StreamPlace()
        self._blocks = Blocks(self._choice)
        self.boundary = transform_lsn
        """The last transaction boundary that has been received: all that ends at or below it is taken."""
        self.seen = ZERO
        """All transactions that commit below it have been received (it need be no boundary)."""
        self.transaction: OpenTransaction | None = None
        self.goal: Endpos | None = None
        self.arrived = False
        """The goal was reached; the frames after it are left out."""
        self.sequence = 0

    @property
    def stream_aborts(self) -> int:
        """Stream Aborts that were passed over. PostgreSQL 18 sends them for transactions that it never sends."""
        return self._blocks.transactions.unknown_aborts

    @property
    def in_progress(self) -> TransactionsInProgress:
        return self._blocks.transactions

    def sent(self, wal_end: int) -> None:
        """All that commits below it has been sent."""
        if self._overlap is not None and wal_end > self._transform_lsn:
            self._overlap.newest_passed()
        self.passed(wal_end)

    def reached(self, lsn: int) -> None:
        self.boundary = max(self.boundary, Lsn(lsn))

    def passed(self, lsn: int) -> None:
        self.seen = max(self.seen, Lsn(lsn))

    def take(self, run: FrameRun, *, parallel: bool = False) -> Iterator[Part]:
        """Take in the frames between ``transform_lsn`` and the goal, in order; none once :attr:`arrived`.

        ``parallel`` is whether streaming is. Raises ProtocolError, and :class:`StreamUnsure`.
        """
        self.sequence += len(run)
        found = located(run, self._place, parallel=parallel)
        self._place = found.after
        for stretch in found.stretches():
            part = found.run.part(stretch.start, stretch.end)
            if stretch.top == ABSENT:
                yield from self._between(part, parallel)
            else:
                yield from self._blocks.take(stretch.top, part, found.subxid[stretch.start : stretch.end])
            if self.arrived:
                return

    def _between(self, run: FrameRun, parallel: bool) -> Iterator[Part]:
        """Frames that stand in no block: whole transactions, and the ends of those in progress."""
        _refuse_prepared(run)
        first = 0
        for index in np.union1d(run.at(MessageKind.STREAM_COMMIT), self._blocks.aborts(run)).tolist():
            if first < index:
                yield self._whole_transactions(run.part(first, index))
            if self.arrived:
                return
            first = index + 1
            message = decode_any(run.payload(index), run.lsn(index), parallel=parallel)
            if isinstance(message, StreamCommit):
                yield self._commit(message, run, index)
            elif isinstance(message, StreamAbort) and (dropped := self._blocks.abort(message)) is not None:
                yield dropped
        if first < len(run) and not self.arrived:
            yield self._whole_transactions(run.part(first, len(run)))

    def _commit(self, message: StreamCommit, run: FrameRun, index: int) -> StreamEnded | Dropped:
        """A transaction in progress commits. Its Relation messages take effect whether the log takes it or not."""
        transaction, overlay = self._blocks.commit(message, run, index)
        schema_ids = overlay.promote(self._relations, self.facts(overlay), int(run.sequence[index]))
        self.passed(message.commit_lsn)
        if message.commit_lsn < self._transform_lsn:
            return Dropped(message.xid)
        goal = self.goal
        if goal is not None and (goal.arrived_at_begin(message.commit_lsn) or not goal.allows(message.end_lsn)):
            self.arrived = True
            if goal.allows(message.commit_lsn):
                self.reached(message.commit_lsn)
            return Dropped(message.xid)
        if transaction.ambiguous or (not transaction.origin_told and self._origins()):
            raise StreamUnsure(message.end_lsn)
        self.reached(message.end_lsn)
        aborted = np.array(sorted(transaction.aborted), dtype=np.int64)
        end = StreamEnd(int(message.commit_lsn), message.commit_ts, aborted, schema_ids)
        return StreamEnded(message.xid, end, commit_frame(run, index))

    def facts(self, overlay: Overlay) -> list[RelationFacts]:
        """What the catalog says now of the relations of a transaction in progress, one for each provisional id."""
        relations = overlay.relations
        known = self._describe(relations)
        return [known[described(relation)] for relation in relations]

    def _whole_transactions(self, run: FrameRun) -> Taken:
        before = self.transaction
        run = self._choice.kept(run, before)
        after = transaction_after(run, before)
        standalone = self._control(run)
        first = self._first_new(run, before, standalone)
        self._compare(run, before, first)
        end, self.arrived = self._first_beyond(run, before, standalone)
        end = max(first, end)
        self._pass_begins(run)
        self.transaction = after
        taken = run.part(first, end)
        whole = self._whole(taken, first, standalone)
        return Taken(taken, whole, None if self.arrived else after)

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


def _refuse_prepared(run: FrameRun) -> None:
    odd = np.flatnonzero(np.isin(run.kinds, _PREPARED))
    if len(odd):
        raise ProtocolError("a prepared transaction came, which was not asked for", lsn=run.lsn(int(odd[0])))


def described(relation: Relation) -> RelationKey:
    """The key by which the facts of a relation are asked for."""
    return relation.relation_id, frozenset(column.type_oid for column in relation.columns)
