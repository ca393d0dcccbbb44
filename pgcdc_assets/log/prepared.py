"""Prepared transactions whose content came at their PREPARE, as it does where the slot has two_phase on.

Once the slot is confirmed past a PREPARE its content never comes again: only Commit Prepared or Rollback Prepared does,
perhaps days later and to another process. So, other than transactions in progress, these outlive the connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.protocol.messages import CommitPrepared, Prepare, RollbackPrepared, StreamPrepare


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
    prepare_lsn: Lsn
    prepare_ts: int
    """Microseconds since 1970."""
    aborted: frozenset[int] = frozenset()
    """Subtransactions of its content that do not count, where it came in blocks."""


class PreparedTransactions:
    """Those of one log."""

    def __init__(self, known: Iterable[PreparedTransaction] = ()) -> None:
        self._pending = {transaction.key: transaction for transaction in known}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PreparedTransaction]:
        return iter(self._pending.values())

    def prepare(
        self, message: Prepare | StreamPrepare, aborted: Iterable[int] = ()
    ) -> tuple[PreparedTransaction, PreparedTransaction | None]:
        """A PREPARE came. Returns it, and what it takes the place of: until it is confirmed the server sends it again
        after each connect."""
        key = PreparedKey(message.xid, message.gid, message.end_lsn)
        again = self._pending.get(key)
        self._pending[key] = PreparedTransaction(key, message.prepare_lsn, message.prepare_ts, frozenset(aborted))
        return self._pending[key], again

    def commit(self, message: CommitPrepared) -> PreparedTransaction | None:
        """COMMIT PREPARED. None where the content never came: it was prepared before two_phase was on."""
        found = [key for key in self._pending if key[:2] == (message.xid, message.gid)]
        found = [key for key in found if key.end_lsn <= message.commit_lsn]
        return self._pending.pop(max(found, key=lambda key: key.end_lsn)) if found else None

    def rollback(self, message: RollbackPrepared) -> PreparedTransaction | None:
        """ROLLBACK PREPARED. None where the content never came, which is no loss."""
        return self._pending.pop(PreparedKey(message.xid, message.gid, message.prepare_end_lsn), None)
