"""One message at a time: the reference decoder, and the one for control messages.

Byte layouts (integers are big-endian, strings end in NUL), after "Logical Replication Message Formats":

    B  i64 final_lsn, i64 commit_ts, u32 xid
    C  u8 flags = 0, i64 commit_lsn, i64 end_lsn, i64 commit_ts
    O  i64 commit_lsn, string name
    R  u32 relation, string schema, string name, u8 identity, u16 n, n x (u8 key, string name, u32 type, i32 typmod)
    Y  u32 type, string schema, string name
    I  u32 relation, 'N' tuple
    U  u32 relation, ['K' tuple | 'O' tuple], 'N' tuple
    D  u32 relation, 'K' tuple | 'O' tuple
    T  u32 n, u8 flags (1 cascade, 2 restart identity), n x u32 relation
    M  u8 flags (1 transactional), i64 lsn, string prefix, u32 n, n bytes
    A  u32 xid, u32 subxid

    tuple   u16 n, n x ('n' | 'u' | 't' u32 length, text | 'b' u32 length, binary)
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, unpack
from typing import Any, Final, NoReturn, cast

from pgcdc_assets.core.catalog import ReplicaIdentity
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import ProtocolError
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

EPOCH: Final = 946_684_800_000_000
"""2000-01-01 UTC, where PostgreSQL's clock starts, in microseconds since 1970."""

_BEGIN = Struct("!QqI")
_COMMIT = Struct("!BQQq")
_LSN = Struct("!Q")
_U8 = Struct("!B")
_U16 = Struct("!H")
_U32 = Struct("!I")
_TYPE_OF_COLUMN = Struct("!Ii")
_TRUNCATE = Struct("!IB")
_MESSAGE = Struct("!BQ")
_STREAM_ABORT = Struct("!II")


def decode(payload: bytes, lsn: Lsn = ZERO) -> Message:
    """The message in ``payload``; ``lsn`` is where it stands in the WAL, for the error alone.

    Raises ProtocolError, with kind and LSN, for whatever is truncated, malformed, unknown or followed
    by bytes that do not belong to it.
    """
    if not payload:
        raise ProtocolError("empty message", lsn=lsn)
    read = _READERS.get(payload[:1])
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

    def fields(self, layout: Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def number(self, layout: Struct) -> int:
        return int(self.fields(layout)[0])

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
    final_lsn, commit_ts, xid = reader.fields(_BEGIN)
    return Begin(Lsn(final_lsn), commit_ts + EPOCH, xid)


def _commit(reader: _Reader) -> Commit:
    flags, commit_lsn, end_lsn, commit_ts = reader.fields(_COMMIT)
    if flags:
        reader.fail(f"unknown flags {flags:#x}")
    return Commit(flags, Lsn(commit_lsn), Lsn(end_lsn), commit_ts + EPOCH)


def _origin(reader: _Reader) -> Origin:
    return Origin(Lsn(reader.number(_LSN)), reader.string())


def _relation(reader: _Reader) -> Relation:
    relation_id, schema, name = reader.number(_U32), reader.string(), reader.string()
    identity = cast("ReplicaIdentity", reader.letter("dnfi"))
    columns = tuple(_relation_column(reader) for _ in range(reader.number(_U16)))
    return Relation(relation_id, schema, name, identity, columns)


def _relation_column(reader: _Reader) -> RelationColumn:
    key, name = reader.flags(1), reader.string()
    type_oid, typmod = reader.fields(_TYPE_OF_COLUMN)
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
    count, flags = reader.fields(_TRUNCATE)
    if flags & ~3:
        reader.fail(f"unknown flags {flags:#x}")
    relations = unpack(f"!{count}I", reader.take(4 * count))
    return Truncate(relations, bool(flags & 1), bool(flags & 2))


def _message(reader: _Reader) -> LogicalMessage:
    flags, lsn = reader.fields(_MESSAGE)
    if flags & ~1:
        reader.fail(f"unknown flags {flags:#x}")
    prefix = reader.string()
    return LogicalMessage(bool(flags), Lsn(lsn), prefix, reader.take(reader.number(_U32)))


def _stream_abort(reader: _Reader) -> StreamAbort:
    return StreamAbort(*reader.fields(_STREAM_ABORT))


_READERS: Final[dict[bytes, Callable[[_Reader], Message]]] = {
    b"B": _begin, b"C": _commit, b"O": _origin, b"R": _relation, b"Y": _type,
    b"I": _insert, b"U": _update, b"D": _delete, b"T": _truncate, b"M": _message, b"A": _stream_abort,
}  # fmt: skip
