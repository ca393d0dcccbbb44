"""Transactions whose end has not arrived. There are three kinds. The server sends most transactions in one piece after
their commit, so at most one of these is open. It sends transactions in progress in blocks before their commit; blocks
arrive between transactions of the first kind. The third kind are prepared transactions. The frames of the blocks are
kept in :mod:`pgcdc_assets.log.content`, not here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pgcdc_assets.core.arrays import Bools, Ints
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
    StreamStart,
)


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction whose Begin has arrived, but not its Commit: the fields of its Begin, and its number of changes."""

    final_lsn: int
    commit_ts: int
    """Microseconds since 1970."""
    xid: int
    ordinal: int = 0
    """Number of changes received, which is the ``tx_ordinal`` of the next change."""
    origin: str | None = None


@dataclass(frozen=True)
class OpenBlock:
    """The state of a transaction in progress before the next frames of its blocks."""

    xid: int
    """The xid of the top transaction."""
    ordinal: int = 0
    """Number of earlier changes, including changes that were rolled back."""
    origin: str | None = None


def transaction_after(run: FrameRun, before: OpenTransaction | None) -> OpenTransaction | None:
    """The transaction that is open after the frames ``run``; ``before`` is the transaction that is open before them.
    :func:`pgcdc_assets.log.streamed.located` has already checked that Begin and Commit alternate."""
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
    """The origin's name in the last Origin message; None if there is no Origin message."""
    found = run.at(MessageKind.ORIGIN)
    message = run.message(int(found[-1])) if len(found) else None
    return message.name if isinstance(message, Origin) else None


def within_transactions(run: FrameRun, before: OpenTransaction | None) -> Bools:
    """Which frames are inside a transaction, from its Begin to the frame before its Commit."""
    begun, ended = np.cumsum(run.kinds == MessageKind.BEGIN), np.cumsum(run.kinds == MessageKind.COMMIT)
    inside: Bools = begun - ended + (before is not None) == 1
    return inside


def of_origin(run: FrameRun, before: OpenTransaction | None) -> Bools:
    """Which frames are inside transactions that name an origin. The server sends the Origin message directly after the
    Begin, before all changes."""
    number: Ints = np.cumsum(run.kinds == MessageKind.BEGIN)
    named: Ints = number[run.at(MessageKind.ORIGIN)]
    if before is not None and before.origin is not None:
        named = np.append(named, 0)
    found: Bools = np.isin(number, named) & within_transactions(run, before)
    return found


@dataclass
class StreamedTransaction:
    """The received part of a transaction in progress. PostgreSQL sends it in blocks, which name the xid of the top
    transaction. Each row in a block names its subtransaction. For a rollback to a savepoint, PostgreSQL sends a Stream
    Abort for the savepoint's subtransaction and for each subtransaction that was released into it. Within a
    transaction, no xid is used twice. So a row was rolled back exactly if its xid is in ``aborted``, and received rows
    can stay unchanged until the commit."""

    xid: int
    lsn: Lsn
    """LSN of the first block."""
    since: float
    """When the first block arrived, by the caller's clock."""
    aborted: set[int] = field(default_factory=set)
    """The xids of subtransactions that were rolled back."""
    changes: int = 0
    """Number of changes received, including changes that were rolled back. It is the ``tx_ordinal`` of the next
    change."""
    bytes: int = 0
    origin: str | None = None
    first: Lsn | None = None
    """LSN of the first change. ZERO if the first change is a logical message: even if PostgreSQL then sends no
    origin, the transaction may have one."""
    messages: int = 0
    """How many of the changes are logical messages."""
    ambiguous: bool = False
    """Whether some received logical messages may have been rolled back. A logical message names the xid of the top
    transaction, even if a subtransaction wrote it. So a rollback of a subtransaction does not show which earlier
    messages it includes."""

    @property
    def origin_known(self) -> bool:
        """Whether ``origin`` is certain. PostgreSQL takes the origin of a block from the first item that it decodes for
        the block, whose LSN is the block's LSN. It sends no origin if this item is a logical message or belongs to a
        catalog change. So if no origin was sent, the transaction certainly has none if its first item was a change of a
        row. A transaction without changes needs no origin."""
        return self.origin is not None or self.first == self.lsn or not self.changes


class TransactionsInProgress:
    """The transactions in progress of one connection, by the xid of the top transaction. The next connection begins
    without them, because the server then sends open transactions again from their start: in new blocks, or in one piece
    after the commit."""

    def __init__(self) -> None:
        self._open: dict[int, StreamedTransaction] = {}
        self.unknown_aborts = 0
        """Number of Stream Aborts for transactions that the server never sent. PostgreSQL 18 sends such messages."""

    def __len__(self) -> int:
        return len(self._open)

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
        """The transaction whose first block arrived first; None if there is no transaction."""
        return min(self._open.values(), key=lambda transaction: transaction.since, default=None)

    def start(self, message: StreamStart, lsn: Lsn, now: float) -> StreamedTransaction | None:
        """Record that a block begins. If this is the first block of a transaction, and an earlier transaction with the
        same xid has not ended, returns the earlier transaction, whose content the caller must drop. Raises
        ProtocolError if this is a later block of a transaction whose first block has not arrived."""
        void = self._open.get(message.xid)
        if not message.first:
            if void is None:
                raise ProtocolError(f"the first block of streamed transaction {message.xid} is missing", lsn=lsn)
            return None
        self._open[message.xid] = StreamedTransaction(message.xid, lsn, now)
        return void

    def add(
        self, xid: int, *, changes: int, size: int, messages: int = 0, origin: str | None = None,
        first: Lsn | None = None,
    ) -> None:  # fmt: skip
        """Add the counts of a block to its transaction. ``first``: the LSN of the block's first change."""
        transaction = self._open[xid]
        transaction.changes += changes
        transaction.bytes += size
        transaction.messages += messages
        transaction.origin = origin or transaction.origin
        transaction.first = first if transaction.first is None else transaction.first

    def abort(self, message: StreamAbort) -> StreamedTransaction | None:
        """Record a rollback. Returns the transaction if all of it was rolled back, otherwise None."""
        transaction = self._open.get(message.xid)
        if transaction is None:
            self.unknown_aborts += 1
            return None
        if message.whole:
            return self._open.pop(message.xid)
        transaction.aborted.add(message.subxid)
        transaction.ambiguous |= transaction.messages > 0
        return None

    def end(self, message: StreamCommit | Prepare, lsn: Lsn) -> StreamedTransaction:
        """Remove and return a transaction that is now complete. Raises ProtocolError if no block of it has arrived."""
        transaction = self._open.pop(message.xid, None)
        if transaction is None:
            raise ProtocolError(
                f"the end of streamed transaction {message.xid} arrived without any block of it", lsn=lsn
            )
        return transaction


class PreparedKey(NamedTuple):
    """Identifies a prepared transaction. gid and xid are not enough, because both may be used again."""

    xid: int
    gid: str
    end_lsn: Lsn
    """The first byte after the PREPARE record."""


@dataclass(frozen=True)
class PreparedTransaction:
    """A prepared transaction whose COMMIT or ROLLBACK PREPARED has not arrived."""

    key: PreparedKey
    prepare_ts: int
    """Microseconds since 1970."""
    aborted: frozenset[int] = frozenset()
    """The xids of subtransactions that were rolled back. Empty if the content was not sent in blocks."""
    overlay: Overlay = field(default_factory=Overlay, compare=False)
    """The transaction's relations. Other transactions do not see them before its commit."""
    changes: int = 0
    """Number of changes, including changes that were rolled back. It is the ``tx_ordinal`` of the Commit row."""
    bytes: int = 0
    origin: str | None = None
    counted: int = field(default=0, compare=False)
    """Number of changes that the transaction's commit will add to the log; 0 until the content is stored on disk. Only
    status reports use it."""


class PreparedTransactions:
    """The prepared transactions of one log, whose slot has two_phase on. The server sends their content at their
    PREPARE. Once the slot is confirmed past a PREPARE, the server never sends the content again, only the Commit
    Prepared or Rollback Prepared, perhaps days later and to another process. So prepared transactions are stored on
    disk (:class:`pgcdc_assets.log.spill.PreparedFolder`)."""

    def __init__(self, known: Iterable[PreparedTransaction] = ()) -> None:
        self._pending = {transaction.key: transaction for transaction in known}

    def prepare(self, transaction: PreparedTransaction) -> bool:
        """Add a transaction. Returns False if it is already known: until the PREPARE is confirmed, the server sends it
        again at each connect."""
        return self._pending.setdefault(transaction.key, transaction) is transaction

    def named(self, message: CommitPrepared | RollbackPrepared) -> PreparedTransaction | None:
        """The prepared transaction that this message ends; None if its content was never received, or if it has already
        ended."""
        if isinstance(message, RollbackPrepared):
            return self._pending.get(PreparedKey(message.xid, message.gid, message.prepare_end_lsn))
        found = [key for key in self._pending if key[:2] == (message.xid, message.gid)]
        found = [key for key in found if key.end_lsn <= message.commit_lsn]
        return self._pending[max(found, key=lambda key: key.end_lsn)] if found else None

    def end(self, transaction: PreparedTransaction) -> None:
        """Remove a transaction that has committed or was rolled back."""
        del self._pending[transaction.key]
