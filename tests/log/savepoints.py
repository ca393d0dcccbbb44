"""A small model of a server that streams transactions with savepoints: what it sends, and what commits.

Real servers do the same (tests/versions runs savepoints on them). A subtransaction gets its xid with its first change.
The subtransactions that contain it get their xids before it. Changes that are rolled back before the server sends their
block are never sent. A rollback to a savepoint sends an abort for each subtransaction that it rolls back, including
released subtransactions. The rollback of a whole transaction also sends an abort for the top transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.protocol.layouts import EPOCH
from pgcdc_assets.protocol.messages import (
    AnyMessage,
    Begin,
    Commit,
    Insert,
    Relation,
    RelationColumn,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
)
from tests.log.streams import frame
from tests.protocol import wire

RELATION = 7
DESCRIPTION = Relation(RELATION, "public", "t", "d", (RelationColumn(True, "c", 25, -1),))


@dataclass
class Level:
    """One level of an open transaction. The first level is the transaction itself, and each open savepoint is a further
    level."""

    xid: int | None = None
    released: list[int] = field(default_factory=list)
    """The released subtransactions that are now part of this level."""

    @property
    def xids(self) -> list[int]:
        return [*([] if self.xid is None else [self.xid]), *self.released]


@dataclass
class Session:
    levels: list[Level] = field(default_factory=lambda: [Level()])
    changes: list[tuple[int, AnyMessage]] = field(default_factory=list)
    """All changes that were not rolled back, in order, each with the xid of its subtransaction."""
    unsent: list[tuple[int, AnyMessage]] = field(default_factory=list)
    """The part of ``changes`` that is not sent yet."""
    streamed: bool = False


class StreamingServer:
    """A server with numbered sessions. ``frames`` has everything that the server sent. ``committed`` has the changes of
    each committed transaction, by its ``commit_lsn``."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.committed: dict[int, list[AnyMessage]] = {}
        self.xids: dict[int, int] = {}
        """The xid of each committed transaction, by its ``commit_lsn``."""
        self._sessions: dict[int, Session] = {}
        self._xid, self._lsn, self._row = 700, 1000, 0

    def insert(self, number: int) -> None:
        self._row += 1
        self._change(number, Insert(RELATION, (str(self._row),)))

    def savepoint(self, number: int) -> None:
        self._session(number).levels.append(Level())

    def release(self, number: int) -> None:
        levels = self._session(number).levels
        if len(levels) > 1:
            released = levels.pop()
            levels[-1].released += released.xids

    def rollback_to(self, number: int, depth: int) -> None:
        session = self._session(number)
        if len(session.levels) < 2:
            return
        depth = 1 + depth % (len(session.levels) - 1)
        gone = [xid for level in session.levels[depth:] for xid in level.xids]
        session.levels[depth:] = [Level()]
        self._roll_back(session, gone)

    def stream(self, number: int) -> None:
        """Sends the unsent changes of this session's transaction, as a server does when its decoding memory is full."""
        session = self._session(number)
        top = session.levels[0].xid
        if top is None or not session.unsent:
            return
        self._send(StreamStart(top, not session.streamed))
        if not session.streamed:
            self._send(DESCRIPTION, top)
        for xid, change in session.unsent:
            self._send(change, xid)
        self._send(StreamStop())
        session.unsent, session.streamed = [], True

    def commit(self, number: int) -> None:
        session = self._session(number)
        top = session.levels[0].xid
        if top is not None:
            # A transaction of which nothing was sent yet is sent as a block, too. A real server would send it without
            # blocks.
            self.stream(number)
            self._lsn += 100
            if session.streamed:
                commit_lsn = Lsn(self._lsn)
                self._send(StreamCommit(top, 0, commit_lsn, Lsn(commit_lsn + 8), EPOCH))
                self.committed[commit_lsn] = [change for _, change in session.changes]
                self.xids[commit_lsn] = top
        del self._sessions[number]

    def whole(self, number: int) -> None:
        """Sends a complete transaction of another session, without blocks. ``number`` is ignored."""
        self._xid, self._lsn, self._row = self._xid + 1, self._lsn + 100, self._row + 1
        commit_lsn, change = Lsn(self._lsn), Insert(RELATION, (str(self._row),))
        for message in (Begin(commit_lsn, EPOCH, self._xid), DESCRIPTION, change):
            self._send(message)
        self._send(Commit(0, commit_lsn, Lsn(commit_lsn + 8), EPOCH))
        self.committed[commit_lsn], self.xids[commit_lsn] = [change], self._xid

    def rollback(self, number: int) -> None:
        session = self._session(number)
        if session.levels[0].xid is not None:
            self._roll_back(session, [xid for level in reversed(session.levels) for xid in reversed(level.xids)])
        del self._sessions[number]

    def finish(self) -> None:
        for number in list(self._sessions):
            self.commit(number)

    def open(self) -> Iterator[int]:
        """The xids of the streamed transactions that have not ended yet."""
        for session in self._sessions.values():
            if session.streamed and session.levels[0].xid is not None:
                yield session.levels[0].xid

    def _session(self, number: int) -> Session:
        return self._sessions.setdefault(number, Session())

    def _change(self, number: int, change: AnyMessage) -> None:
        session = self._session(number)
        for level in session.levels:
            if level.xid is None:
                self._xid += 1
                level.xid = self._xid
        xid = session.levels[-1].xid if isinstance(change, Insert) else session.levels[0].xid
        assert xid is not None
        session.changes.append((xid, change))
        session.unsent.append((xid, change))

    def _roll_back(self, session: Session, gone: list[int]) -> None:
        session.changes = [(xid, change) for xid, change in session.changes if xid not in gone]
        session.unsent = [(xid, change) for xid, change in session.unsent if xid not in gone]
        top = session.levels[0].xid
        if session.streamed and top is not None:
            for xid in gone:
                self._send(StreamAbort(top, xid, Lsn(self._lsn), EPOCH))

    def _send(self, message: AnyMessage, xid: int | None = None) -> None:
        self._lsn += 1
        payload = wire.message(message)
        self.frames.append(frame(payload if xid is None else wire.within(payload, xid), self._lsn))
