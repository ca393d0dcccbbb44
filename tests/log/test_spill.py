"""Tests of the receiver's storage without a server: which changes of transactions in progress get into the log, no
matter whether they were in memory or in files."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Endpos, Lsn, LsnRange
from pgcdc_assets.errors import ProtocolError
from pgcdc_assets.log.batch import BatchWriter, PendingBatch
from pgcdc_assets.log.commitfacts import CommitFacts
from pgcdc_assets.log.content import SpilledSegment
from pgcdc_assets.log.framerun import FrameRun
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.receive.blocks import Block, Dropped
from pgcdc_assets.log.receive.intake import Intake, Part, StreamCommitted, StreamUnsure
from pgcdc_assets.log.receive.messagefilter import MessageFilter
from pgcdc_assets.log.receive.relationfacts import described
from pgcdc_assets.log.receive.wholetransactions import Taken
from pgcdc_assets.log.relations import Overlay, Relations
from pgcdc_assets.log.rows import Tally, TransactionEnd, rows_in_progress
from pgcdc_assets.log.segment import read_rows
from pgcdc_assets.log.spill import SPILL, PreparedFolder, SpillFolder
from pgcdc_assets.log.transactions import (
    OpenBlock,
    PreparedKey,
    PreparedTransaction,
    PreparedTransactions,
    TransactionsInProgress,
)
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.layouts import EPOCH
from pgcdc_assets.protocol.messages import (
    AnyMessage,
    CommitPrepared,
    Insert,
    LogicalMessage,
    Relation,
    RelationColumn,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)
from pgcdc_assets.protocol.shape import RelationFacts
from pgcdc_assets.store.local import path_of
from tests.log.savepoints import DESCRIPTION, RELATION, StreamingServer
from tests.log.streams import frame, insert, relation, run_of
from tests.protocol import wire

START = Lsn(900)
FACTS = RelationFacts(None)
TOP, SUB, OTHER = 700, 701, 702


def intake(relations: Relations, position: Lsn) -> Intake:
    return Intake(
        lambda asked: {described(one): FACTS for one in asked}, relations, position, wanted=MessageFilter(["*"])
    )


class Receiving:
    """The part of the receiver that handles frames. It has no connection, and does all work in the test's thread."""

    def __init__(self, folder: Path) -> None:
        self.log = ChangeLog(Layout.of(folder))
        identity = Identity("1", "d", "s")
        self.log.create(identity, START, 1)
        self.intake = intake(relations := Relations(), START)
        self.pending = PendingBatch()
        self.writer = BatchWriter(self.log.path, identity, 1, relations)

    def take(self, frames: list[bytes]) -> None:
        for part in self.intake.take(run_of(frames, self.intake.sequence), parallel=True):
            self._pend(part)

    def _pend(self, part: Part) -> None:
        match part:
            case Taken(run, whole, after):
                self.pending.receive(run, whole, after, 1.0)
            case Block(xid, overlay, frames, origin):
                self.pending.in_progress.add(xid, overlay, frames, origin)
            case StreamCommitted(xid, facts, commit):
                self.pending.commit(xid, facts, commit, 1.0)
            case Dropped(xid):
                if (stream := self.pending.in_progress.pop(xid)) is not None:
                    self.writer.drop(stream)

    def spill(self) -> None:
        if self.pending.in_progress.size:
            stream = self.pending.in_progress.largest
            self.writer.spill(stream.take(), stream)

    def stage(self) -> None:
        if self.pending.closed_in_memory:
            frames, ended, staged = self.pending.stage_closed()
            self.writer.stage(frames, staged, ended)

    def cut(self) -> None:
        if self.pending.since is not None:
            closed, ended, staged = self.pending.take_closed()
            self.writer.commit(closed, staged, self.intake.positions.boundary, ended)

    def content(self) -> dict[int, list[AnyMessage]]:
        """The changes of each transaction in the log, by the transaction's commit_lsn."""
        rows = [row for segment in self.log.all_segments() for row in read_rows(segment.file).to_pylist()]
        found: defaultdict[int, list[AnyMessage]] = defaultdict(list)
        for row in sorted((row for row in rows if row["commit_lsn"]), key=lambda row: row["tx_ordinal"]):
            found[row["commit_lsn"]].append(decode(row["payload"]))
        return {commit_lsn: _without_commit(changes) for commit_lsn, changes in found.items()}

    @property
    def spilled(self) -> list[Path]:
        return list(path_of(self.log.path / SPILL).iterdir())


def _without_commit(changes: list[AnyMessage]) -> list[AnyMessage]:
    assert [type(change).__name__ for change in changes].index("Commit") == len(changes) - 1
    return changes[:-1]


def block(*changes: tuple[int, AnyMessage], first: bool = True, top: int = TOP) -> list[bytes]:
    """A block with changes of one transaction. The transaction's first block also has the Relation message."""
    described = [(top, DESCRIPTION)] if first else []
    inside = [wire.within(wire.message(change), xid) for xid, change in (*described, *changes)]
    return [frame(payload, 1000 + number) for number, payload in enumerate(
        [wire.message(StreamStart(top, first)), *inside, wire.message(StreamStop())]
    )]  # fmt: skip


def row(number: int) -> AnyMessage:
    return Insert(RELATION, (str(number),))


def abort(subxid: int, top: int = TOP) -> list[bytes]:
    return [frame(wire.message(StreamAbort(top, subxid, Lsn(2000), EPOCH)), 2000)]


def commit(commit_lsn: int = 3000, top: int = TOP) -> list[bytes]:
    return [frame(wire.message(StreamCommit(top, 0, Lsn(commit_lsn), Lsn(commit_lsn + 8), EPOCH)), commit_lsn + 8)]


@pytest.fixture
def receiving(tmp_path: Path) -> Receiving:
    return Receiving(tmp_path / "lake")


STEPS = st.tuples(
    st.sampled_from([
        "insert", "insert", "insert", "savepoint", "release", "rollback_to", "stream", "stream", "commit", "whole",
        "rollback",
    ]),
    st.integers(0, 2),
    st.integers(0, 3),
)  # fmt: skip
WORKS = st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["spill", "spill", "stage", "cut"])), max_size=8)


@settings(max_examples=20, deadline=None)
@given(st.lists(STEPS, min_size=15, max_size=60), WORKS, st.booleans())
def test_log_holds_exactly_the_committed_changes(
    steps: list[tuple[str, int, int]], works: list[tuple[int, str]], finished: bool
) -> None:
    """When a change is committed or rolled back, it may be in memory, in a file of its transaction in progress
    (spilled), or in a file that waits for the next Delta commit (staged). The counts of each batch must be right,
    too."""
    server = StreamingServer()
    for step, session, depth in steps:
        if step == "rollback_to":
            server.rollback_to(session, depth)
        else:
            getattr(server, step)(session)
    if finished:
        server.finish()
    with TemporaryDirectory() as folder:
        receiving = Receiving(Path(folder) / "lake")
        at = sorted((place % (len(server.frames) + 1), work) for place, work in works)
        edges = [(0, ""), *at, (len(server.frames), "cut")]
        for (start, _), (end, work) in itertools.pairwise(edges):
            if start < end:
                receiving.take(server.frames[start:end])
            getattr(receiving, work)()
        assert receiving.content() == {lsn: changes for lsn, changes in server.committed.items() if changes}
        position = receiving.log.position()
        for batch in receiving.log.verify(LsnRange(START, position)):
            held = [lsn for lsn, changes in server.committed.items() if changes and batch.start <= lsn < batch.end]
            assert (batch.transactions, batch.last_xid) == (len(held), server.xids[max(held)])
        for left in set(server.open()):
            for dropped in abort(left, left):
                receiving.take([dropped])
        assert receiving.spilled == []


def test_rolled_back_rows_are_not_counted(receiving: Receiving) -> None:
    """Rolled-back rows in memory are never written. Rolled-back rows in a file stay there; the file's tags exclude
    them."""
    receiving.take(block((TOP, row(1)), (SUB, row(2)), (OTHER, row(3))))
    receiving.spill()
    receiving.take(block((SUB, row(4)), (TOP, row(5)), first=False) + abort(SUB) + commit())
    receiving.cut()
    assert receiving.content() == {3000: [row(1), row(3), row(5)]}
    (batch,) = receiving.log.verify(LsnRange(START, receiving.log.position()))
    assert (batch.counts, batch.others) == ({RELATION: {"I": 3}}, {"C": 1})
    late = [segment for segment in receiving.log.all_segments() if segment.commit_facts is not None]
    assert [(segment.rows, segment.commit_facts.aborted) for segment in late if segment.commit_facts] == [(3, (SUB,))]
    stored = [row for segment in receiving.log.all_segments() if segment.commit_facts is None
              for row in read_rows(segment.file).to_pylist() if row["kind"] == "I"]  # fmt: skip
    assert [decode(stored_row["payload"]) for stored_row in stored] == [row(5)]


@pytest.mark.parametrize("work", ["spill", "stage", ""])
def test_transaction_whose_savepoints_were_all_rolled_back_leaves_nothing(receiving: Receiving, work: str) -> None:
    """All changes were made after savepoints, and all were rolled back. So the log gets no Commit, no file and no
    batch."""
    receiving.take(block((SUB, row(1)), (OTHER, row(2))))
    if work == "spill":
        receiving.spill()
        assert len(receiving.spilled) == 1
    receiving.take(abort(SUB) + abort(OTHER) + commit())
    if work == "stage":
        receiving.stage()
    receiving.cut()
    assert receiving.content() == {}
    assert receiving.log.batches(START) == []
    assert receiving.spilled == []
    assert receiving.log.position() == 3008


def test_files_of_a_transaction_are_deleted_as_soon_as_it_is_rolled_back(receiving: Receiving) -> None:
    receiving.take(block((TOP, row(1)), (SUB, row(2))))
    receiving.spill()
    assert len(receiving.spilled) == 1
    receiving.take(abort(SUB))
    assert len(receiving.spilled) == 1
    receiving.take(abort(TOP))
    assert receiving.spilled == []
    assert len(receiving.intake.in_progress) == 0


def test_first_block_that_is_sent_again_replaces_the_earlier_blocks(receiving: Receiving) -> None:
    receiving.take(block((TOP, row(1))))
    receiving.spill()
    receiving.take(block((TOP, row(1)), (TOP, row(2))))
    assert receiving.spilled == []
    receiving.take(commit())
    receiving.cut()
    assert receiving.content() == {3000: [row(1), row(2)]}


def test_transaction_below_the_position_of_the_log_is_not_stored_again(tmp_path: Path) -> None:
    receiving = Receiving(tmp_path / "lake")
    receiving.writer.advance(Lsn(3008))
    receiving.intake = intake(Relations(), Lsn(3008))
    receiving.take(block((TOP, row(1))))
    receiving.spill()
    receiving.take(commit())
    assert receiving.pending.since is None
    assert receiving.spilled == []
    receiving.take(block((OTHER, row(2)), top=OTHER) + commit(3008, OTHER))
    assert receiving.pending.since is not None


@pytest.mark.parametrize(("goal", "taken", "boundary"), [
    (2999, False, START), (3000, False, 3000), (3004, False, 3000), (3007, False, 3000), (3008, True, 3008),
    (3009, True, 3008),
])  # fmt: skip
def test_run_with_an_endpos_around_a_commit_record_ends_at_a_boundary(
    receiving: Receiving, goal: int, taken: bool, boundary: int
) -> None:
    """No boundary may lie inside the commit record. So if the endpos lies inside it, the run ends at the start of the
    commit record, and the transaction is left to the next run."""
    receiving.intake.positions.goal = Endpos(Lsn(goal), wal_writer_delay=0.2)
    receiving.take(block((TOP, row(1))))
    receiving.spill()
    receiving.take(commit())
    receiving.take(block((OTHER, row(2)), top=OTHER) + commit(4000, OTHER))
    assert (receiving.pending.since is not None) == taken
    assert receiving.intake.positions.boundary == boundary
    assert receiving.intake.positions.arrived
    receiving.cut()
    assert receiving.content() == ({3000: [row(1)]} if taken else {})


def test_transaction_is_requested_unstreamed_if_its_message_may_have_been_rolled_back(receiving: Receiving) -> None:
    """A subtransaction was rolled back after the logical message. The blocks do not show whether the message was rolled
    back, too. So the receiver requests the transaction again, without streaming. If the commit is above the goal, the
    receiver does not request the transaction again, because the run ends below the commit."""
    emitted = LogicalMessage(True, Lsn(1), "p", b"content")
    receiving.take(block((TOP, emitted), (SUB, row(1))) + abort(SUB))
    with pytest.raises(StreamUnsure) as unsure:
        receiving.take(commit())
    assert unsure.value.end_lsn == 3008
    receiving.take(block((OTHER, emitted), top=OTHER) + abort(SUB, OTHER))
    receiving.intake.positions.goal = Endpos(Lsn(3500), wal_writer_delay=0.2)
    receiving.take(commit(4000, OTHER))
    assert receiving.intake.positions.arrived


@pytest.mark.parametrize("origins", [True, False])
def test_transaction_whose_origin_message_may_be_missing_is_received_again_without_streaming(
    receiving: Receiving, origins: bool
) -> None:
    """The server takes a block's LSN and its origin from the first item that it decodes for the block. If the first
    change has another LSN, this item was not a row change. Then the server may have sent no Origin message, although
    the transaction has an origin. This is possible only if the source has replication origins."""
    receiving.intake._origins = lambda: origins
    told = block((TOP, row(1)))
    start, description, change, stop = (sent[25:] for sent in told)
    receiving.take([frame(start, 1000), frame(description, 0), frame(change, 1000), frame(stop, 1000), *commit()])
    assert receiving.pending.since is not None
    receiving.take([frame(start, 1000), frame(description, 0), frame(change, 1001), frame(stop, 1001)])
    if origins:
        with pytest.raises(StreamUnsure):
            receiving.take(commit(4000))
    else:
        receiving.take(commit(4000))


def test_streamed_transaction_without_changes_needs_no_known_origin(receiving: Receiving) -> None:
    """If a large transaction changes only unpublished tables, the server sends it as empty blocks."""
    receiving.intake._origins = lambda: True
    start, *_, stop = (sent[25:] for sent in block((TOP, row(1))))
    receiving.take([frame(start, 1000), frame(stop, 1000), *commit()])
    assert receiving.intake.positions.boundary == 3008


# Relations. An Overlay holds the Relation messages of one transaction in progress -------------------


def column(name: str) -> tuple[Relation, bytes]:
    payload = relation(7, "t", name)
    found = decode(payload)
    assert isinstance(found, Relation)
    return found, payload


def in_force(relations: Relations | Overlay, sequence: int, relation_id: int = 7) -> int:
    return int(relations.schema_ids(np.array([relation_id]), np.array([sequence]))[0])


def test_relation_messages_of_a_transaction_in_progress_apply_only_to_it_until_its_commit() -> None:
    relations, overlay = Relations(), Overlay()
    before = relations.see(*column("c"), FACTS, 1).schema_id
    overlay.see(*column("new"), 5)
    assert in_force(relations, 9) == before
    assert in_force(overlay, 5) == 0
    final = overlay.promote(relations, [FACTS], 10)
    assert in_force(relations, 9) == before
    assert in_force(relations, 10) == final[0] != before
    with pytest.raises(ProtocolError):
        in_force(Overlay(), 5)


def test_relation_message_of_a_commit_does_not_replace_a_newer_relation_message() -> None:
    """The first transaction released its lock on the table by a rollback to a savepoint. Then a second transaction
    altered the table, and the server sent a new Relation message. The new message still applies after the first
    transaction's commit."""
    relations, overlay = Relations(), Overlay()
    overlay.see(*column("old"), 5)
    altered = relations.see(*column("altered"), FACTS, 7).schema_id
    final = overlay.promote(relations, [FACTS], 10)
    assert in_force(relations, 11) == altered
    assert relations.record(final[0]).payload == column("old")[1]


@pytest.mark.parametrize("commits_first", ["earlier", "later"])
def test_relation_message_that_was_sent_last_is_used_after_two_commits(commits_first: str) -> None:
    """Each of two transactions has a Relation message of the same table. After both commits, the message that was sent
    last is in use, in whichever order the transactions commit, because the server assumes that the last message it sent
    is used."""
    relations, earlier, later = Relations(), Overlay(), Overlay()
    earlier.see(*column("earlier"), 5)
    later.see(*column("later"), 6)
    ends = [earlier, later] if commits_first == "earlier" else [later, earlier]
    for number, overlay in enumerate(ends):
        overlay.promote(relations, [FACTS], 10 + number)
    assert relations.in_force(7) == column("later")[1]
    assert relations.record(in_force(relations, 13)).payload == column("later")[1]


def test_relation_message_of_a_commit_does_not_replace_a_newer_one_of_a_prepared_transaction() -> None:
    """The prepared transaction may still lock the table, so the catalog facts of its Relation message are read
    later."""
    relations, overlay = Relations(), Overlay()
    prepared = Overlay(relations)
    overlay.see(*column("old"), 5)
    prepared.see(*column("altered"), 7)
    prepared.pass_on()
    overlay.promote(relations, [FACTS], 10)
    assert relations.in_force(7) == column("altered")[1]
    assert [seen.sequence for seen in relations.undescribed([7])] == [7]


def test_structure_that_is_sent_again_after_a_rollback_gets_its_earlier_schema_id() -> None:
    """A rollback to a savepoint undoes a change of the table's structure. Then the server sends the earlier structure
    again."""
    overlay, relations = Overlay(), Relations()
    for sequence, name in enumerate(["c", "rolled back", "c"]):
        overlay.see(*column(name), 10 * sequence)
    assert [in_force(overlay, sequence) for sequence in (5, 15, 25)] == [0, 1, 0]
    assert [one.columns[0].name for one in overlay.relations] == ["c", "rolled back"]
    final = overlay.promote(relations, [FACTS, FACTS], 40)
    assert in_force(relations, 41) == final[0]


def test_relation_message_inside_a_block_does_not_apply_to_other_transactions(receiving: Receiving) -> None:
    """Transactions that arrive between the blocks of a transaction use the Relation message that was sent before these
    blocks."""
    base = StreamingServer()
    base.whole(0)
    receiving.take(base.frames)
    new = Relation(RELATION, "public", "t", "d", (*DESCRIPTION.columns, RelationColumn(False, "w", 23, -1)))
    receiving.take(block((TOP, new), (TOP, Insert(RELATION, ("1", "2")))))
    begun = len(base.frames)
    base.whole(0)
    # The Relation messages are left out, because a server would not send them again.
    receiving.take([sent for sent in base.frames[begun:] if sent[25:26] != b"R"])
    receiving.take(commit(5000))
    receiving.cut()
    shapes = receiving.log.shapes(LsnRange(START, receiving.log.position()))
    rows = [row for segment in receiving.log.all_segments() for row in read_rows(segment.file).to_pylist()
            if row["kind"] == "I"]  # fmt: skip
    widths = {row["commit_lsn"]: len(shapes[row["schema_id"]].columns) for row in rows}
    assert widths == {**dict.fromkeys(base.committed, 1), 5000: 2}


# Files and counts -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> SpillFolder:
    log = Location.of(str(tmp_path / "log"))
    return SpillFolder(log, PreparedFolder(log))


def spilled(folder: SpillFolder, *subxids: int) -> SpilledSegment:
    overlay = Overlay()
    overlay.see(*column("c"), 0)
    run: FrameRun = run_of([frame(insert(7, str(subxid).encode())) for subxid in subxids], 1)
    (segment,) = folder.spill(rows_in_progress(run, np.array(subxids), OpenBlock(TOP), overlay))
    return segment


def end(*aborted: int) -> CommitFacts:
    return CommitFacts(3000, 5, tuple(sorted(aborted)), {0: 77})


def test_file_lists_only_the_aborted_subtransactions_in_its_xid_range(folder: SpillFolder) -> None:
    """The range is from the lowest to the highest xid in the file. If the file lists no aborted subtransaction, readers
    need not filter its rows."""
    segment = spilled(folder, 710, 712, 712, 714)
    assert (segment.lowest, segment.highest, segment.tally.rows) == (710, 714, 4)
    nothing: tuple[int, ...] = ()
    for aborted, told, rows in (
        (nothing, nothing, 4), ((709, 715), nothing, 4), ((711, 713), nothing, 4),
        ((700, 712, 713, 714), (712, 714), 1),
    ):  # fmt: skip
        staged = segment.at(end(*aborted))
        assert staged is not None
        ((_, late),) = staged.files
        assert late is not None
        assert (late.aborted, late.schema_ids, late.commit_lsn) == (told, {0: 77}, 3000)
        assert (staged.tally.rows, staged.tally.schema_ids) == (rows, {77})
        assert staged.tally.transactions == 0


def test_file_that_has_only_rows_of_aborted_subtransactions_is_not_used(folder: SpillFolder) -> None:
    assert spilled(folder, 710, 711).at(end(709, 710, 711)) is None


def test_first_and_last_transaction_of_a_batch_are_found_by_commit_order() -> None:
    """A Tally counts the transactions of a batch. The transactions are added in any order, because some were streamed
    and some were not."""
    total = Tally()
    for lsn in (30, 10, 20):
        total.add(Tally(transactions=1, first=TransactionEnd(lsn, lsn, lsn), last=TransactionEnd(lsn + 5, lsn + 5, 0)))
    total.add(Tally())
    assert (total.first, total.last) == (TransactionEnd(10, 10, 10), TransactionEnd(35, 35, 0))
    assert total.transactions == 3


def test_sizes_in_memory_and_in_files_are_counted(receiving: Receiving) -> None:
    """The size in memory includes blocks of transactions in progress and ended transactions, unless they are in files.
    The size of the next batch includes all ended transactions, in memory and in files."""
    pending = receiving.pending
    receiving.take(block((TOP, row(1))))
    size = pending.in_progress.size
    assert pending.in_memory == size > 0
    assert pending.closed_size == 0
    receiving.spill()
    assert pending.in_memory == 0
    receiving.take(block((TOP, row(2)), first=False) + commit())
    assert pending.in_progress.size == 0
    assert pending.in_memory == pending.closed_in_memory > 0
    assert pending.closed_size == size + pending.in_memory
    closed = pending.closed_size
    receiving.stage()
    assert pending.in_memory == 0
    assert pending.closed_size == closed
    receiving.cut()
    assert pending.closed_size == 0
    assert receiving.content() == {3000: [row(1), row(2)]}


def test_error_for_a_full_disk_names_the_folder(
    folder: SpillFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Parquet writer's own error does not name the file, so pgcdc adds the folder to the error."""
    place = tmp_path / "log" / SPILL
    (place / "full").symlink_to("/dev/full")
    monkeypatch.setattr("pgcdc_assets.log.spill.draft_name", lambda: "full")
    with pytest.raises(OSError, match="No space left on device") as told:
        spilled(folder, SUB)
    assert told.value.filename == str(place)


# The objects that hold transactions in progress and prepared transactions ---------------------------

AT = Lsn(0x123)


def committed(xid: int) -> StreamCommit:
    return StreamCommit(xid, 0, Lsn(100), Lsn(108), 0)


def test_commit_ends_a_transaction_in_progress() -> None:
    held = TransactionsInProgress()
    assert held.start(StreamStart(7, True), AT, 1.0) is None
    held.add(7, changes=3, size=90, origin="elsewhere")
    held.start(StreamStart(7, False), Lsn(0x999), 5.0)
    held.add(7, changes=2, size=10)
    assert (len(held), held.bytes, held.xids) == (1, 100, [7])
    done = held.end(committed(7), AT)
    assert (done.xid, done.lsn, done.since, done.changes, done.origin) == (7, AT, 1.0, 5, "elsewhere")
    assert (len(held), held.bytes) == (0, 0)
    assert not done.ambiguous


def test_prepare_ends_a_transaction_in_progress() -> None:
    held = TransactionsInProgress()
    held.start(StreamStart(7, True), AT, 1.0)
    assert held.end(StreamPrepare(0, AT, AT, 0, 7, "g"), AT).xid == 7
    assert not held.xids


def test_abort_ends_only_its_subtransaction() -> None:
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
    assert held.end(committed(7), AT).aborted == {8, 9}
    assert held.unknown_aborts == 0


def test_abort_of_a_transaction_without_blocks_is_counted() -> None:
    held = TransactionsInProgress()
    assert held.abort(StreamAbort(7, 8)) is None
    assert held.abort(StreamAbort(7, 7)) is None
    assert held.unknown_aborts == 2
    assert len(held) == 0


def test_transaction_without_its_first_block_is_refused() -> None:
    held = TransactionsInProgress()
    with pytest.raises(ProtocolError, match="the first block of streamed transaction 7 is missing, at LSN 0/123"):
        held.start(StreamStart(7, False), AT, 1.0)
    with pytest.raises(
        ProtocolError, match="the end of streamed transaction 7 arrived without any block of it, at LSN 0/123"
    ):
        held.end(committed(7), AT)


def test_oldest_transaction_in_progress_is_found() -> None:
    held = TransactionsInProgress()
    assert held.oldest is None
    for xid, since in ((9, 2.0), (7, 1.0), (8, 3.0)):
        held.start(StreamStart(xid, True), AT, since)
    assert held.oldest is held[7]
    held.end(committed(7), AT)
    assert held.oldest is held[9]


def test_transaction_with_a_logical_message_before_an_abort_is_ambiguous() -> None:
    """The server does not show whether the logical message belongs to the subtransaction that was rolled back."""
    held = TransactionsInProgress()
    held.start(StreamStart(7, True), AT, 1.0)
    held.abort(StreamAbort(7, 8))
    held.add(7, changes=1, size=10, messages=1)
    assert not held[7].ambiguous
    held.abort(StreamAbort(7, 9))
    assert held[7].ambiguous


def prepared(xid: int, gid: str, end: int) -> PreparedTransaction:
    return PreparedTransaction(PreparedKey(xid, gid, Lsn(end)), 5)


def commit_prepared(xid: int, gid: str, at: int) -> CommitPrepared:
    return CommitPrepared(0, Lsn(at), Lsn(at + 8), 6, xid, gid)


def rollback(xid: int, gid: str, prepared: int) -> RollbackPrepared:
    return RollbackPrepared(0, Lsn(prepared), Lsn(prepared + 1000), 5, 6, xid, gid)


def test_prepared_transaction_ends_with_its_commit_or_rollback() -> None:
    held, first, other = PreparedTransactions(), prepared(7, "g", 100), prepared(8, "h", 200)
    assert held.prepare(first)
    assert held.prepare(other)
    assert held.named(commit_prepared(7, "g", 300)) is first
    assert held.named(rollback(8, "h", 200)) is other
    held.end(first)
    held.end(other)
    assert held.named(commit_prepared(7, "g", 300)) is None
    assert held.named(rollback(8, "h", 200)) is None


def test_repeated_prepare_changes_nothing() -> None:
    """The content of the first PREPARE is kept. The repeated PREPARE has the same content."""
    held, first = PreparedTransactions(), prepared(7, "g", 100)
    assert held.prepare(first)
    assert not held.prepare(prepared(7, "g", 100))
    assert held.named(commit_prepared(7, "g", 300)) is first


def test_late_rollback_or_commit_with_a_reused_gid_does_not_end_the_newer_transaction() -> None:
    """An earlier transaction used the same gid. If its end arrives late, it must not end the newer transaction."""
    held, later = PreparedTransactions(), prepared(17, "g", 500)
    held.prepare(later)
    assert held.named(rollback(7, "g", 100)) is None
    assert held.named(rollback(17, "g", 100)) is None
    assert held.named(commit_prepared(7, "g", 600)) is None
    assert held.named(commit_prepared(17, "g", 600)) is later


def test_commit_prepared_below_a_prepare_belongs_to_an_earlier_transaction() -> None:
    """A later transaction has the same xid and gid, because the xid counter has wrapped around."""
    held, early, late = PreparedTransactions(), prepared(7, "g", 100), prepared(7, "g", 900)
    held.prepare(early)
    held.prepare(late)
    assert held.named(commit_prepared(7, "g", 500)) is early
    held.end(early)
    assert held.named(commit_prepared(7, "g", 950)) is late


def test_commit_or_rollback_prepared_without_a_prepare_finds_no_transaction() -> None:
    held = PreparedTransactions()
    assert held.named(commit_prepared(7, "g", 100)) is None
    assert held.named(rollback(7, "g", 50)) is None


def test_transaction_that_was_prepared_while_an_earlier_receiver_ran_is_found() -> None:
    """The transaction was prepared while another receiver process ran, perhaps days ago."""
    known = prepared(7, "g", 100)
    assert PreparedTransactions([known]).named(commit_prepared(7, "g", 5000)) is known
