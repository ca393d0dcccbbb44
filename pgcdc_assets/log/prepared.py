"""Prepared transactions whose content came at their PREPARE, as it does where the slot has two_phase on.

Once the slot is confirmed past a PREPARE its content never comes again: only Commit Prepared or Rollback Prepared does,
perhaps days later and to another process. So, other than transactions in progress, these outlive the connection
(:mod:`pgcdc_assets.log.preparedfolder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.relations import Overlay
from pgcdc_assets.protocol.messages import CommitPrepared, RollbackPrepared


class PreparedKey(NamedTuple):
    """What tells apart the prepared transactions of all times: gids are used again, and so are xids."""

    xid: int
    gid: str
    end_lsn: Lsn
    """Behind the PREPARE's record."""


@dataclass(frozen=True)
class PreparedTransaction:
    """One whose end has not come."""

    key: PreparedKey
    prepare_ts: int
    """Microseconds since 1970."""
    aborted: frozenset[int] = frozenset()
    """Subtransactions of its content that do not count, where it came in blocks."""
    overlay: Overlay = field(default_factory=Overlay, compare=False)
    """Its relations, which nobody else sees before its commit."""
    changes: int = 0
    """Of aborted subtransactions too: the ``tx_ordinal`` of the next change."""
    bytes: int = 0
    origin: str | None = None
    counted: int = field(default=0, compare=False)
    """Changes that its commit will put into the log. Known where it is kept; for people."""


class PreparedTransactions:
    """Those of one log."""

    def __init__(self, known: Iterable[PreparedTransaction] = ()) -> None:
        self._pending = {transaction.key: transaction for transaction in known}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PreparedTransaction]:
        return iter(self._pending.values())

    def prepare(self, transaction: PreparedTransaction) -> bool:
        """A PREPARE came. False where it is known: until it is confirmed the server sends it after each connect."""
        return self._pending.setdefault(transaction.key, transaction) is transaction

    def named(self, message: CommitPrepared | RollbackPrepared) -> PreparedTransaction | None:
        """The one that ends with this message. None where its content never came, or came with its end long ago."""
        if isinstance(message, RollbackPrepared):
            return self._pending.get(PreparedKey(message.xid, message.gid, message.prepare_end_lsn))
        found = [key for key in self._pending if key[:2] == (message.xid, message.gid)]
        found = [key for key in found if key.end_lsn <= message.commit_lsn]
        return self._pending[max(found, key=lambda key: key.end_lsn)] if found else None

    def end(self, transaction: PreparedTransaction) -> None:
        """It has committed, or was rolled back."""
        del self._pending[transaction.key]
