"""Decodes one message at a time. Used for all control messages, and by tests of :mod:`pgcdc_assets.protocol.columns`,
which decodes many row messages at once.

:mod:`pgcdc_assets.protocol.layouts` defines the layouts. Protocol version 1 sends each transaction completely after its
commit (Begin to Commit). Later versions can also send a transaction in progress, in blocks from Stream Start to Stream
Stop. Between two blocks, the server may send blocks of other transactions, complete transactions (Begin to Commit,
Begin Prepare to Prepare), and single messages such as Stream Commit. Each message in a block also contains the xid of
the subtransaction that made the change. A transactional logical message is an exception: it contains the xid of the top
transaction, even if a subtransaction wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct, unpack
from typing import Any, Final, NoReturn, TypeVar, cast

from pgcdc_assets.core.catalog import ReplicaIdentity
from pgcdc_assets.core.encoding import UTF8
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.protocol import layouts
from pgcdc_assets.protocol.layouts import MessageKind, WireLayout
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
    Message,
    OldKind,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
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

MessageT = TypeVar("MessageT")

_U8 = Struct("!B")
_U16 = Struct("!H")
_U32 = Struct("!I")
_TYPE_OF_COLUMN = Struct("!Ii")


def decode(payload: bytes, lsn: Lsn = ZERO) -> Message:
    """Decodes a message of protocol version 1. ``lsn`` is the message's position in the WAL, used only in errors.
    Raises ProtocolError, with kind and LSN, if the message is truncated or malformed, has an unknown kind, or is
    followed by other bytes."""
    return MessageReader(payload, lsn).whole(_VERSION_1, "its kind is unknown to protocol version 1")


def decode_any(payload: bytes, lsn: Lsn = ZERO, *, parallel: bool) -> AnyMessage:
    """Like :func:`decode`, for a message of any protocol version that was sent outside of blocks. (Messages in a block
    have an additional xid.) ``parallel``: whether the stream has the option streaming = parallel, with which each
    Stream Abort has two more fields."""
    readers = _ALL_PARALLEL if parallel else _ALL
    return MessageReader(payload, lsn).whole(readers, "its kind is unknown to the protocol")


class MessageReader:
    """Reads the fields of one message, one after another. Raises ProtocolError if a field is cut off or invalid."""

    __slots__ = ("at", "lsn", "payload")

    def __init__(self, payload: bytes, lsn: Lsn) -> None:
        """Starts after the message's letter. Raises ProtocolError for an empty message."""
        if not payload:
            raise ProtocolError("empty message", lsn=lsn)
        self.payload = payload
        self.lsn = lsn
        self.at = 1

    def whole(self, readers: Mapping[int, Callable[[MessageReader], MessageT]], otherwise: str) -> MessageT:
        """Decodes the whole message with the function that ``readers`` has for the message's kind. If there is none,
        raises ProtocolError with the text ``otherwise``."""
        read = readers.get(self.payload[0])
        if read is None:
            self.fail(otherwise)
        message = read(self)
        if self.at != len(self.payload):
            self.fail(f"{len(self.payload) - self.at} bytes follow its end")
        return message

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
        numbers = self.unpacked(layout.struct)
        return tuple(field.value(number) for field, number in zip(layout.fields.values(), numbers, strict=True))

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
            self.fail("a string does not end with a zero byte")
        piece = self.payload[self.at : end]
        self.at = end + 1
        # Strings are names in the server's encoding. Relation.reread decodes them again if this encoding is not UTF-8.
        return UTF8.shown(piece)

    def letter(self, allowed: str) -> str:
        letter = chr(self.number(_U8))
        if letter not in allowed:
            self.fail(f"has the letter {letter!r} instead of one of {allowed!r}")
        return letter

    def known(self, flags: int, known: int) -> int:
        """Returns ``flags``. Raises ProtocolError if a bit is set that is not set in ``known``."""
        if flags & ~known:
            self.fail(f"unknown flags {flags:#x}")
        return flags


def _fixed(
    make: Callable[..., MessageT], layout: WireLayout, *, text: bool = False
) -> Callable[[MessageReader], MessageT]:  # fmt: skip
    """Makes the function that decodes a message with the fields of ``layout`` and, with ``text``, a string after them.
    No flag is defined for these messages, so no flag may be set."""

    def read(reader: MessageReader) -> MessageT:
        values = reader.fields(layout)
        reader.known(dict(zip(layout.fields, values, strict=True)).get("flags", 0), 0)
        return make(*values, *([reader.string()] if text else ()))

    return read


def _relation(reader: MessageReader) -> Relation:
    relation_id, schema, name = reader.number(_U32), reader.string(), reader.string()
    identity = cast("ReplicaIdentity", reader.letter(layouts.IDENTITIES))
    columns = tuple(_relation_column(reader) for _ in range(reader.number(_U16)))
    return Relation(relation_id, schema, name, identity, columns)


def _relation_column(reader: MessageReader) -> RelationColumn:
    key, name = reader.known(reader.number(_U8), 1), reader.string()
    type_oid, typmod = reader.unpacked(_TYPE_OF_COLUMN)
    return RelationColumn(bool(key), name, type_oid, typmod)


def _type(reader: MessageReader) -> Type:
    return Type(reader.number(_U32), reader.string(), reader.string())


def _insert(reader: MessageReader) -> Insert:
    relation_id = reader.number(_U32)
    reader.letter("N")
    return Insert(relation_id, _tuple(reader))


def _update(reader: MessageReader) -> Update:
    relation_id = reader.number(_U32)
    letter = reader.letter("KON")
    if letter == "N":
        return Update(relation_id, None, None, _tuple(reader))
    old = _tuple(reader)
    reader.letter("N")
    return Update(relation_id, cast("OldKind", letter), old, _tuple(reader))


def _delete(reader: MessageReader) -> Delete:
    relation_id = reader.number(_U32)
    letter = cast("OldKind", reader.letter("KO"))
    return Delete(relation_id, letter, _tuple(reader))


def _tuple(reader: MessageReader) -> TupleData:
    return tuple(_value(reader) for _ in range(reader.number(_U16)))


def _value(reader: MessageReader) -> Value:
    letter = reader.letter("nutb")
    if letter == "n":
        return None
    if letter == "u":
        return UNCHANGED
    if letter == "b":
        reader.fail("a value in binary form, which was not requested")
    return reader.text(reader.take(reader.number(_U32)))


def _truncate(reader: MessageReader) -> Truncate:
    count, flags = reader.fields(layouts.TRUNCATE)
    reader.known(flags, 3)
    relations = unpack(f"!{count}I", reader.take(4 * count))
    return Truncate(relations, bool(flags & 1), bool(flags & 2))


def _message(reader: MessageReader) -> LogicalMessage:
    flags, lsn = reader.fields(layouts.MESSAGE)
    reader.known(flags, 1)
    prefix = reader.string()
    return LogicalMessage(bool(flags), lsn, prefix, reader.take(reader.number(_U32)))


_VERSION_1: Final[Mapping[int, Callable[[MessageReader], Message]]] = {
    MessageKind.BEGIN: _fixed(Begin, layouts.BEGIN),
    MessageKind.COMMIT: _fixed(Commit, layouts.COMMIT),
    MessageKind.ORIGIN: _fixed(Origin, layouts.ORIGIN, text=True),
    MessageKind.RELATION: _relation,
    MessageKind.TYPE: _type,
    MessageKind.INSERT: _insert,
    MessageKind.UPDATE: _update,
    MessageKind.DELETE: _delete,
    MessageKind.TRUNCATE: _truncate,
    MessageKind.MESSAGE: _message,
    MessageKind.STREAM_ABORT: _fixed(StreamAbort, layouts.STREAM_ABORT),
}


def _stream_start(reader: MessageReader) -> StreamStart:
    xid, first = reader.fields(layouts.STREAM_START)
    return StreamStart(xid, bool(reader.known(first, 1)))


_ALL: Final[Mapping[int, Callable[[MessageReader], AnyMessage]]] = {
    **_VERSION_1,
    MessageKind.STREAM_START: _stream_start,
    MessageKind.STREAM_STOP: _fixed(StreamStop, WireLayout()),
    MessageKind.STREAM_COMMIT: _fixed(StreamCommit, layouts.STREAM_COMMIT),
    MessageKind.BEGIN_PREPARE: _fixed(BeginPrepare, layouts.BEGIN_PREPARE, text=True),
    MessageKind.PREPARE: _fixed(Prepare, layouts.PREPARE, text=True),
    MessageKind.STREAM_PREPARE: _fixed(StreamPrepare, layouts.PREPARE, text=True),
    MessageKind.COMMIT_PREPARED: _fixed(CommitPrepared, layouts.COMMIT_PREPARED, text=True),
    MessageKind.ROLLBACK_PREPARED: _fixed(RollbackPrepared, layouts.ROLLBACK_PREPARED, text=True),
}
_ALL_PARALLEL: Final = {**_ALL, MessageKind.STREAM_ABORT: _fixed(StreamAbort, layouts.PARALLEL_STREAM_ABORT)}
