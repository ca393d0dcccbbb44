"""Decodes messages of all protocol versions, one at a time.

A transaction that is still in progress comes in blocks, from Stream Start to Stream Stop. Blocks of several
transactions alternate. Whole transactions (Begin to Commit, Begin Prepare to Prepare), and messages outside of blocks,
come between the blocks. Within a block each message carries an additional xid: the xid of the subtransaction that made
the change. A transactional logical message carries the xid of the top transaction instead, even if a subtransaction
emitted it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.protocol import layouts
from pgcdc_assets.protocol.decode import READERS, MessageReader
from pgcdc_assets.protocol.layouts import EPOCH, MessageKind
from pgcdc_assets.protocol.messages import (
    AnyMessage,
    BeginPrepare,
    CommitPrepared,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)


def decode_any(payload: bytes, lsn: Lsn = ZERO, *, parallel: bool) -> AnyMessage:
    """Like :func:`pgcdc_assets.protocol.decode.decode`, for a message of any version that is outside of all blocks.

    ``parallel``: whether streaming is parallel. Each Stream Abort then has two more fields.
    """
    readers = _PARALLEL_READERS if parallel else _READERS
    return MessageReader(payload, lsn).whole(readers, "its kind is unknown to the protocol")


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
