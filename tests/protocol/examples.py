"""An example of each kind of message of protocol 1: its bytes, and the decoded message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from struct import pack

from pgcdc_assets.core.catalog import PgType
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.protocol.columns import Images
from pgcdc_assets.protocol.layouts import RowKind
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


def by_row(images: Sequence[Images]) -> dict[int, dict[str, TupleData]]:
    """By row number: the tuples of the row, by the letter of their image (K, O or N). Fails if a row has two tuples of
    the same letter."""
    found: dict[int, dict[str, TupleData]] = {}
    for item in images:
        assert item.rows.tolist() == sorted(set(item.rows.tolist()))
        for values in item.text:
            values.validate(full=True)
            assert len(values) == len(item.rows)
        text: list[list[Value]] = [values.to_pylist() for values in item.text]
        for column, marks in enumerate(item.unchanged):
            for at in [] if marks is None else marks.nonzero()[0].tolist():
                assert text[column][at] is None
                text[column][at] = UNCHANGED
        for at, row in enumerate(item.rows.tolist()):
            assert item.image not in found.setdefault(row, {})
            found[row][item.image] = tuple(column[at] for column in text)
    return found


def messages(images: Sequence[Images], kind: RowKind, relation_id: int, count: int) -> list[Insert | Update | Delete]:
    """The messages from which the images were decoded. All messages are of the same kind and relation."""
    rows = by_row(images)
    assert sorted(rows) == list(range(count))
    return [_message(rows[row], kind, relation_id) for row in range(count)]


def _message(images: dict[str, TupleData], kind: RowKind, relation_id: int) -> Insert | Update | Delete:
    old_kind: OldKind | None = "K" if "K" in images else "O" if "O" in images else None
    assert not {"K", "O"} <= set(images)
    if kind == "I":
        assert set(images) == {"N"}
        return Insert(relation_id, images["N"])
    if kind == "U":
        return Update(relation_id, old_kind, images[old_kind] if old_kind else None, images["N"])
    assert old_kind is not None
    assert "N" not in images
    return Delete(relation_id, old_kind, images[old_kind])


def numeric(precision: int, scale: int) -> PgType:
    return PgType(1700, "numeric", (precision << 16 | scale & 0x7FF) + 4)


def array(element: PgType, oid: int = 99_999) -> PgType:
    """The array type of this element type. The typmod belongs to the array, as in atttypmod."""
    return PgType(oid, f"_{element.name}", element.typmod, element=replace(element, typmod=-1))


def domain(base: PgType, oid: int = 88_888) -> PgType:
    return PgType(oid, "domain", family="d", base=base)


BOOL, BYTEA = PgType(16, "bool"), PgType(17, "bytea")
INT2, INT4, INT8 = PgType(21, "int2"), PgType(23, "int4"), PgType(20, "int8")
FLOAT4, FLOAT8 = PgType(700, "float4"), PgType(701, "float8")
NUMERIC, MONEY = PgType(1700, "numeric"), PgType(790, "money")
DATE, TIMESTAMP, TIMESTAMPTZ = PgType(1082, "date"), PgType(1114, "timestamp"), PgType(1184, "timestamptz")
TIME, TIMETZ, INTERVAL = PgType(1083, "time"), PgType(1266, "timetz"), PgType(1186, "interval")
TEXT, BPCHAR, UUID, JSONB = PgType(25, "text"), PgType(1042, "bpchar", 9), PgType(2950, "uuid"), PgType(3802, "jsonb")
ENUM, COMPOSITE = PgType(16_400, "mood", family="e"), PgType(16_401, "pair", family="c")
INT2VECTOR = PgType(22, "int2vector", element=INT2)
BOX = PgType(603, "box")
