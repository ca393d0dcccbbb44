"""A message of the frontend/backend protocol."""

from __future__ import annotations

from struct import pack


def message(kind: bytes, body: bytes) -> bytes:
    return kind + pack("!I", len(body) + 4) + body
