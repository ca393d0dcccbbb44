"""Transactions whose frames continue in the next run: an open whole transaction, and transactions in progress.

Whole transactions come one after another, so at most one of them is open. Blocks of transactions in progress come
between whole transactions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pgcdc_assets.log.framerun import IS_CHANGE, FrameRun
from pgcdc_assets.protocol.layouts import MessageKind
from pgcdc_assets.protocol.messages import Origin


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
