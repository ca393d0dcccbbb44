"""The bytes that PostgreSQL sends, read through a second slot. The test parses messages with struct, as the protocol's
documentation describes them, without the project's codec."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from deltalake import DeltaTable, QueryBuilder

Line = tuple[int, int, str, int | None, bytes]
"""One stored message: commit_lsn, ordinal, kind, relation, digest of its bytes."""
Loose = tuple[int, bytes]
"""A message outside of transactions: LSN, digest."""

_PEEK = """
SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1', 'publication_names', %s,
                                                     'messages', 'true')
"""


@dataclass
class Sent:
    """The messages in a stream or in the log below an LSN."""

    lines: list[Line] = field(default_factory=list)
    loose: Counter[Loose] = field(default_factory=Counter)


def peeked(conn: psycopg.Connection[Any], slot: str, publication: str, below: int) -> Sent:
    """Transactions with ``commit_lsn`` < ``below``, and messages outside of transactions that end at or below
    ``below``."""
    sent, commit_lsn, ordinal = Sent(), 0, 0
    for (data,) in conn.cursor().stream(_PEEK, [slot, publication], size=500):
        kind, digest = chr(data[0]), _digest(data)
        if kind == "B":
            (commit_lsn,), ordinal = struct.unpack_from(">Q", data, 1), 0
        elif kind == "M" and not data[1]:
            (lsn,) = struct.unpack_from(">Q", data, 2)
            if lsn <= below:
                sent.loose[lsn, digest] += 1
        elif kind in "IUDTMC" and commit_lsn < below:
            relations = _relations(kind, data)
            sent.lines += [(commit_lsn, ordinal, kind, relation, digest) for relation in relations]
            ordinal += 1
    sent.lines.sort(key=_place)
    return sent


def logged(path: Path, below: int) -> Sent:
    """The messages that :func:`peeked` returns, but read from the log with delta-rs."""
    sent = Sent()
    for commit_lsn, ordinal, kind, relation, lsn, payload in _stored(path, "kind IN ('I','U','D','T','M','C')"):
        if commit_lsn is None:
            sent.loose[lsn, _digest(payload)] += 1
        elif commit_lsn < below:
            sent.lines.append((commit_lsn, ordinal, kind, relation, _digest(payload)))
    sent.lines.sort(key=_place)
    return sent


def assert_same(log: Sent, source: Sent) -> None:
    """Check that the log has each message of each transaction exactly once, byte for byte, and nothing else."""
    lost, twice = Counter(source.lines) - Counter(log.lines), Counter(log.lines) - Counter(source.lines)
    assert not lost, f"{lost.total()} messages are not in the log, like {next(iter(lost))}"
    assert not twice, f"{twice.total()} messages in the log were not sent, or sent only once, like {next(iter(twice))}"
    assert log.lines == source.lines
    assert log.loose == source.loose


def _stored(path: Path, where: str) -> Iterator[tuple[Any, ...]]:
    query = f"SELECT commit_lsn, tx_ordinal, kind, relation_id, lsn, payload FROM log WHERE {where}"
    for batch in QueryBuilder().register("log", DeltaTable(path)).execute(query):
        yield from zip(*(batch.column(place).to_pylist() for place in range(6)), strict=True)


def _place(line: Line) -> tuple[int, int, int]:
    return line[0], line[1], line[3] or 0


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=12).digest()


def _relations(kind: str, data: bytes) -> list[int | None]:
    if kind in "IUD":
        return list(struct.unpack_from(">I", data, 1))
    if kind == "T":
        number, _ = struct.unpack_from(">IB", data, 1)
        return list(struct.unpack_from(f">{number}I", data, 6))
    return [None]
