"""Decides which received frames are added to the log, and moves the boundary, the LSN at which the next batch can end.
The boundary moves at the Stream Commit of a transaction in progress, and not at its blocks. Does no I/O itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import PreparedLost, ProtocolError
from pgcdc_assets.log.commitfacts import CommitFacts
from pgcdc_assets.log.framerun import FrameRun
from pgcdc_assets.log.receive.blocks import Block, Blocks, Dropped
from pgcdc_assets.log.receive.messagefilter import MessageFilter
from pgcdc_assets.log.receive.relationfacts import Describe, facts_of
from pgcdc_assets.log.receive.wholetransactions import ResendCheck, StreamPositions, Taken, WholeTransactions
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.log.rows import ABSENT
from pgcdc_assets.log.streamed import StreamPlace, commit_frame, located
from pgcdc_assets.log.transactions import (
    OpenTransaction,
    PreparedKey,
    PreparedTransaction,
    PreparedTransactions,
    StreamedTransaction,
    TransactionsInProgress,
)
from pgcdc_assets.protocol.decode import decode_any
from pgcdc_assets.protocol.layouts import MessageKind
from pgcdc_assets.protocol.messages import (
    AnyMessage,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
)
from pgcdc_assets.source.connect.failures import COPY_ANEW

_ENDS = (
    MessageKind.STREAM_COMMIT,
    MessageKind.STREAM_PREPARE,
    MessageKind.COMMIT_PREPARED,
    MessageKind.ROLLBACK_PREPARED,
)
"""The messages that end a transaction whose content arrived earlier, in blocks or at its PREPARE."""


@dataclass(frozen=True)
class StreamCommitted:
    """A transaction that was received in progress. It has now committed, and must be added to the log."""

    xid: int
    facts: CommitFacts
    commit: FrameRun
    """The transaction's Commit, as one frame."""


@dataclass(frozen=True)
class Prepared:
    """A transaction that was prepared. Its content must be stored on disk until the transaction ends."""

    transaction: PreparedTransaction


@dataclass(frozen=True)
class PreparedCommitted:
    """A prepared transaction that has committed and must be added to the log."""

    transaction: PreparedTransaction
    facts: CommitFacts
    commit: FrameRun
    """The transaction's Commit, as one frame."""


@dataclass(frozen=True)
class PreparedDropped:
    """A prepared transaction that was rolled back, or that is already in the log. Its stored content must be
    deleted."""

    key: PreparedKey


Part = Taken | Block | Dropped | StreamCommitted | Prepared | PreparedCommitted | PreparedDropped


class StreamUnsure(Exception):
    """Raised if the blocks of a committed transaction do not show which of its logical messages were rolled back, or
    whether the transaction has an origin. A transaction that is sent in one piece shows this. So the receiver must
    connect again without streaming, until ``end_lsn`` is passed."""

    def __init__(self, end_lsn: Lsn) -> None:
        super().__init__()
        self.end_lsn = end_lsn


class Intake:
    """The state of the stream: its positions, its open transactions, and the current Relation messages."""

    def __init__(
        self, describe: Describe, relations: Relations, transform_lsn: Lsn, resend_check: ResendCheck | None = None,
        wanted: MessageFilter | None = None, origins: Callable[[], bool] = lambda: False,
        prepared: PreparedTransactions | None = None,
    ) -> None:  # fmt: skip
        """``origins``: a function that reads whether any replication origin exists on the source. ``prepared``: the
        prepared transactions whose content is stored in the lake; None if two_phase is off."""
        self.positions = StreamPositions(transform_lsn)
        self._describe = describe
        self._origins = origins
        self._relations = relations
        self._wanted = wanted or MessageFilter()
        self._whole = WholeTransactions(self.positions, describe, relations, self._wanted, resend_check)
        self._blocks = Blocks(self._wanted, relations)
        self._prepared = prepared
        self._place = StreamPlace()
        self.sequence = 0

    @property
    def transaction(self) -> OpenTransaction | None:
        """The transaction whose Begin has arrived, but not its Commit; None if there is no such transaction."""
        return self._whole.open

    @property
    def stream_aborts(self) -> int:
        """Number of ignored Stream Aborts. PostgreSQL 18 sends such messages for transactions that it never sent."""
        return self._blocks.transactions.unknown_aborts

    @property
    def in_progress(self) -> TransactionsInProgress:
        return self._blocks.transactions

    @property
    def resend_checked(self) -> bool:
        """Whether the server has sent everything below the log's end, and it matches the log (:class:`ResendCheck`)."""
        return self._whole.resend_check is None

    def sent(self, lsn: int) -> None:
        """Record that the server has sent everything that commits below ``lsn``. Raises LogAhead."""
        if lsn >= self.positions.transform_lsn:
            self._whole.end_resend_check()
        self.positions.passed(lsn)

    def take(self, run: FrameRun, *, parallel: bool = False) -> Iterator[Part]:
        """Handle the next frames. Yields, in order, the parts to add to the log. A part is above ``transform_lsn`` and
        not above the goal, which is the LSN up to which the parent process wants the log. Yields nothing once the goal
        is reached. ``parallel``: whether the stream has the option streaming = parallel. Raises ProtocolError and
        :class:`StreamUnsure`."""
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
            if self.positions.arrived:
                return

    def _between(self, run: FrameRun, parallel: bool) -> Iterator[Part]:
        """Handles frames outside of blocks: transactions that are sent in one piece, and the ends of transactions that
        were sent in blocks or prepared."""
        first = 0
        ends = np.flatnonzero(np.isin(run.kinds, _ENDS))
        for index in np.union1d(ends, self._blocks.aborts(run)).tolist():
            if first < index:
                yield self._whole.take(run.part(first, index))
            if self.positions.arrived:
                return
            first = index + 1
            part = self._end(decode_any(run.payload(index), run.lsn(index), parallel=parallel), run, index)
            if part is not None:
                yield part
        if first < len(run) and not self.positions.arrived:
            yield self._whole.take(run.part(first, len(run)))

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

    def _commit(self, message: StreamCommit, run: FrameRun, index: int) -> StreamCommitted | Dropped:
        """Handles the commit of a transaction in progress. Its Relation messages apply to later transactions, even if
        the transaction itself is not added to the log, because the server does not repeat Relation messages."""
        transaction, overlay = self._blocks.end(message, run, index)
        facts = facts_of(overlay.relations, self._describe)
        schema_ids = overlay.promote(self._relations, facts, int(run.sequence[index]))
        held = self.positions.holds(message.commit_lsn)
        self.sent(message.commit_lsn)
        if held or self.positions.is_beyond(message.commit_lsn, message.end_lsn):
            return Dropped(message.xid)
        self._be_sure(transaction, message.end_lsn)
        self.positions.reached(message.end_lsn)
        return StreamCommitted(message.xid, _facts(message, transaction.aborted, schema_ids), commit_frame(run, index))

    def _be_sure(self, came: StreamedTransaction, end_lsn: Lsn) -> None:
        """Raises StreamUnsure if the received blocks do not show which logical messages were rolled back, or whether
        the transaction has an origin."""
        if came.ambiguous or (not came.origin_known and self._origins()):
            raise StreamUnsure(end_lsn)

    # Two-phase commit: the content arrives at PREPARE, but its place in the log is the COMMIT PREPARED --

    def _prepare(self, message: Prepare, run: FrameRun, index: int) -> Prepared | Dropped:
        """Handles a PREPARE. If the transaction is already stored, drops the content that has just arrived: until
        the PREPARE is confirmed, the server sends the content again at each connect."""
        known = self._known(run.lsn(index))
        came, overlay = self._blocks.end(message, run, index)
        overlay.pass_on()
        self.sent(message.prepare_lsn)
        if self.positions.is_beyond(message.prepare_lsn, message.end_lsn):
            return Dropped(message.xid)
        if isinstance(message, StreamPrepare):
            self._be_sure(came, message.end_lsn)
        self.positions.reached(message.end_lsn)
        key = PreparedKey(message.xid, message.gid, message.end_lsn)
        transaction = PreparedTransaction(
            key, message.prepare_ts, frozenset(came.aborted), overlay, came.changes, came.bytes, came.origin
        )
        return Prepared(transaction) if known.prepare(transaction) else Dropped(message.xid)

    def _commit_prepared(
        self, message: CommitPrepared, run: FrameRun, index: int
    ) -> PreparedCommitted | PreparedDropped | None:
        """Handles a COMMIT PREPARED. If the commit is past the goal, the transaction stays prepared here, and the
        server sends the COMMIT PREPARED again on a later connection."""
        known = self._known(run.lsn(index))
        transaction, held = known.named(message), self.positions.holds(message.commit_lsn)
        if self._whole.resend_check is not None:
            self._whole.resend_check.committed(message.commit_lsn, message.xid, transaction)
        self.sent(message.commit_lsn)
        if not held and self.positions.is_beyond(message.commit_lsn, message.end_lsn):
            return None
        if transaction is None:
            if not held:
                raise PreparedLost(
                    f"prepared transaction {message.gid!r} was committed, but its changes are not in the lake: it was "
                    "prepared before two_phase was enabled, or its changes were lost", thing="change log",
                    lsn=message.commit_lsn, do=COPY_ANEW,
                )  # fmt: skip
            return None
        if held:
            known.end(transaction)
            return PreparedDropped(transaction.key)
        # Read the catalog before any state changes, because the receiver may stop while it waits for the answer.
        facts = facts_of(transaction.overlay.relations, self._describe)
        known.end(transaction)
        self.positions.reached(message.end_lsn)
        schema_ids = transaction.overlay.known_to(self._relations, facts)
        return PreparedCommitted(
            transaction, _facts(message, transaction.aborted, schema_ids), commit_frame(run, index)
        )

    def _rollback_prepared(self, message: RollbackPrepared, lsn: Lsn) -> PreparedDropped | None:
        known = self._known(lsn)
        if self.positions.goal is not None and not self.positions.goal.allows(message.rollback_end_lsn):
            self.positions.arrived = True
            return None
        self.sent(message.rollback_end_lsn)
        self.positions.reached(message.rollback_end_lsn)
        transaction = known.named(message)
        if transaction is None:
            return None
        known.end(transaction)
        return PreparedDropped(transaction.key)

    def _known(self, lsn: Lsn) -> PreparedTransactions:
        if self._prepared is None:
            raise ProtocolError("a prepared transaction arrived, although two_phase is not enabled", lsn=lsn)
        return self._prepared


def _facts(message: StreamCommit | CommitPrepared, aborted: Iterable[int], ids: Mapping[int, int]) -> CommitFacts:
    return CommitFacts(int(message.commit_lsn), message.commit_ts, tuple(sorted(aborted)), ids)
