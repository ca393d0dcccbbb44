"""Decides what a run of frames means for the positions: which part of it is taken, and where the boundaries lie. No
I/O.

A transaction in progress belongs where its Stream Commit says, like any other. Its blocks move no position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np

from pgcdc_assets.core.endpos import Endpos
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import PreparedLost, ProtocolError
from pgcdc_assets.log.framerun import IS_CONTROL, FrameRun
from pgcdc_assets.log.inprogress import TransactionsInProgress
from pgcdc_assets.log.prepared import PreparedKey, PreparedTransaction, PreparedTransactions
from pgcdc_assets.log.receive.blocks import Blocks, Dropped
from pgcdc_assets.log.receive.choice import Choice
from pgcdc_assets.log.receive.overlap import Overlap
from pgcdc_assets.log.receive.parts import (
    Part,
    Prepared,
    PreparedDropped,
    PreparedEnded,
    StreamEnded,
    StreamUnsure,
    Taken,
)
from pgcdc_assets.log.relations import Overlay, Relations
from pgcdc_assets.log.rows import ABSENT, changed_relations
from pgcdc_assets.log.spool import StreamEnd
from pgcdc_assets.log.streamed import StreamPlace, commit_frame, located
from pgcdc_assets.log.transactions import OpenTransaction, transaction_after
from pgcdc_assets.protocol.layouts import MessageKind
from pgcdc_assets.protocol.messages import (
    AnyMessage,
    CommitPrepared,
    LogicalMessage,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    Type,
)
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.protocol.streamed import decode_any
from pgcdc_assets.source.connect.failures import COPY_ANEW

_ENDS = (
    MessageKind.STREAM_COMMIT,
    MessageKind.STREAM_PREPARE,
    MessageKind.COMMIT_PREPARED,
    MessageKind.ROLLBACK_PREPARED,
)
"""Of transactions that came before, in blocks."""

RelationKey = tuple[int, frozenset[int]]
"""OID of a relation and the types of its columns, which a run may change."""
Described = dict[RelationKey, RelationFacts]
Describe = Callable[[Sequence[Relation]], Described]
"""What the catalog says of relations, all of a run at once."""


class Intake:
    """Keeps the stream's state: open transaction, last boundary, relations in force."""

    def __init__(
        self, describe: Describe, relations: Relations, transform_lsn: Lsn, overlap: Overlap | None = None,
        choice: Choice | None = None, origins: Callable[[], bool] = lambda: False,
        prepared: PreparedTransactions | None = None,
    ) -> None:  # fmt: skip
        """``origins``: whether the source knows any origin, as it is now. ``prepared``: those whose content the lake
        holds; None where the slot sends each transaction at its commit."""
        self._describe = describe
        self._origins = origins
        self._relations = relations
        self._transform_lsn = transform_lsn
        self._overlap = overlap
        self._choice = choice or Choice()
        self._place = StreamPlace()
        self._blocks = Blocks(self._choice, relations)
        self._prepared = prepared
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
                for index in part.at(MessageKind.PREPARE).tolist():
                    yield self._prepare(cast(Prepare, decode_any(part.payload(index), parallel=False)), part, index)
            if self.arrived:
                return

    def _between(self, run: FrameRun, parallel: bool) -> Iterator[Part]:
        """Frames that stand in no block: whole transactions, and the ends of those that came in blocks."""
        first = 0
        ends = np.flatnonzero(np.isin(run.kinds, _ENDS))
        for index in np.union1d(ends, self._blocks.aborts(run)).tolist():
            if first < index:
                yield self._whole_transactions(run.part(first, index))
            if self.arrived:
                return
            first = index + 1
            part = self._end(decode_any(run.payload(index), run.lsn(index), parallel=parallel), run, index)
            if part is not None:
                yield part
        if first < len(run) and not self.arrived:
            yield self._whole_transactions(run.part(first, len(run)))

    def _end(self, message: AnyMessage, run: FrameRun, index: int) -> Part | None:
        match message:
            case StreamCommit():
                return self._commit(message, run, index)
            case StreamAbort():
                return self._blocks.abort(message)
            case StreamPrepare():
                return self._prepare(message, run, index)
            case CommitPrepared():
                return self._commit_prepared(message, run, index)
            case RollbackPrepared():
                return self._rollback_prepared(message, run.lsn(index))
        return None

    def _commit(self, message: StreamCommit, run: FrameRun, index: int) -> StreamEnded | Dropped:
        """A transaction in progress commits. Its Relation messages take effect whether the log takes it or not."""
        transaction, overlay = self._blocks.end(message, run, index)
        schema_ids = overlay.promote(self._relations, self.facts(overlay), int(run.sequence[index]))
        self.passed(message.commit_lsn)
        if message.commit_lsn < self._transform_lsn or self._is_beyond(message.commit_lsn, message.end_lsn):
            return Dropped(message.xid)
        if transaction.ambiguous or (not transaction.origin_told and self._origins()):
            raise StreamUnsure(message.end_lsn)
        self.reached(message.end_lsn)
        aborted = np.array(sorted(transaction.aborted), dtype=np.int64)
        end = StreamEnd(int(message.commit_lsn), message.commit_ts, aborted, schema_ids)
        return StreamEnded(message.xid, end, commit_frame(run, index))

    def _is_beyond(self, lsn: Lsn, end_lsn: Lsn) -> bool:
        """Whether a record lies past the goal; then the goal is reached. ``lsn`` is its start, a boundary."""
        goal = self.goal
        if goal is None or not (goal.arrived_at_begin(lsn) or not goal.allows(end_lsn)):
            return False
        self.arrived = True
        if goal.allows(lsn):
            self.reached(lsn)
        return True

    # Two-phase: content comes at PREPARE, and belongs where COMMIT PREPARED says ----------------------

    def _prepare(self, message: Prepare | StreamPrepare, run: FrameRun, index: int) -> Prepared | Dropped:
        """A transaction is prepared. What comes of it once more, until its PREPARE is confirmed, is what is known."""
        known, whole = self._known(run.lsn(index)), isinstance(message, Prepare)
        came, overlay = self._blocks.end(message, run, index)
        overlay.tell()
        self.passed(message.prepare_lsn)
        if self._is_beyond(message.prepare_lsn, message.end_lsn):
            return Dropped(message.xid)
        if not whole and (came.ambiguous or (not came.origin_told and self._origins())):
            raise StreamUnsure(message.end_lsn)
        self.reached(message.end_lsn)
        key = PreparedKey(message.xid, message.gid, message.end_lsn)
        transaction = PreparedTransaction(
            key, message.prepare_ts, frozenset(came.aborted), overlay, came.changes, came.bytes, came.origin
        )
        return Prepared(transaction) if known.prepare(transaction) else Dropped(message.xid)

    def _commit_prepared(
        self, message: CommitPrepared, run: FrameRun, index: int
    ) -> PreparedEnded | PreparedDropped | None:
        """A prepared transaction commits. One beyond the goal stays prepared: its end comes again."""
        known = self._known(run.lsn(index))
        transaction = known.named(message)
        self.passed(message.commit_lsn)
        if self._overlap is not None:
            self._overlap.committed(message.commit_lsn, message.xid, transaction)
        if message.commit_lsn >= self._transform_lsn and self._is_beyond(message.commit_lsn, message.end_lsn):
            return None
        if transaction is None:
            if message.commit_lsn >= self._transform_lsn and self._choice.origins:
                raise PreparedLost(
                    f"the content of prepared transaction {message.gid!r}, which commits now, is not in the lake: it "
                    "was prepared before two_phase was on, or is lost", thing="change log", lsn=message.commit_lsn,
                    do=COPY_ANEW,
                )  # fmt: skip
            return None
        known.end(transaction)
        if message.commit_lsn < self._transform_lsn:
            return PreparedDropped(transaction.key)
        self.reached(message.end_lsn)
        schema_ids = transaction.overlay.known_to(self._relations, self.facts(transaction.overlay))
        aborted = np.array(sorted(transaction.aborted), dtype=np.int64)
        end = StreamEnd(int(message.commit_lsn), message.commit_ts, aborted, schema_ids)
        return PreparedEnded(transaction, end, commit_frame(run, index))

    def _rollback_prepared(self, message: RollbackPrepared, lsn: Lsn) -> PreparedDropped | None:
        known = self._known(lsn)
        if self.goal is not None and not self.goal.allows(message.rollback_end_lsn):
            self.arrived = True
            return None
        self.passed(message.rollback_end_lsn)
        self.reached(message.rollback_end_lsn)
        transaction = known.named(message)
        if transaction is None:
            return None
        known.end(transaction)
        return PreparedDropped(transaction.key)

    def _known(self, lsn: Lsn) -> PreparedTransactions:
        if self._prepared is None:
            raise ProtocolError("a prepared transaction came, which was not asked for", lsn=lsn)
        return self._prepared

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
        late = [] if self._prepared is None else self._relations.undescribed(changed_relations(run))
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
