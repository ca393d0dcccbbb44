"""Collects the blocks of transactions in progress, and keeps the list of these transactions. A block is what the server
sends from Stream Start to Stream Stop. Does no I/O."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pgcdc_assets.core.arrays import Ints
from pgcdc_assets.core.lsn import ZERO
from pgcdc_assets.log.content import BlockFrames
from pgcdc_assets.log.framerun import IS_CHANGE, IS_CONTROL, IS_MESSAGE, FrameRun
from pgcdc_assets.log.receive.messagefilter import MessageFilter
from pgcdc_assets.log.relations import Overlay, Relations
from pgcdc_assets.log.rows import changed_relations
from pgcdc_assets.log.transactions import StreamedTransaction, TransactionsInProgress, origin_in
from pgcdc_assets.protocol.decode import decode_any
from pgcdc_assets.protocol.layouts import STREAM_ABORT, STREAM_START, MessageKind
from pgcdc_assets.protocol.messages import (
    BeginPrepare,
    Prepare,
    Relation,
    StreamAbort,
    StreamCommit,
    StreamStart,
    Type,
)


@dataclass(frozen=True)
class Block:
    """Frames of a transaction in progress."""

    xid: int
    overlay: Overlay
    frames: BlockFrames
    origin: str | None


@dataclass(frozen=True)
class Dropped:
    """A transaction in progress whose received content must be deleted."""

    xid: int


class Blocks:
    """The transactions in progress of one connection. A transaction that is sent in one piece at its PREPARE counts as
    in progress from Begin Prepare to Prepare."""

    def __init__(self, wanted: MessageFilter, relations: Relations) -> None:
        self._wanted = wanted
        self._relations = relations
        self._overlays: dict[int, Overlay] = {}
        self.transactions = TransactionsInProgress()

    def take(self, xid: int, run: FrameRun, subxid: Ints) -> Iterator[Block | Dropped]:
        """Handle frames of one transaction's blocks. Yields their content. If an earlier transaction with the same xid
        never ended, yields a :class:`Dropped` for that transaction first."""
        starts = run.at(MessageKind.STREAM_START)
        firsts = starts[run.field(starts, STREAM_START, "first") != 0].tolist()
        firsts += run.at(MessageKind.BEGIN_PREPARE).tolist()
        if len(starts) and starts[0] not in firsts:
            self._start(xid, run, int(starts[0]))
        for begin, end in pairwise(sorted({0, *firsts, len(run)})):
            if begin in firsts and self._start(xid, run, begin) is not None:
                yield Dropped(xid)
            yield self._content(xid, run.part(begin, end), subxid[begin:end])

    def _start(self, xid: int, run: FrameRun, index: int) -> StreamedTransaction | None:
        """Handle the start of a block. If an earlier transaction with the same xid has not ended, returns the earlier
        transaction."""
        message = decode_any(run.payload(index), run.lsn(index), parallel=False)
        if isinstance(message, BeginPrepare):
            self._overlays[xid] = Overlay(self._relations)
            return self.transactions.start(StreamStart(xid, first=True), run.lsn(index), time.monotonic())
        assert isinstance(message, StreamStart)
        if message.first:
            self._overlays[xid] = Overlay()
        return self.transactions.start(message, run.lsn(index), time.monotonic())

    def _content(self, xid: int, run: FrameRun, subxid: Ints) -> Block:
        overlay = self._overlays[xid]
        origin = origin_in(run) or self.transactions[xid].origin
        came = np.flatnonzero(IS_CHANGE[run.kinds])
        first = None
        if len(came):
            first = ZERO if run.kinds[came[0]] == MessageKind.MESSAGE else run.lsn(int(came[0]))
        gone = self._wanted.unwanted(run, foreign=origin is not None)
        if gone.any():
            run, subxid = run.without(gone), subxid[~gone]
        if overlay.base is not None:
            overlay.inherit(changed_relations(run))
        for index in np.flatnonzero(IS_CONTROL[run.kinds]).tolist():
            message = run.message(index)
            if isinstance(message, Relation):
                overlay.see(message, run.payload(index), int(run.sequence[index]))
            elif isinstance(message, Type):
                overlay.see_type(message.type_oid, run.payload(index))
        changes, messages = int(IS_CHANGE[run.kinds].sum()), int(IS_MESSAGE[run.kinds].sum())
        self.transactions.add(xid, changes=changes, size=run.size, messages=messages, origin=origin, first=first)
        return Block(xid, overlay, BlockFrames(run, subxid), origin)

    def aborts(self, run: FrameRun) -> Ints:
        """The numbers of the frames with a Stream Abort of a known transaction. PostgreSQL 18 also sends Stream Aborts
        for transactions that it never sent; these are only counted."""
        found = run.at(MessageKind.STREAM_ABORT)
        if not len(found):
            return found
        known = np.isin(run.field(found, STREAM_ABORT, "xid"), self.transactions.xids)
        self.transactions.unknown_aborts += len(found) - int(known.sum())
        return found[known]

    def abort(self, message: StreamAbort) -> Dropped | None:
        """Handle the rollback of a transaction, or of a part of it."""
        gone = self.transactions.abort(message)
        if gone is None:
            return None
        del self._overlays[gone.xid]
        return Dropped(gone.xid)

    def end(self, message: StreamCommit | Prepare, run: FrameRun, index: int) -> tuple[StreamedTransaction, Overlay]:
        """Remove and return a transaction that has committed or is prepared, with its relations."""
        transaction = self.transactions.end(message, run.lsn(index))
        return transaction, self._overlays.pop(message.xid)
