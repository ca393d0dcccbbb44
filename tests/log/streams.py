"""pgoutput streams that are built by hand, and the rows that the log must have for them, computed in a simple way."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.batch import BatchWriter, PendingFrames
from pgcdc_assets.log.framerun import FrameRun
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.relations import Relations
from pgcdc_assets.protocol.decode import decode, decode_any
from pgcdc_assets.protocol.frames import FrameBlock
from pgcdc_assets.protocol.layouts import BETWEEN, BRACKETS, CARRY_XID, CONTENT, EPOCH, MessageKind
from pgcdc_assets.protocol.messages import (
    AnyMessage,
    Begin,
    BeginPrepare,
    Commit,
    Insert,
    LogicalMessage,
    Origin,
    Relation,
    RelationColumn,
    StreamAbort,
    StreamStart,
    Truncate,
)
from pgcdc_assets.protocol.shape import RelationFacts
from tests.protocol import wire


def frame(payload: bytes, lsn: int = 0) -> bytes:
    return b"w" + struct.pack(">QQq", lsn, lsn, 0) + payload


def run_of(frames: Sequence[bytes], first: int) -> FrameRun:
    return FrameRun.of(FrameBlock.of(frames), first)


# The argument ``commit_ts`` has the unit of the protocol: microseconds since 2000-01-01.


def begin(final_lsn: int, xid: int, commit_ts: int = 0) -> bytes:
    return wire.message(Begin(Lsn(final_lsn), EPOCH + commit_ts, xid))


def commit(commit_lsn: int, end_lsn: int, commit_ts: int = 0) -> bytes:
    return wire.message(Commit(0, Lsn(commit_lsn), Lsn(end_lsn), EPOCH + commit_ts))


def insert(relation: int, text: bytes) -> bytes:
    return wire.message(Insert(relation, (text.decode("utf-8", "surrogateescape"),)))


def truncate(relations: list[int]) -> bytes:
    return wire.message(Truncate(tuple(relations), False, False))


def message(lsn: int, content: bytes, *, transactional: bool) -> bytes:
    return wire.message(LogicalMessage(transactional, Lsn(lsn), "p", content))


def origin(name: str) -> bytes:
    return wire.message(Origin(Lsn(0), name))


def stream_abort(xid: int, subxid: int) -> bytes:
    return wire.message(StreamAbort(xid, subxid))


def relation(relation_id: int, name: str, column: str = "c") -> bytes:
    return wire.message(Relation(relation_id, "public", name, "d", (RelationColumn(True, column, 25, -1),)))


@dataclass
class Stream:
    """Frames, and the rows expected for them: (kind, commit_lsn, ordinal, xid, relation, schema_id, origin, payload,
    lsn)."""

    frames: list[bytes] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """The places at which no transaction is open. Each place is the number of frames before it."""
    expected: list[tuple[Any, ...]] = field(default_factory=list)


def describe(relations: Relations, payload: bytes, sequence: int) -> int:
    found = decode(payload, Lsn(0))
    assert isinstance(found, Relation)
    return relations.see(found, payload, RelationFacts(None), sequence).schema_id


_CHANGES = st.one_of(
    st.tuples(st.just("I"), st.integers(1, 4), st.binary(max_size=40)),
    st.tuples(st.just("T"), st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("M"), st.binary(max_size=5)),
    st.tuples(st.just("R"), st.integers(1, 4), st.sampled_from(["c", "d"])),
)
TRANSACTIONS = st.lists(
    st.tuples(
        st.lists(_CHANGES, max_size=8), st.sampled_from([None, "elsewhere"]), st.booleans(), st.sampled_from([0, 1, 3])
    ),
    max_size=6,
)
"""For each transaction: its changes, its origin, whether a logical message outside of transactions precedes it, and how
many Stream Aborts follow it."""


def build(transactions: list[Any], relations: Relations) -> Stream:
    """Builds the stream of these transactions. ``relations`` gets the Relation messages of relations 1 to 4, so the
    stream need not begin with them."""
    stream, schema, lsn = Stream(), {}, 1000
    for relation_id in range(1, 5):
        schema[relation_id] = describe(relations, relation(relation_id, f"t{relation_id}"), 0)
    for number, (changes, name, loose, aborts) in enumerate(transactions):
        if loose:
            lsn += 100
            payload = message(lsn, b"loose", transactional=False)
            stream.frames.append(frame(payload, lsn))
            stream.expected.append(("M", None, None, None, None, None, None, payload, lsn))
            stream.ends.append(len(stream.frames))
        lsn = _transaction(stream, schema, relations, changes, name, number, lsn + 100)
        stream.ends.append(len(stream.frames))
        stream.frames += [frame(stream_abort(900 + number, 910 + each), lsn + 1) for each in range(aborts)]
    return stream


def _transaction(
    stream: Stream, schema: dict[int, int], relations: Relations, changes: list[Any], name: str | None, number: int,
    lsn: int,
) -> int:  # fmt: skip
    final, xid = lsn + 1000, 700 + number
    place = [final, xid]
    stream.frames.append(frame(begin(final, xid, number)))
    if name:
        stream.frames.append(frame(origin(name)))
    ordinal = 0

    def expect(kind: str, relation_id: int | None, payload: bytes, at: int) -> None:
        known = None if relation_id is None else schema[relation_id]
        stream.expected.append((kind, place[0], ordinal, place[1], relation_id, known, name, payload, at))

    for change in changes:
        lsn += 10
        if change[0] == "R":
            payload = relation(change[1], f"t{change[1]}", change[2])
            schema[change[1]] = describe(relations, payload, len(stream.frames))
            stream.frames.append(frame(payload))
            continue
        if change[0] == "I":
            payload = insert(change[1], change[2])
            expect("I", change[1], payload, lsn)
        elif change[0] == "T":
            payload = truncate(change[1])
            found = decode(payload, Lsn(0))
            assert isinstance(found, Truncate)
            for relation_id in found.relation_ids:
                expect("T", relation_id, payload, lsn)
        else:
            payload = message(lsn, change[1], transactional=True)
            expect("M", None, payload, lsn)
        stream.frames.append(frame(payload, lsn))
        ordinal += 1
    payload = commit(final, final + 48, number)
    if ordinal:
        expect("C", None, payload, final + 48)
    stream.frames.append(frame(payload, final + 48))
    return final + 48


WHO = Identity("7", "db", "slot")
START = Lsn(100)


def writer_of(log: ChangeLog) -> tuple[BatchWriter, Relations]:
    relations = Relations()
    for relation_id in (1, 2):
        describe(relations, relation(relation_id, f"t{relation_id}"), 0)
    return BatchWriter(log.path, WHO, 3, relations), relations


def frames_of(at: int, relation_id: int = 1, number: int = 2) -> PendingFrames:
    payloads = [begin(at, 5), *[insert(relation_id, b"x")] * number, commit(at, at + 50)]
    frames = PendingFrames()
    frames.append(run_of([frame(payload, at) for payload in payloads], 0))
    return frames


@dataclass(frozen=True, slots=True)
class Placed:
    """A decoded message, and the xids of the block that contains it. A block reaches from Stream Start to Stream Stop,
    or from Begin Prepare to Prepare. Outside of a block, both xids are None."""

    message: AnyMessage
    top: int | None = None
    """The top transaction's xid. The first and last message of a block have it, too."""
    subxid: int | None = None
    """The xid that the message itself contains. Messages between Begin Prepare and Prepare contain no xid, so this is
    the top transaction's xid."""


class StreamDecoder:
    """Decodes the messages of one connection, in order. ``parallel``: as in :func:`decode_any`."""

    def __init__(self, *, parallel: bool) -> None:
        self._parallel = parallel
        self._opened: MessageKind | None = None
        """The kind of the message that began the open transaction or block."""
        self._top: int | None = None

    def take(self, payload: bytes) -> Placed:
        """Reads the next message. Raises ProtocolError if it is malformed, or if its kind is not allowed here."""
        kind, subxid = payload[0], None
        if self._opened == MessageKind.STREAM_START and kind in CARRY_XID:
            subxid, payload = int.from_bytes(payload[1:5]), payload[:1] + payload[5:]
        message = decode_any(payload, parallel=self._parallel)
        if not self._has_its_place(message, kind):
            raise ProtocolError("stands outside of its place")
        top = message.xid if isinstance(message, StreamStart | BeginPrepare) else self._top
        if self._opened == MessageKind.BEGIN_PREPARE and kind in CARRY_XID:
            subxid = top
        if kind in BRACKETS:
            self._opened, self._top = MessageKind(kind), top
        elif self._opened is not None and kind == BRACKETS[self._opened]:
            self._opened = self._top = None
        return Placed(message, top, subxid)

    def _has_its_place(self, message: AnyMessage, kind: int) -> bool:
        transactional = isinstance(message, LogicalMessage) and message.transactional
        if self._opened is None:
            return kind in BRACKETS or (kind in BETWEEN and not transactional)
        if self._opened == MessageKind.STREAM_START and kind == MessageKind.MESSAGE:
            return transactional
        return kind in CONTENT or kind == BRACKETS[self._opened]
