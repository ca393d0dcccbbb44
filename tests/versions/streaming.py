"""A slot that is streamed while transactions are in progress, and one beside it that is read whole in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.log.framerun import HEADER, IS_CHANGE, FrameRun
from pgcdc_assets.log.inprogress import TransactionsInProgress
from pgcdc_assets.log.prepared import PreparedKey, PreparedTransaction, PreparedTransactions
from pgcdc_assets.log.rows import ABSENT
from pgcdc_assets.log.streamed import StreamPlace, located
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.frames import keepalive
from pgcdc_assets.protocol.messages import (
    AnyMessage,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    Truncate,
    Type,
)
from pgcdc_assets.protocol.streamed import decode_any
from pgcdc_assets.source.connect.pluginoptions import FIRST_VERSION, PluginOptions
from pgcdc_assets.source.connect.walsender import ReplicationConnection
from tests.fix_postgres import Database

PUBLICATION = "p"
FOREIGN = "outside"
"""A table that is not published."""
IMMEDIATE_SINCE = 16
_SECONDS = 30.0


@dataclass(frozen=True)
class Change:
    """``relations``: the Relation messages in force for it, one for each table that it is of."""

    lsn: Lsn
    payload: bytes
    relations: tuple[bytes, ...]


@dataclass(frozen=True)
class Transaction:
    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts: int
    origin: str | None
    changes: tuple[Change, ...]


@dataclass
class Content:
    """What has come of a transaction: the xid of each change's subtransaction, and the change."""

    origin: str | None = None
    changes: list[tuple[int, Change]] = field(default_factory=list)
    described: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """The Relation messages of its blocks, and when they came: they count for others only if it commits."""

    def without(self, aborted: set[int] | frozenset[int]) -> tuple[Change, ...]:
        return tuple(change for xid, change in self.changes if xid not in aborted)


class Reading:
    """Frames of any version of the protocol into transactions, in the order of their commits."""

    def __init__(self, *, parallel: bool = False) -> None:
        self.transactions: list[Transaction] = []
        self.loose: list[tuple[Lsn, bytes]] = []
        """Logical messages that are of no transaction."""
        self.ambiguous: set[int] = set()
        """The xids of transactions whose logical messages cannot be told from rolled back ones."""
        self.seen: set[str] = set()
        """The letters that came."""
        self.held = TransactionsInProgress()
        self.prepared = PreparedTransactions()
        self._prepared: dict[PreparedKey, Content] = {}
        self._parallel = parallel
        self._place = StreamPlace()
        self._number = 0
        self._open: dict[int, Content] = {}
        self._whole: tuple[Begin, Content] | None = None
        self._described: dict[int, tuple[int, bytes]] = {}

    def take(self, run: FrameRun) -> None:
        found = located(run, self._place, parallel=self._parallel)
        self._place = found.after
        self.seen |= {chr(kind) for kind in np.unique(run.kinds)}
        for stretch in found.stretches():
            for index in range(stretch.start, stretch.end):
                self._number += 1
                payload, lsn = found.run.payload(index), found.run.lsn(index)
                if stretch.top != ABSENT and payload[:1] not in b"SEbP":
                    self._streamed(stretch.top, int(found.subxid[index]), payload, lsn)
                elif payload != b"E":
                    self._message(decode_any(payload, lsn, parallel=self._parallel), payload, lsn)

    def _streamed(self, top: int, subxid: int, payload: bytes, lsn: Lsn) -> None:
        content, message = self._open[top], decode(payload, lsn)
        if isinstance(message, Relation):
            content.described[message.relation_id] = self._number, payload
        elif isinstance(message, Origin):
            content.origin = message.name
            self.held.add(top, changes=0, size=0, origin=message.name)
        elif IS_CHANGE[payload[0]]:
            described = {**self._described, **content.described}
            content.changes.append((subxid, Change(lsn, payload, _relations(message, described))))
            messages = isinstance(message, LogicalMessage)
            self.held.add(top, changes=1, size=len(payload), messages=int(messages))

    def _message(self, message: AnyMessage, payload: bytes, lsn: Lsn) -> None:
        match message:
            case StreamStart():
                self.held.start(message, lsn, float(self._number))
                if message.first:
                    self._open[message.xid] = Content()
            case StreamAbort():
                if (gone := self.held.abort(message)) is not None:
                    del self._open[gone.xid]
            case StreamCommit():
                done, content = self.held.end(message, lsn), self._open.pop(message.xid)
                assert (done.changes, done.origin) == (len(content.changes), content.origin)
                self.ambiguous |= {done.xid} if done.ambiguous else set()
                self._described = _later(self._described, content.described)
                self._ended(message, message.xid, content, done.aborted)
            case BeginPrepare():
                self.held.start(StreamStart(message.xid, first=True), lsn, float(self._number))
                self._open[message.xid] = Content()
            case StreamPrepare() | Prepare():
                done, content = self.held.end(message, lsn), self._open.pop(message.xid)
                if isinstance(message, Prepare):
                    self._described = _later(self._described, content.described)
                key = PreparedKey(message.xid, message.gid, message.end_lsn)
                self.prepared.prepare(PreparedTransaction(key, message.prepare_ts, frozenset(done.aborted)))
                self._prepared[key] = content
            case Begin():
                self._whole = message, Content()
            case Commit():
                assert self._whole is not None
                begin, content = self._whole
                assert begin.final_lsn == message.commit_lsn
                self._ended(message, begin.xid, content)
                self._whole = None
            case CommitPrepared():
                ended = self.prepared.named(message)
                assert ended is not None
                self.prepared.end(ended)
                self._ended(message, message.xid, self._prepared.pop(ended.key), ended.aborted)
            case RollbackPrepared():
                if (rolled_back := self.prepared.named(message)) is not None:
                    self.prepared.end(rolled_back)
                    del self._prepared[rolled_back.key]
            case Relation():
                self._described[message.relation_id] = self._number, payload
            case LogicalMessage() if not message.transactional:
                self.loose.append((message.lsn, payload))
            case Origin():
                assert self._whole is not None
                self._whole[1].origin = message.name
            case Type():
                pass
            case _:
                assert self._whole is not None
                self._whole[1].changes.append((0, Change(lsn, payload, _relations(message, self._described))))

    def _ended(
        self, facts: Commit | StreamCommit | CommitPrepared, xid: int, content: Content,
        aborted: set[int] | frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        changes = content.without(aborted)
        if changes:
            lsns = facts.commit_lsn, facts.end_lsn
            self.transactions.append(Transaction(xid, *lsns, facts.commit_ts, content.origin, changes))


def _later(one: dict[int, tuple[int, bytes]], other: dict[int, tuple[int, bytes]]) -> dict[int, tuple[int, bytes]]:
    """Of each relation what came later."""
    return {key: max(held[key] for held in (one, other) if key in held) for key in one.keys() | other.keys()}


def _relations(message: AnyMessage, described: dict[int, tuple[int, bytes]]) -> tuple[bytes, ...]:
    if isinstance(message, Truncate):
        return tuple(described[relation][1] for relation in message.relation_ids)
    relation = getattr(message, "relation_id", None)
    return () if relation is None else (described[relation][1],)


class Stream:
    """The streamed slot. ``catch_up`` takes all that the server has decoded so far, whatever is open there."""

    def __init__(self, database: Database, options: PluginOptions, memory: dict[str, str]) -> None:
        self._database, self._options, self._memory = database, options, memory
        self._walsender: ReplicationConnection | None = None
        self.slot, self.beside = f"s_{database.name}", f"b_{database.name}"
        with ReplicationConnection.open(database.conninfo) as walsender:
            self.start = walsender.create_slot(self.beside).consistent_point
            self._confirmed = walsender.create_slot(self.slot).consistent_point
        self.begin()

    def begin(self, options: PluginOptions | None = None, at: Lsn | None = None) -> None:
        """Connect, with no memory of what came before; an earlier connection, if one is left, has failed.

        ``at`` may lie above what was confirmed: what commits below does not come again.
        """
        if self._walsender is not None:
            self._walsender.close()
        options = options or self._options
        self.read = Reading(parallel=options.parallel)
        walsender = ReplicationConnection.open(self._database.conninfo, options=self._memory)
        self._walsender = walsender
        walsender.start(self.slot, at or self._confirmed, [PUBLICATION], options)

    def leave(self) -> None:
        """Confirm all that came, and go. No transaction is lost by that: what is open keeps its WAL."""
        self._confirmed = self._flushed()
        _read(self._connected, self.read, self._confirmed)
        self._connected.send_status(self._confirmed, self._confirmed, self._confirmed)
        self.close()

    def close(self) -> None:
        self._connected.end_stream()
        self._connected.close()
        self._walsender = None

    def catch_up(self) -> Reading:
        _read(self._connected, self.read, self._flushed())
        return self.read

    @property
    def _connected(self) -> ReplicationConnection:
        assert self._walsender is not None
        return self._walsender

    def whole(self) -> Reading:
        """All from the start by version 1, of the other slot."""
        read = Reading()
        with ReplicationConnection.open(self._database.conninfo) as walsender:
            walsender.start(self.beside, self.start, [PUBLICATION], FIRST_VERSION)
            _read(walsender, read, self._flushed())
            walsender.end_stream()
        return read

    def _flushed(self) -> Lsn:
        """A commit, which flushes what open transactions wrote before it."""
        with self._database.connect() as conn:
            conn.execute(f"INSERT INTO {FOREIGN} VALUES (1)")
            row = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return Lsn.parse(row[0])


def _read(walsender: ReplicationConnection, into: Reading, upto: Lsn) -> None:
    deadline, asked, number = time.monotonic() + _SECONDS, 0.0, 0
    while time.monotonic() < deadline:
        if time.monotonic() - asked > 0.05:
            walsender.send_status(ZERO, ZERO, ZERO, reply=True)
            asked = time.monotonic()
        if not walsender.frames.pull():
            walsender.wait(0.02)
        frames = walsender.frames.take()
        first = 0
        for place in [*np.flatnonzero(frames.lengths <= HEADER).tolist(), len(frames)]:
            if first < place:
                into.take(FrameRun.of(frames.part(first, place), number))
                number += place - first
            if place < len(frames) and keepalive(frames.frame(place)).wal_end >= upto:
                return
            first = place + 1
    raise AssertionError(f"the server did not get to {upto}")


@contextmanager
def streaming(database: Database, *, immediate: bool = False, two_phase: bool = False) -> Iterator[Stream]:
    """``immediate``: each change is a block of its own, where the server can."""
    version = database.server.version
    memory = {"logical_decoding_work_mem": "64kB"}
    if immediate and version >= IMMEDIATE_SINCE:
        memory |= {"debug_logical_replication_streaming": "immediate"}
    options = PluginOptions.of(version, streaming=True, two_phase=two_phase)
    stream = Stream(database, options, memory)
    try:
        yield stream
    finally:
        stream.close()
