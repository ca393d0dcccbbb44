"""Row messages as pgoutput writes them (PostgreSQL, "Logical Replication Message Formats")."""

from __future__ import annotations

import struct
from collections.abc import Sequence

UNCHANGED = object()
Value = str | None | object


def row_message(kind: str, *tuples: tuple[str, Sequence[Value]], relation_id: int = 1000) -> bytes:
    """``row_message("U", ("K", [...]), ("N", [...]))``."""
    return (
        kind.encode()
        + struct.pack(">I", relation_id)
        + b"".join(
            letter.encode() + struct.pack(">H", len(values)) + b"".join(map(_value, values))
            for letter, values in tuples
        )
    )


def _value(value: Value) -> bytes:
    if value is None:
        return b"n"
    if not isinstance(value, str):
        return b"u"
    data = value.encode()
    return b"t" + struct.pack(">I", len(data)) + data
