"""Transactions whose end has not come: the open whole transaction, transactions in progress, prepared transactions.

Whole transactions come one after another, so at most one of them is open. Blocks of transactions in progress come
between whole transactions. :mod:`pgcdc_assets.log.content` holds the content of transactions in progress.
"""

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
    """Number of changes received. It is the ``tx_ordinal`` of the next change."""
    origin: str | None = None


@dataclass(frozen=True)
class OpenBlock:
    """The state of a transaction in progress before some frames of its blocks."""

    xid: int
    """The xid of the top transaction."""
    ordinal: int = 0
    """Number of changes received before, changes that were rolled back since included."""
    origin: str | None = None


def transaction_after(run: FrameRun, before: OpenTransaction | None) -> OpenTransaction | None:
    """The transaction that is open after a run, given the one that was open before it.

    :func:`pgcdc_assets.log.streamed.located` has already checked that Begin and Commit alternate.
    """
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
    """The received part of a transaction in progress.

    A transaction's content comes in blocks under the xid of the top transaction. Each row in a block names its
    subtransaction. For a rollback to a savepoint, PostgreSQL sends a Stream Abort for the savepoint's subtransaction,
    and for each subtransaction that was released into it. It never uses an xid twice within a transaction. So a row
    counts exactly if its xid is not aborted, and received rows can stay unchanged.
    """

    xid: int
    lsn: Lsn
    """LSN of its first block."""
    since: float
    """When the first block came, by the caller's clock."""
    aborted: set[int] = field(default_factory=set)
    """The aborted subtransactions, whose rows do not count."""
    changes: int = 0
    """Number of changes received, changes of aborted subtransactions included. It is the ``tx_ordinal`` of the next
    change."""
    bytes: int = 0
    origin: str | None = None
    first: Lsn | None = None
    """LSN of the first change. ZERO if the first change is a logical message, for which PostgreSQL records no
    origin."""
    messages: int = 0
    """Logical messages among the changes."""
    ambiguous: bool = False
    """Whether a logical message may have been rolled back. A logical message carries the xid of the top transaction,
    even if a subtransaction emitted it. So after a subtransaction is rolled back, it is not known whether an earlier
    logical message still counts."""

    @property
    def origin_known(self) -> bool:
        """Whether the origin is certain: either the transaction names its origin, or it certainly has no origin.
        PostgreSQL takes the origin from the first item that it decodes for a block, at the block's LSN. If that item is
        the trace of a catalog change, or a logical message, no origin is sent. A transaction without any followed
        change needs no origin."""
        return self.origin is not None or self.first == self.lsn or not self.changes


class TransactionsInProgress:
    """The transactions in progress of one connection, by the xid of the top transaction.

    After each connect the server sends an open transaction again from its start, in other blocks, or whole at its
    commit. So nothing here outlives a connection.
    """

    def __init__(self) -> None:
        self._open: dict[int, StreamedTransaction] = {}
        self.unknown_aborts = 0
        """Number of Stream Aborts for transactions that were never sent. PostgreSQL 18 sends such Stream Aborts."""

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
        """Bytes received of all these transactions."""
        return sum(transaction.bytes for transaction in self._open.values())

    @property
    def oldest(self) -> StreamedTransaction | None:
        """The transaction whose first block came first."""
        return min(self._open.values(), key=lambda transaction: transaction.since, default=None)

    def start(self, message: StreamStart, lsn: Lsn, now: float) -> StreamedTransaction | None:
        """A block begins. If it is a first block, returns the transaction of this xid that came before it, which is now
        void.

        Raises ProtocolError for a later block of a transaction whose first block did not come.
        """
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
        """Add the content of a block to the transaction; ``first`` is the LSN of its first change."""
        transaction = self._open[xid]
        transaction.changes += changes
        transaction.bytes += size
        transaction.messages += messages
        transaction.origin = origin or transaction.origin
        transaction.first = first if transaction.first is None else transaction.first

    def abort(self, message: StreamAbort) -> StreamedTransaction | None:
        """A rollback. Returns the transaction if it is rolled back as a whole."""
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
        """The connection is lost, and the server will send all these transactions again."""
        self._open.clear()


class PreparedKey(NamedTuple):
    """Identifies a prepared transaction. gid and xid are not enough, because both are used again."""

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
    """Aborted subtransactions, whose rows do not count, if the content came in blocks."""
    overlay: Overlay = field(default_factory=Overlay, compare=False)
    """Its relations, which other transactions do not see before its commit."""
    changes: int = 0
    """Number of changes, changes of aborted subtransactions included. It is the ``tx_ordinal`` of the next change."""
    bytes: int = 0
    origin: str | None = None
    counted: int = field(default=0, compare=False)
    """Number of changes that its commit will put into the log. Known only for a kept transaction, and only shown to
    people."""


class PreparedTransactions:
    """The prepared transactions of one log, whose content came at their PREPARE, because the slot has two_phase on.

    Once the slot is confirmed past a PREPARE, the content never comes again. Only Commit Prepared or Rollback Prepared
    comes, perhaps days later and to another process. So, unlike transactions in progress, prepared transactions outlive
    the connection (:class:`pgcdc_assets.log.spill.PreparedFolder`).
    """

    def __init__(self, known: Iterable[PreparedTransaction] = ()) -> None:
        self._pending = {transaction.key: transaction for transaction in known}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PreparedTransaction]:
        return iter(self._pending.values())

    def prepare(self, transaction: PreparedTransaction) -> bool:
        """A PREPARE came. Returns False if it is already known: until the PREPARE is confirmed, the server sends it
        again after each connect."""
        return self._pending.setdefault(transaction.key, transaction) is transaction

    def named(self, message: CommitPrepared | RollbackPrepared) -> PreparedTransaction | None:
        """The transaction that ends with this message. None if its content never came, or if it already ended."""
        if isinstance(message, RollbackPrepared):
            return self._pending.get(PreparedKey(message.xid, message.gid, message.prepare_end_lsn))
        found = [key for key in self._pending if key[:2] == (message.xid, message.gid)]
        found = [key for key in found if key.end_lsn <= message.commit_lsn]
        return self._pending[max(found, key=lambda key: key.end_lsn)] if found else None

    def end(self, transaction: PreparedTransaction) -> None:
        """It has committed, or was rolled back."""
        del self._pending[transaction.key]
