"""Batches: the smallest durable pieces of the log. Two threads share the work. The receiving thread owns
:class:`PendingBatch`: the received frames, and the staged segments, which are files that no Delta commit has added to
the log yet. The writing thread owns :class:`BatchWriter`, which writes frames to segments and commits segments to the
log, one job after another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.log.commit import LogWriter
from pgcdc_assets.log.commitfacts import CommitFacts
from pgcdc_assets.log.content import (
    BlockFrames,
    CommittedContent,
    ContentByXid,
    InProgressContent,
    InProgressFrames,
    StagedSegments,
)
from pgcdc_assets.log.framerun import IS_CHANGE, FrameRun, joined
from pgcdc_assets.log.relations import RelationRecord, Relations
from pgcdc_assets.log.rows import ABSENT, Rows, Tally, rows_of
from pgcdc_assets.log.segment import FACTS, SUMMARY, Note, table_of, table_of_notes
from pgcdc_assets.log.spill import PreparedFolder, SpillFolder
from pgcdc_assets.log.summary import summary_of
from pgcdc_assets.log.transactions import OpenTransaction, PreparedKey, PreparedTransaction


@dataclass
class PendingFrames:
    """Frames in memory, and the transaction that was open before the first frame."""

    runs: list[FrameRun] = field(default_factory=list)
    size: int = 0
    """An estimate of memory in bytes: for the frames, and later for the rows that are made from them."""
    opening: OpenTransaction | None = None

    def append(self, run: FrameRun) -> None:
        self.runs.append(run)
        self.size += run.footprint

    def rows(self, relations: Relations) -> Rows:
        """The rows of these frames. Releases the frames, so that memory holds their bytes only once."""
        run = joined(self.runs)
        self.runs.clear()
        return rows_of(run, self.opening, relations)


@dataclass
class PendingBatch:
    """The received content that the writing thread has not been asked to commit yet. Only the writing thread fills and
    reads the :class:`StagedSegments` in it."""

    closed: PendingFrames = field(default_factory=PendingFrames)
    """Frames of complete transactions. Earlier frames of the first of these transactions may be in ``staged``."""
    staged: list[StagedSegments] = field(default_factory=list)
    """Segments of complete transactions."""
    open: PendingFrames = field(default_factory=PendingFrames)
    """Frames of the open transaction, whose Commit has not arrived."""
    spilled: list[StagedSegments] = field(default_factory=list)
    """Segments of the open transaction."""
    since: float | None = None
    """When the first complete transaction arrived; None if there is no complete transaction."""
    staged_size: int = 0
    spilled_size: int = 0
    """``staged_size`` and ``spilled_size``: bytes of the frames that were written to the segments in ``staged`` and in
    ``spilled``."""
    in_progress: ContentByXid = field(default_factory=ContentByXid)
    """Transactions in progress, which the server sends before their commit."""
    committed: list[CommittedContent] = field(default_factory=list)
    """Transactions that were in progress or prepared, and have committed. They are not in ``closed`` or ``staged``."""

    @property
    def in_memory(self) -> int:
        return self.closed_in_memory + self.open.size + self.in_progress.size

    @property
    def closed_in_memory(self) -> int:
        return self.closed.size + sum(content.size for content in self.committed)

    @property
    def closed_size(self) -> int:
        return self.closed_in_memory + self.staged_size

    def receive(self, run: FrameRun, whole: int, after: OpenTransaction | None, now: float) -> None:
        """Adds received frames. The first ``whole`` frames belong to complete transactions; ``after`` is the
        transaction that is open after all frames. A transaction without changes adds nothing to the batch. Its end only
        moves the log's position, as a keepalive does. (PostgreSQL 14 sends transactions of other publications as empty
        transactions.)"""
        if whole:
            self._close(run.part(0, whole), now)
        rest = run.part(whole, len(run))
        if len(rest) and after is not None:
            self.open.append(rest)

    def commit(self, xid: int, facts: CommitFacts, commit: FrameRun, now: float) -> None:
        """Record that a transaction in progress has committed. ``commit``: the transaction's Commit as one frame."""
        content = self.in_progress.pop(xid)
        if content is not None and content.changes:
            self._commit(CommittedContent(content, facts), commit, now)

    def prepare(self, transaction: PreparedTransaction, now: float) -> None:
        """Record that a transaction is prepared. Its content is written to disk before the next batch is committed."""
        self.in_progress.prepare(transaction)
        self.since = now if self.since is None else self.since

    def commit_prepared(
        self, transaction: PreparedTransaction, facts: CommitFacts, commit: FrameRun, now: float
    ) -> None:
        """Record that a prepared transaction has committed. ``commit``: the transaction's Commit as one frame."""
        content = self.in_progress.pop_prepared(transaction.key)
        kept = transaction.key if content is None else None
        content = content or InProgressContent.of(transaction)
        if content.changes or kept:
            self._commit(CommittedContent(content, facts, kept), commit, now)

    def _commit(self, committed: CommittedContent, commit: FrameRun, now: float) -> None:
        content = committed.content
        content.add(BlockFrames(commit, np.full(len(commit), ABSENT, dtype=np.int64)), content.frames.opening.origin)
        self.committed.append(committed)
        self.staged_size += content.spilled_size
        self.since = now if self.since is None else self.since

    def take_closed(self) -> tuple[PendingFrames, list[CommittedContent], list[StagedSegments]]:
        """Remove and return all complete transactions, to commit them as a batch."""
        taken = self.closed, self.committed, self.staged
        self.closed, self.committed, self.staged, self.since, self.staged_size = PendingFrames(), [], [], None, 0
        return taken

    def stage_closed(self) -> tuple[PendingFrames, list[CommittedContent], StagedSegments]:
        """Remove and return the frames of complete transactions, to write them to segments now, before the end of their
        batch is known. The last item of the result is a new, empty entry of ``staged``, to which the writing thread
        adds these segments."""
        self.staged_size += self.closed_in_memory
        frames, committed = self.closed, self.committed
        self.closed, self.committed = PendingFrames(), []
        self.staged.append(StagedSegments())
        return frames, committed, self.staged[-1]

    def spill_open(self, state: OpenTransaction) -> tuple[PendingFrames, StagedSegments]:
        """Remove and return the open transaction's frames, to write them to disk. Also returns a new, empty entry of
        ``spilled``, to which the writing thread adds their segments. ``state``: the state of the transaction after
        these frames."""
        frames, self.open = self.open, PendingFrames(opening=state)
        self.spilled_size += frames.size
        self.spilled.append(StagedSegments())
        return frames, self.spilled[-1]

    def _close(self, run: FrameRun, now: float) -> None:
        if not (self.spilled or any(IS_CHANGE[part.kinds].any() for part in (*self.open.runs, run))):
            self.open = PendingFrames()
            return
        if not self.closed.runs:
            self.closed.opening = self.open.opening
        for earlier in self.open.runs:
            self.closed.append(earlier)
        self.closed.append(run)
        self.staged += self.spilled
        self.staged_size += self.spilled_size
        self.open, self.spilled, self.spilled_size = PendingFrames(), [], 0
        self.since = now if self.since is None else self.since


@dataclass(frozen=True)
class Committed:
    """A durable Delta commit to the log. A commit that only moves the log's position has no rows."""

    start: Lsn
    end: Lsn
    transactions: int = 0
    rows: int = 0
    bytes: int = 0


class BatchWriter:
    """Writes segments and Delta commits, in the order of the calls. All calls come from one thread."""

    def __init__(
        self, path: Location, identity: Identity, timeline: int, relations: Relations, leader: int | None = None
    ) -> None:
        """``leader``: see :class:`LogWriter`."""
        self._log = LogWriter(path, identity, leader)
        self._prepared = PreparedFolder(path)
        self._spill = SpillFolder(path, self._prepared)
        self._spill.clear()
        self._timeline = timeline
        self._relations = relations
        self.position = self._log.position

    def stage(self, frames: PendingFrames, into: StagedSegments, committed: Sequence[CommittedContent] = ()) -> None:
        """Write frames as segments that a later Delta commit adds to the log."""
        for rows in self._in_memory(frames, committed, into):
            into.add(self._spill.stage(rows))
        passed(FaultPoint.SEGMENT_STAGED)

    def spill(self, frames: InProgressFrames, content: InProgressContent) -> None:
        """Write frames of a transaction in progress as segments under ``_spill/``."""
        content.spilled += self._spill.spill(frames.rows(content.overlay))
        passed(FaultPoint.STREAM_SPILLED)

    def drop(self, content: InProgressContent) -> None:
        """Delete the segments of a transaction in progress that is not added to the log: it was rolled back, is already
        in the log, or ends past the LSN at which the receiver stops."""
        for spilled in content.spilled:
            spilled.segment.draft.discard()
        passed(FaultPoint.STREAM_DROPPED)

    def keep(self, transaction: PreparedTransaction, content: InProgressContent) -> None:
        """Write the content of a prepared transaction to disk, where it stays until the transaction ends. The content
        is durable when this returns."""
        segments = [*content.spilled, *self._spill.spill(content.take().rows(content.overlay))]
        aborted = tuple(sorted(transaction.aborted))
        counted = sum(segment.counted(aborted) for segment in segments)
        self._prepared.keep(replace(transaction, counted=counted), segments)
        passed(FaultPoint.PREPARED_KEPT)

    def forget(self, key: PreparedKey) -> None:
        """Delete the stored content of a prepared transaction that was rolled back, or is already in the log."""
        self._prepared.drop([key])

    def commit(
        self,
        closed: PendingFrames,
        parts: Sequence[StagedSegments],
        end: Lsn,
        committed: Sequence[CommittedContent] = (),
    ) -> Committed:  # fmt: skip
        """Commit one batch to the log: the segments in ``parts``, the frames in ``closed``, the transactions in
        ``committed``, and the notes that a reader of the batch needs (summary, Relation messages, catalog facts)."""
        staged = StagedSegments()
        for part in parts:
            staged.add(part)
        tables: list[pa.Table] = []
        for rows in self._in_memory(closed, committed, staged):
            part, rest = self._spill.stage_large(rows)
            staged.add(part)
            tables.append(table_of(rest))
        start, tally = self.position, staged.tally
        if not tally.rows:
            self._move(end, staged)
            return Committed(start, end)
        notes = table_of_notes(self._notes(start, end, tally))
        # The notes come first, in their own row group, so that they can be read without the rows.
        staged.files.append((self._spill.write([notes, *tables]), None))
        passed(FaultPoint.SEGMENT_WRITTEN)
        self._move(end, staged)
        return Committed(start, end, tally.transactions, tally.rows, tally.bytes)

    def _in_memory(
        self, frames: PendingFrames, committed: Sequence[CommittedContent], staged: StagedSegments
    ) -> Iterator[Rows]:
        """Yields the rows of the frames in memory. Adds the segments of ``committed`` to ``staged``."""
        yield frames.rows(self._relations)
        for content in committed:
            part, rows = self._spill.committed(content)
            staged.add(part)
            yield rows

    def advance(self, end: Lsn) -> Committed:
        """Move only the log's position to ``end``, because the WAL up to ``end`` contains nothing for the log."""
        start = self.position
        self._move(end, StagedSegments())
        return Committed(start, end)

    def drop_spill(self) -> None:
        """Delete the segments of transactions that have not committed. On the next connection, the server sends these
        transactions again from their start."""
        self._spill.clear()

    def _move(self, end: Lsn, staged: StagedSegments) -> None:
        files = self._spill.move(staged, end)
        self._prepared.committing(staged.kept)
        passed(FaultPoint.SEGMENTS_MOVED)
        self._log.commit(self.position, end, self._timeline, files)
        self.position = end
        self._prepared.drop(staged.kept)

    def _notes(self, start: Lsn, end: Lsn, tally: Tally) -> list[Note]:
        records = [self._relations.record(schema_id) for schema_id in sorted(tally.schema_ids)]
        summary = summary_of(start, end, self._timeline, tally, records)
        return [Note(SUMMARY, _json(summary)), *_relation_notes(records)]


def _relation_notes(records: Iterable[RelationRecord]) -> Iterable[Note]:
    types: dict[bytes, None] = {}
    for record in records:
        yield Note("R", record.payload, record.relation_id, record.schema_id)
        yield Note(FACTS, _json(record.facts.to_json()), record.relation_id, record.schema_id)
        types.update(dict.fromkeys(record.types))
    for payload in types:
        yield Note("Y", payload)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
