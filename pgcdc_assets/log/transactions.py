"""Transactions in runs of frames: finds the one that is open after a run, and refuses what pgoutput never sends.

Protocol version 1 sends whole transactions one after the other, so at most one is open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.framerun import IS_CHANGE, IS_ROW, FrameRun, check_lengths
from pgcdc_assets.protocol.layouts import STREAM_ABORT, MessageKind
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


def transaction_after(run: FrameRun, before: OpenTransaction | None) -> OpenTransaction | None:
    """The transaction that is open after a run, given the one that was open before it."""
    _check_nesting(run, before)
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


def _check_nesting(run: FrameRun, before: OpenTransaction | None) -> None:
    """Begin and Commit take turns, rows stand between them, and Stream Abort does not. ProtocolError otherwise."""
    aborts = run.at(MessageKind.STREAM_ABORT)
    check_lengths(run, aborts, STREAM_ABORT)
    steps = np.zeros(len(run), dtype=np.int64)
    steps[run.brackets.begins], steps[run.brackets.commits] = 1, -1
    depth = np.cumsum(steps) + (before is not None)
    misplaced = IS_ROW[run.kinds] & (depth != 1)
    misplaced[aborts] = depth[aborts] != 0
    wrong = np.flatnonzero((depth < 0) | (depth > 1) | misplaced)
    if len(wrong):
        first = int(wrong[0])
        raise ProtocolError(f"message {chr(run.kinds[first])} stands outside of its place", lsn=run.lsn(first))
