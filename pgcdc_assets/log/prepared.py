"""Prepared transactions whose content came at their PREPARE, because the slot has two_phase on.

Once the slot is confirmed past a PREPARE, the content never comes again. Only Commit Prepared or Rollback Prepared
comes, perhaps days later and to another process. So, unlike transactions in progress, prepared transactions outlive the
connection (:mod:`pgcdc_assets.log.preparedfolder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.relations import Overlay
from pgcdc_assets.protocol.messages import CommitPrepared, RollbackPrepared


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
    """The prepared transactions of one log."""

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
