"""Decodes one message at a time: the reference decoder, and the one for control messages.

Their layouts stand in :mod:`pgcdc_assets.protocol.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, unpack
from typing import Any, Final, NoReturn, cast

from pgcdc_assets.core.catalog import ReplicaIdentity
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import layouts
from pgcdc_assets.protocol.layouts import EPOCH, MessageKind, WireLayout
from pgcdc_assets.protocol.messages import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldKind,
    Origin,
    Relation,
    RelationColumn,
    StreamAbort,
    Truncate,
    TupleData,
    Type,
    Update,
    Value,
)

_U8 = Struct("!B")
_U16 = Struct("!H")
_U32 = Struct("!I")
_TYPE_OF_COLUMN = Struct("!Ii")


def decode(payload: bytes, lsn: Lsn = ZERO) -> Message:
    """The message in ``payload``; ``lsn`` is its position in the WAL, and only used in errors.

    Raises ProtocolError, with kind and LSN, for whatever is truncated, malformed, unknown or followed
    by bytes that do not belong to it.
    """
    if not payload:
        raise ProtocolError("empty message", lsn=lsn)
    read = _READERS.get(payload[0])
    reader = _Reader(payload, lsn)
    if read is None:
        reader.fail("its kind is unknown to protocol version 1")
    message = read(reader)
    if reader.at != len(payload):
        reader.fail(f"{len(payload) - reader.at} bytes follow its end")
    return message


class _Reader:
    """Checked reads that move a cursor over one message."""

    __slots__ = ("at", "lsn", "payload")

    def __init__(self, payload: bytes, lsn: Lsn) -> None:
        self.payload = payload
        self.lsn = lsn
        self.at = 1

    def fail(self, what: str) -> NoReturn:
        kind = self.payload[:1].decode("ascii", "backslashreplace")
        raise ProtocolError(f"message of kind {kind!r}: {what}", lsn=self.lsn)

    def take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self.payload):
            self.fail(f"truncated at byte {len(self.payload)}")
        piece = self.payload[self.at : end]
        self.at = end
        return piece

    def fields(self, layout: WireLayout) -> tuple[Any, ...]:
        return self.unpacked(layout.struct)

    def unpacked(self, struct: Struct) -> tuple[Any, ...]:
        return struct.unpack(self.take(struct.size))

    def number(self, struct: Struct) -> int:
        return int(self.unpacked(struct)[0])

    def text(self, piece: bytes) -> str:
        try:
            return piece.decode()
        except UnicodeDecodeError:
            self.fail("a text is not UTF-8")

    def string(self) -> str:
        end = self.payload.find(b"\0", self.at)
        if end < 0:
            self.fail("a string does not end")
        piece = self.payload[self.at : end]
        self.at = end + 1
        return self.text(piece)

    def letter(self, allowed: str) -> str:
        letter = chr(self.number(_U8))
        if letter not in allowed:
            self.fail(f"{letter!r} where one of {allowed!r} belongs")
        return letter

    def flags(self, known: int) -> int:
        flags = self.number(_U8)
        if flags & ~known:
            self.fail(f"unknown flags {flags:#x}")
        return flags


def _begin(reader: _Reader) -> Begin:
    final_lsn, commit_ts, xid = reader.fields(layouts.BEGIN)
    return Begin(Lsn(final_lsn), commit_ts + EPOCH, xid)


def _commit(reader: _Reader) -> Commit:
    flags, commit_lsn, end_lsn, commit_ts = reader.fields(layouts.COMMIT)
    if flags:
        reader.fail(f"unknown flags {flags:#x}")
    return Commit(flags, Lsn(commit_lsn), Lsn(end_lsn), commit_ts + EPOCH)


def _origin(reader: _Reader) -> Origin:
    return Origin(Lsn(*reader.fields(layouts.ORIGIN)), reader.string())


def _relation(reader: _Reader) -> Relation:
    relation_id, schema, name = reader.number(_U32), reader.string(), reader.string()
    identity = cast("ReplicaIdentity", reader.letter(layouts.IDENTITIES))
    columns = tuple(_relation_column(reader) for _ in range(reader.number(_U16)))
    return Relation(relation_id, schema, name, identity, columns)


def _relation_column(reader: _Reader) -> RelationColumn:
    key, name = reader.flags(1), reader.string()
    type_oid, typmod = reader.unpacked(_TYPE_OF_COLUMN)
    return RelationColumn(bool(key), name, type_oid, typmod)


def _type(reader: _Reader) -> Type:
    return Type(reader.number(_U32), reader.string(), reader.string())


def _insert(reader: _Reader) -> Insert:
    relation_id = reader.number(_U32)
    reader.letter("N")
    return Insert(relation_id, _tuple(reader))


def _update(reader: _Reader) -> Update:
    relation_id = reader.number(_U32)
    letter = reader.letter("KON")
    if letter == "N":
        return Update(relation_id, None, None, _tuple(reader))
    old = _tuple(reader)
    reader.letter("N")
    return Update(relation_id, cast("OldKind", letter), old, _tuple(reader))


def _delete(reader: _Reader) -> Delete:
    relation_id = reader.number(_U32)
    letter = cast("OldKind", reader.letter("KO"))
    return Delete(relation_id, letter, _tuple(reader))


def _tuple(reader: _Reader) -> TupleData:
    return tuple(_value(reader) for _ in range(reader.number(_U16)))


def _value(reader: _Reader) -> Value:
    letter = reader.letter("nutb")
    if letter == "n":
        return None
    if letter == "u":
        return UNCHANGED
    if letter == "b":
        reader.fail("a value in binary form, which was not asked for")
    return reader.text(reader.take(reader.number(_U32)))


def _truncate(reader: _Reader) -> Truncate:
    count, flags = reader.fields(layouts.TRUNCATE)
    if flags & ~3:
        reader.fail(f"unknown flags {flags:#x}")
    relations = unpack(f"!{count}I", reader.take(4 * count))
    return Truncate(relations, bool(flags & 1), bool(flags & 2))


def _message(reader: _Reader) -> LogicalMessage:
    flags, lsn = reader.fields(layouts.MESSAGE)
    if flags & ~1:
        reader.fail(f"unknown flags {flags:#x}")
    prefix = reader.string()
    return LogicalMessage(bool(flags), Lsn(lsn), prefix, reader.take(reader.number(_U32)))


def _stream_abort(reader: _Reader) -> StreamAbort:
    return StreamAbort(*reader.fields(layouts.STREAM_ABORT))


_READERS: Final[dict[int, Callable[[_Reader], Message]]] = {
    MessageKind.BEGIN: _begin,
    MessageKind.COMMIT: _commit,
    MessageKind.ORIGIN: _origin,
    MessageKind.RELATION: _relation,
    MessageKind.TYPE: _type,
    MessageKind.INSERT: _insert,
    MessageKind.UPDATE: _update,
    MessageKind.DELETE: _delete,
    MessageKind.TRUNCATE: _truncate,
    MessageKind.MESSAGE: _message,
    MessageKind.STREAM_ABORT: _stream_abort,
}
