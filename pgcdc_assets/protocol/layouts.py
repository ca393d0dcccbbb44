"""The wire format of the replication protocol and of pgoutput: letters, fixed-width fields, and the clock.

Source: "Streaming Replication Protocol" and "Logical Replication Message Formats" in PostgreSQL's documentation.
Integers are big-endian, strings end in NUL, times are microseconds since 2000-01-01 UTC. Frames, inside CopyData:

    w  XLogData                 lsn start, lsn wal_end, time sent_at, then a message
    k  keepalive                lsn wal_end, time sent_at, u8 reply_requested
    r  standby status update    lsn write, lsn flush, lsn apply, time now, u8 reply_requested

Messages of protocol version 1:

    B  begin             lsn final_lsn, time commit_ts, u32 xid
    C  commit            u8 flags = 0, lsn commit_lsn, lsn end_lsn, time commit_ts
    O  origin            lsn commit_lsn, string name
    R  relation          u32 relation, string schema, string name, u8 identity, u16 n, n x (u8 key, string name,
                         u32 type, i32 typmod)
    Y  type              u32 type, string schema, string name
    I  insert            u32 relation, 'N' tuple
    U  update            u32 relation, ['K' tuple | 'O' tuple], 'N' tuple
    D  delete            u32 relation, 'K' tuple | 'O' tuple
    T  truncate          u32 n, u8 flags (1 cascade, 2 restart identity), n x u32 relation
    M  logical message   u8 flags (1 transactional), lsn, string prefix, u32 n, n bytes

    tuple                u16 n, n x ('n' | 'u' | 't' u32 length, text | 'b' u32 length, binary)

Version 2 adds transactions in progress, which are sent in blocks from S to E. In a block, R, Y, I, U, D, T and M have
``u32 xid`` after their letter. Version 3 adds two-phase commit. Version 4 adds two fields to the stream abort, if the
option streaming is parallel:

    S  stream start      u32 xid, u8 first segment
    E  stream stop
    c  stream commit     u32 xid, then as C
    A  stream abort      u32 xid, u32 subxid [, lsn abort_lsn, time abort_ts]
    b  begin prepare     lsn prepare_lsn, lsn end_lsn, time prepare_ts, u32 xid, string gid
    P  prepare           u8 flags = 0, then as b
    K  commit prepared   u8 flags = 0, lsn commit_lsn, lsn end_lsn, time commit_ts, u32 xid, string gid
    r  rollback prepared u8 flags = 0, lsn prepare_end_lsn, lsn rollback_end_lsn, time prepare_ts, time rollback_ts,
                         u32 xid, string gid
    p  stream prepare    as P
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from pgcdc_assets.core.lsn import Lsn

EPOCH: Final = 946_684_800_000_000
"""Microseconds from 1970-01-01 to 2000-01-01 UTC, where PostgreSQL's times begin."""


class FrameKind(IntEnum):
    """The first byte of a frame."""

    XLOG_DATA = ord("w")
    KEEPALIVE = ord("k")
    STATUS = ord("r")
    ROW = 8
    """Not in the protocol. It marks a row of pg_logical_slot_get_binary_changes in COPY's binary form, which pgcdc
    reads as if it were XLogData (see ``source/stream/drain.py``). At the byte offset at which a frame has its kind,
    such a row has the last byte of the length field of its LSN column. An LSN has 8 bytes, so this byte is always 8."""


class MessageKind(IntEnum):
    """The first byte of a message, in all versions of the protocol."""

    BEGIN = ord("B")
    COMMIT = ord("C")
    ORIGIN = ord("O")
    RELATION = ord("R")
    TYPE = ord("Y")
    INSERT = ord("I")
    UPDATE = ord("U")
    DELETE = ord("D")
    TRUNCATE = ord("T")
    MESSAGE = ord("M")
    STREAM_START = ord("S")
    STREAM_STOP = ord("E")
    STREAM_COMMIT = ord("c")
    STREAM_ABORT = ord("A")
    BEGIN_PREPARE = ord("b")
    PREPARE = ord("P")
    COMMIT_PREPARED = ord("K")
    ROLLBACK_PREPARED = ord("r")
    STREAM_PREPARE = ord("p")

    @property
    def letter(self) -> str:
        return chr(self)


ROWS: Final = (MessageKind.INSERT, MessageKind.UPDATE, MessageKind.DELETE)
"""The messages that change one row."""
TABLE_CHANGES: Final = (*ROWS, MessageKind.TRUNCATE)
CHANGES: Final = (*TABLE_CHANGES, MessageKind.MESSAGE)
"""The messages that ``tx_ordinal`` counts."""
CONTENT: Final = (*CHANGES, MessageKind.RELATION, MessageKind.TYPE, MessageKind.ORIGIN)
"""The messages that a transaction or a block can contain."""
CARRY_XID: Final = (*CHANGES, MessageKind.RELATION, MessageKind.TYPE)
"""The messages that have an additional xid, after their letter, if they are in a block of a transaction in progress:
all of CONTENT except Origin."""
BRACKETS: Final = {
    MessageKind.BEGIN: MessageKind.COMMIT,
    MessageKind.BEGIN_PREPARE: MessageKind.PREPARE,
    MessageKind.STREAM_START: MessageKind.STREAM_STOP,
}
"""The messages that begin a transaction or a block, each with the message that ends it. Such pairs are never nested."""
BETWEEN: Final = (
    MessageKind.STREAM_COMMIT,
    MessageKind.STREAM_ABORT,
    MessageKind.STREAM_PREPARE,
    MessageKind.COMMIT_PREPARED,
    MessageKind.ROLLBACK_PREPARED,
    MessageKind.MESSAGE,
)
"""The messages that can be outside of transactions and blocks. A logical message can be there only if it is not
transactional."""

RowKind = Literal["I", "U", "D"]
Image = Literal["N", "O", "K"]
"""Kinds of tuples: new tuple, complete old tuple, or old tuple with only the columns of the replica identity."""
IDENTITIES: Final = "dnfi"
"""Replica identity of a relation: default, nothing, full, index."""
NULL, UNCHANGED, TEXT, BINARY = (ord(letter) for letter in "nutb")
"""The letters that mark the form of each value in a tuple."""


class Field(NamedTuple):
    """The type of a fixed-width integer field, for :mod:`struct` (one message) and numpy (many messages)."""

    code: str
    """The format code for :mod:`struct`."""
    dtype: str
    """The numpy dtype. LSNs are signed here, because numpy would convert sums of signed and unsigned integers to
    floats. No real LSN needs all 64 bits."""
    value: Callable[[int], int] = int
    """Converts the number in a message to the value in a decoded message."""


def _since_1970(time: int) -> int:
    return time + EPOCH


U8 = Field("B", "u1")
U32 = Field("I", ">u4")
LSN = Field("Q", ">i8", Lsn)
TIME = Field("q", ">i8", _since_1970)


class WireLayout:
    """The layout of a message or frame: the byte of its kind, and the fixed-width fields that directly follow it."""

    def __init__(self, **fields: Field) -> None:
        self.struct: Final = Struct("!" + "".join(field.code for field in fields.values()))
        """The fields without the kind."""
        self.fields: Final = fields
        self.dtype: Final[np.dtype[Any]] = np.dtype([("kind", "u1"), *((name, f.dtype) for name, f in fields.items())])

    @property
    def size(self) -> int:
        """Number of bytes, including the byte of the kind."""
        return self.dtype.itemsize

    def at(self, name: str) -> int:
        """Offset of a field from the byte of the kind."""
        assert self.dtype.fields is not None
        return int(self.dtype.fields[name][1])


XLOG_DATA: Final = WireLayout(start=LSN, wal_end=LSN, sent_at=TIME)
"""The 25 bytes before the message. ``start`` must not be used as the position of the stream, because it is 0/0 for
Relation and Type, and the transaction's first LSN for Begin."""
KEEPALIVE: Final = WireLayout(wal_end=LSN, sent_at=TIME, reply_requested=U8)
STATUS: Final = WireLayout(write=LSN, flush=LSN, apply=LSN, now=TIME, reply_requested=U8)

BEGIN: Final = WireLayout(final_lsn=LSN, commit_ts=TIME, xid=U32)
COMMIT: Final = WireLayout(flags=U8, commit_lsn=LSN, end_lsn=LSN, commit_ts=TIME)
ORIGIN: Final = WireLayout(commit_lsn=LSN)
CHANGE: Final = WireLayout(relation_id=U32)
"""The first field of Relation, Insert, Update and Delete."""
TRUNCATE: Final = WireLayout(count=U32, flags=U8)
MESSAGE: Final = WireLayout(flags=U8, lsn=LSN)
STREAM_ABORT: Final = WireLayout(xid=U32, subxid=U32)
PARALLEL_STREAM_ABORT: Final = WireLayout(xid=U32, subxid=U32, abort_lsn=LSN, abort_ts=TIME)
"""The layout of every Stream Abort if the stream has the option streaming = parallel."""
STREAM_START: Final = WireLayout(xid=U32, first=U8)
STREAM_COMMIT: Final = WireLayout(xid=U32, flags=U8, commit_lsn=LSN, end_lsn=LSN, commit_ts=TIME)
XID: Final = WireLayout(xid=U32)
"""The additional field of CARRY_XID messages in a block."""
BEGIN_PREPARE: Final = WireLayout(prepare_lsn=LSN, end_lsn=LSN, prepare_ts=TIME, xid=U32)
PREPARE: Final = WireLayout(flags=U8, prepare_lsn=LSN, end_lsn=LSN, prepare_ts=TIME, xid=U32)
"""Also the layout of a stream prepare."""
COMMIT_PREPARED: Final = WireLayout(flags=U8, commit_lsn=LSN, end_lsn=LSN, commit_ts=TIME, xid=U32)
ROLLBACK_PREPARED: Final = WireLayout(
    flags=U8, prepare_end_lsn=LSN, rollback_end_lsn=LSN, prepare_ts=TIME, rollback_ts=TIME, xid=U32
)
