"""The bytes that PostgreSQL sends, by a second slot and by hand, and what they make of tables.

Nothing of the project's codec takes part: messages are cut by struct, as the protocol's document has them.
"""

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
    """What stands in a stream or in the log below an LSN."""

    lines: list[Line] = field(default_factory=list)
    loose: Counter[Loose] = field(default_factory=Counter)


def peeked(conn: psycopg.Connection[Any], slot: str, publication: str, below: int) -> Sent:
    """Transactions with ``commit_lsn`` < ``below``, and loose messages that end at or before it."""
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
    """The same of the log, read by delta-rs alone."""
    sent = Sent()
    for commit_lsn, ordinal, kind, relation, lsn, payload in _stored(path, "kind IN ('I','U','D','T','M','C')"):
        if commit_lsn is None:
            sent.loose[lsn, _digest(payload)] += 1
        elif commit_lsn < below:
            sent.lines.append((commit_lsn, ordinal, kind, relation, _digest(payload)))
    sent.lines.sort(key=_place)
    return sent


def assert_same(log: Sent, source: Sent) -> None:
    """Each message of each transaction once, byte for byte, and nothing else."""
    lost, twice = Counter(source.lines) - Counter(log.lines), Counter(log.lines) - Counter(source.lines)
    assert not lost, f"{lost.total()} messages are not in the log, like {next(iter(lost))}"
    assert not twice, f"{twice.total()} messages of the log were never sent, or stand twice, like {next(iter(twice))}"
    assert log.lines == source.lines
    assert log.loose == source.loose


def folded(path: Path, relations: dict[int, tuple[int, ...]], below: int) -> dict[int, Counter[tuple[str | None, ...]]]:
    """Tables by their OID as the log leaves them, from empty ones; ``relations``: places of the key, () for none."""
    rows: dict[int, Counter[tuple[str | None, ...]]] = {oid: Counter() for oid in relations}
    by_key: dict[int, dict[tuple[str | None, ...], tuple[str | None, ...]]] = {oid: {} for oid in relations}
    listed = ", ".join(map(str, relations))
    order = "ORDER BY commit_lsn, tx_ordinal"
    for commit_lsn, _, kind, relation, _, payload in _stored(
        path, f"kind IN ('I','U','D','T') AND relation_id IN ({listed}) {order}"
    ):
        if commit_lsn >= below:
            continue
        if kind == "T":
            rows[relation].clear()
            by_key[relation].clear()
            continue
        old, new = _images(payload)
        key = relations[relation]
        if not key:
            rows[relation].update({old: -1} if old else {})
            rows[relation].update({new: 1} if new else {})
            continue
        if old or kind == "U":
            gone = old or new
            assert gone is not None
            del by_key[relation][tuple(gone[place] for place in key)]
        if new:
            place = tuple(new[place] for place in key)
            assert place not in by_key[relation], f"relation {relation}: {place} came twice"
            by_key[relation][place] = new
    keyed = {oid: Counter(by_key[oid].values()) for oid, key in relations.items() if key}
    return {oid: Counter({row: n for row, n in found.items() if n}) for oid, found in {**rows, **keyed}.items()}


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


def _images(data: bytes) -> tuple[tuple[str | None, ...] | None, tuple[str | None, ...] | None]:
    """Old image (or key) and new image of a row message."""
    at, found = 5, {}
    while at < len(data):
        letter = chr(data[at])
        found[letter], at = _tuple(data, at + 1)
    return found.get("O", found.get("K")), found.get("N")


def _tuple(data: bytes, at: int) -> tuple[tuple[str | None, ...], int]:
    (number,) = struct.unpack_from(">H", data, at)
    at += 2
    values: list[str | None] = []
    for _ in range(number):
        form, at = chr(data[at]), at + 1
        assert form in "nt", "the tables of this test have no value that is left out"
        if form == "n":
            values.append(None)
            continue
        (length,) = struct.unpack_from(">I", data, at)
        values.append(data[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return tuple(values), at
