"""Messages written as a server writes them: the other direction of the codec."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

from pgcdc_assets.protocol.messages import (
    UNCHANGED,
    Delete,
    Insert,
    Relation,
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
    data = item.encode()
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
