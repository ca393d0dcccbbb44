"""An example of each kind of message of protocol 1: its bytes, and the decoded message."""

from __future__ import annotations

from struct import pack

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.protocol.messages import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Relation,
    RelationColumn,
    StreamAbort,
    Truncate,
    Type,
    Update,
)

EXAMPLES: list[tuple[bytes, Message]] = [
    (
        b"B" + bytes.fromhex("00000016B374D848 0000000000000001 FFFFFFFE"),
        Begin(Lsn.parse("16/B374D848"), 946_684_800_000_001, 4_294_967_294),
    ),
    (
        b"C" + bytes.fromhex("00 00000016B374D848 00000016B374D878 FFFFFFFFFFFFFFFF"),
        Commit(0, Lsn.parse("16/B374D848"), Lsn.parse("16/B374D878"), 946_684_799_999_999),
    ),
    (b"O" + bytes.fromhex("0000000000000010") + b"node \xc3\xa9\0", Origin(Lsn(16), "node é")),
    (
        b"R" + pack("!I", 3_000_000_000) + b"public\0t\0d" + pack("!H", 2)
        + b"\1id\0" + pack("!Ii", 23, -1) + b"\0Odd name\0" + pack("!Ii", 1700, 655366),
        Relation(3_000_000_000, "public", "t", "d",
                 (RelationColumn(True, "id", 23, -1), RelationColumn(False, "Odd name", 1700, 655366))),
    ),
    (b"R" + pack("!I", 1) + b"\0empty\0n\0\0", Relation(1, "", "empty", "n", ())),
    (b"Y" + pack("!I", 16390) + b"public\0mood\0", Type(16390, "public", "mood")),
    (b"I" + pack("!I", 7) + b"N\0\3t\0\0\0\2\xc3\xa9nt\0\0\0\0", Insert(7, ("é", None, ""))),
    (b"I" + pack("!I", 7) + b"N\0\0", Insert(7, ())),
    (b"U" + pack("!I", 7) + b"N\0\2t\0\0\0\1au", Update(7, None, None, ("a", UNCHANGED))),
    (
        b"U" + pack("!I", 7) + b"K\0\2t\0\0\0\1an" + b"N\0\2t\0\0\0\1bu",
        Update(7, "K", ("a", None), ("b", UNCHANGED)),
    ),
    (b"U" + pack("!I", 7) + b"O\0\1n" + b"N\0\1t\0\0\0\1b", Update(7, "O", (None,), ("b",))),
    (b"D" + pack("!I", 7) + b"K\0\1t\0\0\0\1a", Delete(7, "K", ("a",))),
    (b"D" + pack("!I", 7) + b"O\0\1n", Delete(7, "O", (None,))),
    (b"T" + pack("!IBII", 2, 3, 7, 9), Truncate((7, 9), True, True)),
    (b"T" + pack("!IB", 0, 1), Truncate((), True, False)),
    (b"T" + pack("!IBI", 1, 2, 7), Truncate((7,), False, True)),
    (b"M\1" + pack("!Q", 16) + b"p\0" + pack("!I", 3) + b"a\0\xff", LogicalMessage(True, Lsn(16), "p", b"a\0\xff")),
    (b"M\0" + pack("!Q", 16) + b"\0" + pack("!I", 0), LogicalMessage(False, Lsn(16), "", b"")),
    (b"A" + pack("!II", 700, 4_000_000_000), StreamAbort(700, 4_000_000_000)),
]  # fmt: skip
