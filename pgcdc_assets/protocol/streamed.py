"""Messages of all versions, one at a time, and where each belongs: the reference for versions 2 to 4.

A transaction that is still in progress comes in blocks, from Stream Start to Stream Stop. Blocks of several
transactions take turns; whole transactions (Begin to Commit, Begin Prepare to Prepare) and messages that are of no
block stand between them. Within a block a message carries one xid more: that of the subtransaction which made the
change. A transactional logical message carries the top transaction's, whichever subtransaction emitted it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.protocol import layouts
from pgcdc_assets.protocol.decode import READERS, MessageReader
from pgcdc_assets.protocol.layouts import BETWEEN, BRACKETS, CARRY_XID, CONTENT, EPOCH, MessageKind
from pgcdc_assets.protocol.messages import (
    AnyMessage,
    BeginPrepare,
    CommitPrepared,
    LogicalMessage,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A message, and the transaction of the block that it stands in, if it stands in one. What comes from Begin Prepare
    to Prepare is one block."""

    message: AnyMessage
    top: int | None = None
    """The top transaction's xid; a block's beginning and end belong to it, too."""
    subxid: int | None = None
    """The xid that the message carries for itself; the transaction's, where it comes whole at its PREPARE."""


def decode_any(payload: bytes, lsn: Lsn = ZERO, *, parallel: bool) -> AnyMessage:
    """A message of any version that stands outside of all blocks; as :func:`pgcdc_assets.protocol.decode.decode`.

    ``parallel`` is whether streaming is: each Stream Abort then has two fields more.
    """
    return _read(MessageReader(payload, lsn), parallel)


class StreamDecoder:
    """Decodes the messages of one connection, in order. ``parallel`` as for :func:`decode_any`."""

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel
        self._opened: MessageKind | None = None
        """What began the transaction or the block that is open."""
        self._top: int | None = None

    def take(self, payload: bytes, lsn: Lsn = ZERO) -> Placed:
        """The next message; ``lsn`` is for the error alone. Raises ProtocolError where it is malformed, or stands where
        none of its kind can."""
        reader = MessageReader(payload, lsn)
        kind = payload[0]
        subxid = None
        if self._opened == MessageKind.STREAM_START and kind in CARRY_XID:
            (subxid,) = reader.fields(layouts.XID)
        message = _read(reader, self._parallel)
        if not self._has_its_place(message, kind):
            reader.fail("stands outside of its place")
        top = message.xid if isinstance(message, StreamStart | BeginPrepare) else self._top
        if self._opened == MessageKind.BEGIN_PREPARE and kind in CARRY_XID:
            subxid = top
        self._pass(kind, top)
        return Placed(message, top, subxid)

    def _has_its_place(self, message: AnyMessage, kind: int) -> bool:
        transactional = isinstance(message, LogicalMessage) and message.transactional
        if self._opened is None:
            return kind in BRACKETS or (kind in BETWEEN and not transactional)
        if self._opened == MessageKind.STREAM_START and kind == MessageKind.MESSAGE:
            return transactional
        return kind in CONTENT or kind == BRACKETS[self._opened]

    def _pass(self, kind: int, top: int | None) -> None:
        if kind in BRACKETS:
            self._opened, self._top = MessageKind(kind), top
        elif self._opened is not None and kind == BRACKETS[self._opened]:
            self._opened = self._top = None


def _read(reader: MessageReader, parallel: bool) -> AnyMessage:
    return reader.whole(_PARALLEL_READERS if parallel else _READERS, "its kind is unknown to the protocol")


def _start(reader: MessageReader) -> StreamStart:
    xid, first = reader.fields(layouts.STREAM_START)
    return StreamStart(xid, bool(reader.known(first, 1)))


def _stop(reader: MessageReader) -> StreamStop:
    return StreamStop()


def _commit(reader: MessageReader) -> StreamCommit:
    xid, flags, commit_lsn, end_lsn, commit_ts = reader.fields(layouts.STREAM_COMMIT)
    return StreamCommit(xid, reader.known(flags, 0), Lsn(commit_lsn), Lsn(end_lsn), commit_ts + EPOCH)


def _parallel_abort(reader: MessageReader) -> StreamAbort:
    xid, subxid, abort_lsn, abort_ts = reader.fields(layouts.PARALLEL_STREAM_ABORT)
    return StreamAbort(xid, subxid, Lsn(abort_lsn), abort_ts + EPOCH)


def _begin_prepare(reader: MessageReader) -> BeginPrepare:
    prepare_lsn, end_lsn, prepare_ts, xid = reader.fields(layouts.BEGIN_PREPARE)
    return BeginPrepare(Lsn(prepare_lsn), Lsn(end_lsn), prepare_ts + EPOCH, xid, reader.string())


def _prepare(reader: MessageReader) -> Prepare:
    flags, prepare_lsn, end_lsn, prepare_ts, xid = reader.fields(layouts.PREPARE)
    reader.known(flags, 0)
    return Prepare(flags, Lsn(prepare_lsn), Lsn(end_lsn), prepare_ts + EPOCH, xid, reader.string())


def _stream_prepare(reader: MessageReader) -> StreamPrepare:
    flags, prepare_lsn, end_lsn, prepare_ts, xid = reader.fields(layouts.PREPARE)
    reader.known(flags, 0)
    return StreamPrepare(flags, Lsn(prepare_lsn), Lsn(end_lsn), prepare_ts + EPOCH, xid, reader.string())


def _commit_prepared(reader: MessageReader) -> CommitPrepared:
    flags, commit_lsn, end_lsn, commit_ts, xid = reader.fields(layouts.COMMIT_PREPARED)
    reader.known(flags, 0)
    return CommitPrepared(flags, Lsn(commit_lsn), Lsn(end_lsn), commit_ts + EPOCH, xid, reader.string())


def _rollback_prepared(reader: MessageReader) -> RollbackPrepared:
    flags, prepare_end, rollback_end, prepare_ts, rollback_ts, xid = reader.fields(layouts.ROLLBACK_PREPARED)
    reader.known(flags, 0)
    times = prepare_ts + EPOCH, rollback_ts + EPOCH
    return RollbackPrepared(flags, Lsn(prepare_end), Lsn(rollback_end), *times, xid, reader.string())


_READERS: Final[Mapping[int, Callable[[MessageReader], AnyMessage]]] = {
    **READERS,
    MessageKind.STREAM_START: _start,
    MessageKind.STREAM_STOP: _stop,
    MessageKind.STREAM_COMMIT: _commit,
    MessageKind.BEGIN_PREPARE: _begin_prepare,
    MessageKind.PREPARE: _prepare,
    MessageKind.STREAM_PREPARE: _stream_prepare,
    MessageKind.COMMIT_PREPARED: _commit_prepared,
    MessageKind.ROLLBACK_PREPARED: _rollback_prepared,
}
_PARALLEL_READERS: Final = {**_READERS, MessageKind.STREAM_ABORT: _parallel_abort}
