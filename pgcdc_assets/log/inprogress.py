"""Transactions that are still in progress while they are received: a list of them, and which of their rows count.

A transaction's content comes in blocks under the xid of the top transaction. Each row in a block names its
subtransaction. For a rollback to a savepoint, PostgreSQL sends a Stream Abort for the savepoint's subtransaction, and
for each subtransaction that was released into it. It never uses an xid twice within a transaction. So a row counts
exactly if its xid is not aborted, and received rows can stay unchanged.

After each connect the server sends an open transaction again from its start, in other blocks, or whole at its commit.
So nothing here outlives a connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.messages import Prepare, StreamAbort, StreamCommit, StreamPrepare, StreamStart


@dataclass
class StreamedTransaction:
    """The received part of one transaction."""

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
    def origin_told(self) -> bool:
        """Whether the origin is certain: either the transaction names its origin, or it certainly has no origin.
        PostgreSQL takes the origin from the first item that it decodes for a block, at the block's LSN. If that item is
        the trace of a catalog change, or a logical message, no origin is sent. A transaction without any followed
        change needs no origin."""
        return self.origin is not None or self.first == self.lsn or not self.changes


class TransactionsInProgress:
    """The transactions in progress of one connection, by the xid of the top transaction."""

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
