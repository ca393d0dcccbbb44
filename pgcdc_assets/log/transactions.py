"""Transactions whose frames continue in the next run: a whole one, and those in progress.

Whole transactions come one after the other, so at most one of them is open. Blocks of those in progress stand between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pgcdc_assets.log.framerun import IS_CHANGE, FrameRun
from pgcdc_assets.protocol.layouts import MessageKind
from pgcdc_assets.protocol.messages import Origin


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction whose Commit has not come: Begin's fields, and how far its changes were counted."""

    final_lsn: int
    commit_ts: int
    """Microseconds since 1970."""
    xid: int
    ordinal: int = 0
    """Changes seen so far: the ``tx_ordinal`` of the next one."""
    origin: str | None = None


@dataclass(frozen=True)
class OpenBlock:
    """A transaction in progress, where some frames of its blocks begin."""

    xid: int
    """Of the top transaction."""
    ordinal: int = 0
    """Changes that came before, also those that were rolled back since."""
    origin: str | None = None


def transaction_after(run: FrameRun, before: OpenTransaction | None) -> OpenTransaction | None:
    """The transaction that is open after a run, given the one that was open before it.

    That Begin and Commit take turns has been seen before (:func:`pgcdc_assets.log.streamed.located`).
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
