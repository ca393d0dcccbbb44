"""Transactions that are still in progress while they are received: which there are, and what of each counts.

A transaction's content comes in blocks under the xid of the top transaction; each row in them names its
subtransaction. PostgreSQL tells of a rollback to a savepoint by a Stream Abort for the savepoint's subtransaction and
one for each that was released into it, and uses no xid again within a transaction. So a row counts exactly if its xid
is not among the aborted ones, and what was received need not be touched.

After each connect the server sends an open transaction again from its start, in blocks that are cut otherwise, or whole
at its commit: nothing here outlives a connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol.messages import Prepare, StreamAbort, StreamCommit, StreamPrepare, StreamStart


@dataclass
class StreamedTransaction:
    """What has come of one transaction."""

    xid: int
    lsn: Lsn
    """Of its first block."""
    since: float
    """When that came, by the caller's clock."""
    aborted: set[int] = field(default_factory=set)
    """The subtransactions that do not count."""
    changes: int = 0
    """Of aborted ones too: the ``tx_ordinal`` of the next change."""
    bytes: int = 0
    origin: str | None = None
    first: Lsn | None = None
    """Of the first change that came; ZERO where that is a logical message, with which PostgreSQL notes no origin."""
    messages: int = 0
    """Logical messages among the changes."""
    ambiguous: bool = False
    """A logical message names the top transaction, whichever subtransaction emitted it. So once a subtransaction that
    may have is rolled back, it cannot be told whether the message counts."""

    @property
    def origin_told(self) -> bool:
        """Whether a transaction that names no origin has none. PostgreSQL takes it from the first thing that it decodes
        for a block, at the block's LSN: where that is the trace of a change of the catalog, or a logical message, it
        has no origin. Of a transaction that changed nothing that is followed, no origin is needed."""
        return self.origin is not None or self.first == self.lsn or not self.changes


class TransactionsInProgress:
    """Of one connection, by the xid of the top transaction."""

    def __init__(self) -> None:
        self._open: dict[int, StreamedTransaction] = {}
        self.unknown_aborts = 0
        """Stream Aborts of transactions of which nothing came: PostgreSQL 18 sends them."""

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
        """Of all that is held."""
        return sum(transaction.bytes for transaction in self._open.values())

    @property
    def oldest(self) -> StreamedTransaction | None:
        """The one whose first block came first."""
        return min(self._open.values(), key=lambda transaction: transaction.since, default=None)

    def start(self, message: StreamStart, lsn: Lsn, now: float) -> StreamedTransaction | None:
        """A block begins. Returns what is void from now on: what came of this xid before a block that is the first.

        Raises ProtocolError for a later block of a transaction whose first did not come.
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
        """This came in a block of the transaction; ``first``: where its first change stands."""
        transaction = self._open[xid]
        transaction.changes += changes
        transaction.bytes += size
        transaction.messages += messages
        transaction.origin = origin or transaction.origin
        transaction.first = first if transaction.first is None else transaction.first

    def abort(self, message: StreamAbort) -> StreamedTransaction | None:
        """A rollback. Returns the transaction where nothing is left of it."""
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
        """The transaction is complete, and no longer in progress. ProtocolError where no block of it came."""
        transaction = self._open.pop(message.xid, None)
        if transaction is None:
            raise ProtocolError(f"no block of transaction {message.xid} came, which is complete now", lsn=lsn)
        return transaction

    def clear(self) -> None:
        """The connection is gone, and the server will send all of them again."""
        self._open.clear()
