"""Which rows of transactions in progress count: a table of cases, and any savepoints of any sessions."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.framerun import IS_CHANGE, FrameRun
from pgcdc_assets.log.inprogress import TransactionsInProgress
from pgcdc_assets.log.streamed import StreamPlace, located
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import AnyMessage, StreamAbort, StreamCommit, StreamPrepare, StreamStart
from pgcdc_assets.protocol.streamed import decode_any
from tests.log.savepoints import StreamingServer
from tests.log.streams import run_of

AT = Lsn(0x123)


def commit(xid: int) -> StreamCommit:
    return StreamCommit(xid, 0, Lsn(100), Lsn(108), 0)


def test_a_transaction_ends_with_its_commit() -> None:
    held = TransactionsInProgress()
    assert held.start(StreamStart(7, True), AT, 1.0) is None
    held.add(7, changes=3, size=90, origin="elsewhere")
    held.start(StreamStart(7, False), Lsn(0x999), 5.0)
    held.add(7, changes=2, size=10)
    assert (len(held), held.bytes, 7 in held) == (1, 100, True)
    done = held.end(commit(7), AT)
    assert (done.xid, done.lsn, done.since, done.changes, done.origin) == (7, AT, 1.0, 5, "elsewhere")
    assert (len(held), held.bytes) == (0, 0)
    assert not done.ambiguous


def test_a_prepare_ends_it_as_well() -> None:
    held = TransactionsInProgress()
    held.start(StreamStart(7, True), AT, 1.0)
    assert held.end(StreamPrepare(0, AT, AT, 0, 7, "g"), AT).xid == 7
    assert 7 not in held


def test_an_abort_takes_its_subtransaction_alone() -> None:
    held = TransactionsInProgress()
    for xid in (7, 17):
        held.start(StreamStart(xid, True), AT, 1.0)
    assert held.abort(StreamAbort(7, 8)) is None
    assert held.abort(StreamAbort(7, 9)) is None
    assert held[7].aborted == {8, 9}
    assert held[17].aborted == set()
    assert held.abort(StreamAbort(17, 18)) is None
    gone = held.abort(StreamAbort(17, 17))
    assert gone is not None
    assert gone.xid == 17
    assert held.end(commit(7), AT).aborted == {8, 9}
    assert held.unknown_aborts == 0


def test_an_abort_of_what_never_came_is_counted() -> None:
    held = TransactionsInProgress()
    assert held.abort(StreamAbort(7, 8)) is None
    assert held.abort(StreamAbort(7, 7)) is None
    assert held.unknown_aborts == 2
    assert len(held) == 0


def test_a_first_block_makes_void_what_came_before() -> None:
    held = TransactionsInProgress()
    held.start(StreamStart(7, True), AT, 1.0)
    held.add(7, changes=3, size=90)
    held.abort(StreamAbort(7, 8))
    void = held.start(StreamStart(7, True), Lsn(0x200), 2.0)
    assert void is not None
    assert (void.lsn, void.aborted) == (AT, {8})
    assert (held[7].aborted, held[7].changes, held[7].bytes, held[7].lsn) == (set(), 0, 0, Lsn(0x200))


def test_what_has_no_first_block_is_refused() -> None:
    held = TransactionsInProgress()
    with pytest.raises(ProtocolError, match="the first block of transaction 7 did not come, at LSN 0/123"):
        held.start(StreamStart(7, False), AT, 1.0)
    with pytest.raises(ProtocolError, match="no block of transaction 7 came, which is complete now, at LSN 0/123"):
        held.end(commit(7), AT)
    held.start(StreamStart(7, True), AT, 1.0)
    held.clear()
    with pytest.raises(ProtocolError, match="the first block"):
        held.start(StreamStart(7, False), AT, 1.0)


def test_the_oldest_is_known() -> None:
    held = TransactionsInProgress()
    assert held.oldest is None
    for xid, since in ((9, 2.0), (7, 1.0), (8, 3.0)):
        held.start(StreamStart(xid, True), AT, since)
    assert held.oldest is held[7]
    held.end(commit(7), AT)
    assert held.oldest is held[9]


def test_a_message_in_front_of_an_abort_cannot_be_told() -> None:
    held = TransactionsInProgress()
    held.start(StreamStart(7, True), AT, 1.0)
    held.abort(StreamAbort(7, 8))
    held.add(7, changes=1, size=10, messages=1)
    assert not held[7].ambiguous
    held.abort(StreamAbort(7, 9))
    assert held[7].ambiguous


STEPS = st.tuples(
    st.sampled_from([
        "insert", "insert", "insert", "message", "savepoint", "release", "rollback_to", "stream", "stream", "commit",
        "rollback",
    ]),
    st.integers(0, 2),
    st.integers(0, 3),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=60), st.lists(st.integers(0, 200), max_size=4))
def test_what_counts_is_what_was_committed(steps: list[tuple[str, int, int]], cuts: list[int]) -> None:
    """Savepoints released and rolled back, within each other, after parts were sent, in sessions beside each other."""
    server = StreamingServer()
    for step, session, depth in steps:
        if step == "rollback_to":
            server.rollback_to(session, depth)
        else:
            getattr(server, step)(session)
    left = set(server.open())
    taken = Taken()
    edges = sorted({0, len(server.frames), *(cut % (len(server.frames) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        taken.take(run_of(server.frames[start:end], start))
    assert taken.committed == server.committed
    assert set(taken.content) == left
    assert taken.held.bytes == sum(len(payload) for parts in taken.content.values() for _, payload in parts)


class Taken:
    """A receiver in a few lines: content by top xid, which counts or not at the commit."""

    def __init__(self) -> None:
        self.held = TransactionsInProgress()
        self.content: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self.committed: dict[int, list[AnyMessage]] = {}
        self._place = StreamPlace()

    def take(self, run: FrameRun) -> None:
        found = located(run, self._place, parallel=True)
        self._place = found.after
        for stretch in found.stretches():
            for index in range(stretch.start, stretch.end):
                if not IS_CHANGE[found.run.kinds[index]]:
                    self._control(decode_any(found.run.payload(index), parallel=True))
            changes = np.flatnonzero(IS_CHANGE[found.run.kinds[stretch.start : stretch.end]]) + stretch.start
            if len(changes):
                self._hold(found.run, changes, stretch.top, found.subxid)

    def _hold(self, run: FrameRun, changes: np.ndarray, top: int, subxid: np.ndarray) -> None:
        payloads = [run.payload(index) for index in changes.tolist()]
        messages = sum(payload[:1] == b"M" for payload in payloads)
        self.held.add(top, changes=len(payloads), size=sum(map(len, payloads)), messages=messages)
        self.content[top] += zip(subxid[changes].tolist(), payloads, strict=True)

    def _control(self, message: AnyMessage) -> None:
        match message:
            case StreamStart():
                if self.held.start(message, ZERO, 0.0) is not None:
                    del self.content[message.xid]
            case StreamAbort():
                if self.held.abort(message) is not None:
                    del self.content[message.xid]
            case StreamCommit():
                aborted = self.held.end(message, ZERO).aborted
                content = self.content.pop(message.xid)
                self.committed[message.commit_lsn] = [decode(part) for xid, part in content if xid not in aborted]
