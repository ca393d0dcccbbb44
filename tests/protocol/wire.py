"""Writes messages as a server does, which is the opposite of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

from pgcdc_assets.protocol.layouts import EPOCH
from pgcdc_assets.protocol.messages import (
    UNCHANGED,
    AnyMessage,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TupleData,
    Type,
    Update,
    Value,
)

RowMessage = Insert | Update | Delete


def string(text: str) -> bytes:
    return text.encode() + b"\0"


def value(item: Value) -> bytes:
    if item is None:
        return b"n"
    if item is UNCHANGED:
        return b"u"
    # The decoder has turned each byte that is not valid text into a surrogate. ``surrogateescape`` turns the surrogates
    # back into these bytes.
    data = item.encode("utf-8", "surrogateescape")
    return b"t" + pack("!I", len(data)) + data


def row(values: TupleData) -> bytes:
    return pack("!H", len(values)) + b"".join(value(item) for item in values)


def insert(message: Insert) -> bytes:
    return b"I" + pack("!I", message.relation_id) + b"N" + row(message.new)


def update(message: Update) -> bytes:
    old = b""
    if message.old_kind is not None and message.old is not None:
        old = message.old_kind.encode() + row(message.old)
    return b"U" + pack("!I", message.relation_id) + old + b"N" + row(message.new)


def delete(message: Delete) -> bytes:
    return b"D" + pack("!I", message.relation_id) + message.old_kind.encode() + row(message.old)


def row_message(message: RowMessage) -> bytes:
    if isinstance(message, Insert):
        return insert(message)
    return update(message) if isinstance(message, Update) else delete(message)


def relation(message: Relation) -> bytes:
    head = b"R" + pack("!I", message.relation_id) + string(message.schema) + string(message.name)
    columns = [
        pack("!B", column.key) + string(column.name) + pack("!Ii", column.type_oid, column.typmod)
        for column in message.columns
    ]
    return head + message.replica_identity.encode() + pack("!H", len(columns)) + b"".join(columns)


def type_(message: Type) -> bytes:
    return b"Y" + pack("!I", message.type_oid) + string(message.schema) + string(message.name)


def truncate(message: Truncate) -> bytes:
    flags = message.cascade | message.restart_identity << 1
    ids: Sequence[int] = message.relation_ids
    return b"T" + pack("!IB", len(ids), flags) + pack(f"!{len(ids)}I", *ids)


def message(of: AnyMessage) -> bytes:
    """The bytes of any message, as it is sent outside of the blocks of streamed transactions."""
    match of:
        case Insert() | Update() | Delete():
            return row_message(of)
        case Relation():
            return relation(of)
        case Type():
            return type_(of)
        case Truncate():
            return truncate(of)
        case Begin():
            return b"B" + pack("!QqI", of.final_lsn, of.commit_ts - EPOCH, of.xid)
        case Commit():
            return b"C" + pack("!BQQq", of.flags, of.commit_lsn, of.end_lsn, of.commit_ts - EPOCH)
        case Origin():
            return b"O" + pack("!Q", of.commit_lsn) + string(of.name)
        case LogicalMessage():
            head = pack("!BQ", of.transactional, of.lsn) + string(of.prefix)
            return b"M" + head + pack("!I", len(of.content)) + of.content
        case StreamStart():
            return b"S" + pack("!IB", of.xid, of.first)
        case StreamStop():
            return b"E"
        case StreamCommit():
            return b"c" + pack("!IBQQq", of.xid, of.flags, of.commit_lsn, of.end_lsn, of.commit_ts - EPOCH)
        case StreamAbort():
            tail = b"" if of.abort_ts is None else pack("!Qq", of.abort_lsn or 0, of.abort_ts - EPOCH)
            return b"A" + pack("!II", of.xid, of.subxid) + tail
        case BeginPrepare():
            return b"b" + pack("!QQqI", of.prepare_lsn, of.end_lsn, of.prepare_ts - EPOCH, of.xid) + string(of.gid)
        case Prepare():
            fields = pack("!BQQqI", of.flags, of.prepare_lsn, of.end_lsn, of.prepare_ts - EPOCH, of.xid)
            return (b"p" if isinstance(of, StreamPrepare) else b"P") + fields + string(of.gid)
        case CommitPrepared():
            fields = pack("!BQQqI", of.flags, of.commit_lsn, of.end_lsn, of.commit_ts - EPOCH, of.xid)
            return b"K" + fields + string(of.gid)
        case RollbackPrepared():
            lsns = of.prepare_end_lsn, of.rollback_end_lsn
            times = of.prepare_ts - EPOCH, of.rollback_ts - EPOCH
            return b"r" + pack("!BQQqqI", of.flags, *lsns, *times, of.xid) + string(of.gid)


def within(payload: bytes, xid: int) -> bytes:
    """The bytes of a message, as it is sent inside a block of a streamed transaction."""
    return payload[:1] + pack("!I", xid) + payload[1:]


def connection_message(kind: bytes, body: bytes) -> bytes:
    """A message of the frontend/backend protocol, for example the CopyData message that contains a frame."""
    return kind + pack("!I", len(body) + 4) + body
