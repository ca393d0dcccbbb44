"""Transactions whose end has not come: the open whole transaction, transactions in progress, prepared transactions. At
most one whole transaction is open, because whole transactions come one after another. Blocks of transactions in
progress come between them. :mod:`pgcdc_assets.log.content` holds the blocks' content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.framerun import IS_CHANGE, FrameRun
from pgcdc_assets.log.relations import Overlay
from pgcdc_assets.protocol.layouts import MessageKind
from pgcdc_assets.protocol.messages import (
    CommitPrepared,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
)


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction whose Commit has not come: the fields of its Begin, and the number of its changes."""

    final_lsn: int
    commit_ts: int
    """Microseconds since 1970."""
    xid: int
    ordinal: int = 0
    """Number of changes received, which is the ``tx_ordinal`` of the next change."""
    origin: str | None = None


@dataclass(frozen=True)
class OpenBlock:
    """The state of a transaction in progress before some frames of its blocks."""

    xid: int
    """The xid of the top transaction."""
    ordinal: int = 0
    """Number of earlier changes, including changes that were rolled back."""
    origin: str | None = None


def transaction_after(run: FrameRun, before: OpenTransaction | None) -> OpenTransaction | None:
    """The transaction that is open after a run; ``before`` is the transaction that is open before the run.
    :func:`pgcdc_assets.log.streamed.located` has checked that Begin and Commit alternate."""
    brackets = run.brackets
    last = int(brackets.begins[-1]) if len(brackets.begins) else -1
    if len(brackets.commits) and brackets.commits[-1] > last:
        return None
    now = before
    if last >= 0:
        now = OpenTransaction(int(brackets.final_lsn[-1]), int(brackets.commit_ts[-1]), int(brackets.xid[-1]))
    if now is None:
        return None
    return replace(
        now,
        ordinal=now.ordinal + int(IS_CHANGE[run.kinds[last + 1 :]].sum()),
        origin=origin_in(run.part(last + 1, len(run))) or now.origin,
    )


def origin_in(run: FrameRun) -> str | None:
    """The name in the last Origin message."""
    found = run.at(MessageKind.ORIGIN)
    message = run.message(int(found[-1])) if len(found) else None
    return message.name if isinstance(message, Origin) else None


@dataclass
class StreamedTransaction:
    """The received part of a transaction in progress. Its content comes in blocks under the xid of the top transaction,
    and each row in a block names its subtransaction. For a rollback to a savepoint, PostgreSQL sends a Stream Abort for
    the savepoint's subtransaction and for each subtransaction that was released into it. Within a transaction no xid is
    used twice. So a row counts exactly if its xid is not aborted, and received rows can stay unchanged."""

    xid: int
    lsn: Lsn
    """LSN of its first block."""
    since: float
    """When the first block came, by the caller's clock."""
    aborted: set[int] = field(default_factory=set)
    """The aborted subtransactions, whose rows do not count."""
    changes: int = 0
    """Number of changes received, including aborted subtransactions: the ``tx_ordinal`` of the next change."""
    bytes: int = 0
    origin: str | None = None
    first: Lsn | None = None
    """LSN of the first change. ZERO if it is a logical message, for which PostgreSQL sends no origin."""
    messages: int = 0
    """How many of the changes are logical messages."""
    ambiguous: bool = False
    """Whether a logical message may have been rolled back. Such a message carries the xid of the top transaction, even
    if a subtransaction emitted it. So after a subtransaction's rollback, earlier messages may count or not."""

    @property
    def origin_known(self) -> bool:
        """Whether it is certain which origin the transaction has, or that it has none. PostgreSQL takes the origin from
        the first item that it decodes for a block, at the block's LSN, and sends no origin if that item is a logical
        message or the trace of a catalog change. A transaction without followed changes needs no origin."""
        return self.origin is not None or self.first == self.lsn or not self.changes


class TransactionsInProgress:
    """The transactions in progress of one connection, by the xid of the top transaction. Nothing here outlives a
    connection: after each connect the server sends an open transaction again from its start, in other blocks, or whole
    at its commit."""

    def __init__(self) -> None:
        self._open: dict[int, StreamedTransaction] = {}
        self.unknown_aborts = 0
        """Number of Stream Aborts for transactions that were never sent, as PostgreSQL 18 sends them."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, xid: int) -> bool:
        return xid in self._open

    def __getitem__(self, xid: int) -> StreamedTransaction:
        return self._open[xid]

    @property
    def xids(self) -> list[int]:
        return list(self._open)

    @property
    def bytes(self) -> int:
        """Bytes received for all these transactions."""
        return sum(transaction.bytes for transaction in self._open.values())

    @property
    def oldest(self) -> StreamedTransaction | None:
        """The transaction whose first block came first."""
        return min(self._open.values(), key=lambda transaction: transaction.since, default=None)

    def start(self, message: StreamStart, lsn: Lsn, now: float) -> StreamedTransaction | None:
        """A block begins. If it is a first block, returns the earlier transaction of this xid, which is now void.
        Raises ProtocolError for a later block of a transaction whose first block did not come."""
        void = self._open.get(message.xid)
        if not message.first:
            if void is None:
                raise ProtocolError(f"the first block of transaction {message.xid} did not come", lsn=lsn)
            return None
        self._open[message.xid] = StreamedTransaction(message.xid, lsn, now)
        return void

    def add(
        self, xid: int, *, changes: int, size: int, messages: int = 0, origin: str | None = None,
        first: Lsn | None = None,
    ) -> None:  # fmt: skip
        """Add a block's content to its transaction. ``first`` is the LSN of the block's first change."""
        transaction = self._open[xid]
        transaction.changes += changes
        transaction.bytes += size
        transaction.messages += messages
        transaction.origin = origin or transaction.origin
        transaction.first = first if transaction.first is None else transaction.first

    def abort(self, message: StreamAbort) -> StreamedTransaction | None:
        """A rollback. Returns the transaction if all of it is rolled back."""
        transaction = self._open.get(message.xid)
        if transaction is None:
            self.unknown_aborts += 1
            return None
        if message.whole:
            return self._open.pop(message.xid)
        transaction.aborted.add(message.subxid)
        transaction.ambiguous |= transaction.messages > 0
        return None

    def end(self, message: StreamCommit | StreamPrepare | Prepare, lsn: Lsn) -> StreamedTransaction:
        """The transaction is complete, and no longer in progress. Raises ProtocolError if no block of it came."""
        transaction = self._open.pop(message.xid, None)
        if transaction is None:
            raise ProtocolError(f"no block of transaction {message.xid} came, which is complete now", lsn=lsn)
        return transaction

    def clear(self) -> None:
        """Forget all transactions. Called when the connection is lost: the server will send them again."""
        self._open.clear()


class PreparedKey(NamedTuple):
    """Identifies a prepared transaction. gid and xid are not enough, because both may be used again."""

    xid: int
    gid: str
    end_lsn: Lsn
    """The first byte after the PREPARE record."""


@dataclass(frozen=True)
class PreparedTransaction:
    """A prepared transaction that has not ended yet."""

    key: PreparedKey
    prepare_ts: int
    """Microseconds since 1970."""
    aborted: frozenset[int] = frozenset()
    """Aborted subtransactions, whose rows do not count. Empty if the content did not come in blocks."""
    overlay: Overlay = field(default_factory=Overlay, compare=False)
    """Its relations, which other transactions do not see before its commit."""
    changes: int = 0
    """Number of changes, including aborted subtransactions. It is the ``tx_ordinal`` of the next change."""
    bytes: int = 0
    origin: str | None = None
    counted: int = field(default=0, compare=False)
    """Number of changes that its commit will add to the log. For display only; 0 before the content is kept."""


class PreparedTransactions:
    """The prepared transactions of one log, whose content came at their PREPARE because the slot has two_phase on. Once
    the slot is confirmed past a PREPARE, the content never comes again, only Commit Prepared or Rollback Prepared,
    perhaps days later and to another process. So prepared transactions outlive the connection
    (:class:`pgcdc_assets.log.spill.PreparedFolder`)."""

    def __init__(self, known: Iterable[PreparedTransaction] = ()) -> None:
        self._pending = {transaction.key: transaction for transaction in known}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PreparedTransaction]:
        return iter(self._pending.values())

    def prepare(self, transaction: PreparedTransaction) -> bool:
        """Returns False if the PREPARE is known: the server sends it at each connect until it is confirmed."""
        return self._pending.setdefault(transaction.key, transaction) is transaction

    def named(self, message: CommitPrepared | RollbackPrepared) -> PreparedTransaction | None:
        """The transaction that this message ends. None if its content never came, or if it has ended."""
        if isinstance(message, RollbackPrepared):
            return self._pending.get(PreparedKey(message.xid, message.gid, message.prepare_end_lsn))
        found = [key for key in self._pending if key[:2] == (message.xid, message.gid)]
        found = [key for key in found if key.end_lsn <= message.commit_lsn]
        return self._pending[max(found, key=lambda key: key.end_lsn)] if found else None

    def end(self, transaction: PreparedTransaction) -> None:
        """The transaction has committed, or was rolled back."""
        del self._pending[transaction.key]
