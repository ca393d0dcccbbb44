"""The content of transactions in progress: frames in memory, and segments under ``_spill/`` until the transaction
commits. The receiving thread adds the frames. Only the writing thread fills and reads ``spilled``. A segment is written
once. After the transaction's commit, the segment moves into the log unchanged, and the facts that its rows lack
(:class:`CommitFacts`) are stored with the file. Frames that are in memory at the commit become complete rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Ints
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.log.commitfacts import SUBXID, CommitFacts, between
from pgcdc_assets.log.framerun import IS_CHANGE, FrameRun, joined
from pgcdc_assets.log.relations import Overlay
from pgcdc_assets.log.rows import Rows, Tally, rows_in_progress, tally_of_table
from pgcdc_assets.log.segment import SegmentDraft
from pgcdc_assets.log.transactions import OpenBlock, PreparedKey, PreparedTransaction
from pgcdc_assets.store.scratch import DraftFile

_COUNTED: Final = ["relation_id", "kind", "schema_id", "payload", SUBXID]


@dataclass
class StagedSegments:
    """Written segments that are not in the Delta table yet, and the tally of their rows."""

    files: list[tuple[SegmentDraft, CommitFacts | None]] = field(default_factory=list)
    """Each segment. It has :class:`CommitFacts` if its transaction was in progress when the segment was written."""
    tally: Tally = field(default_factory=Tally)
    kept: dict[PreparedKey, int] = field(default_factory=dict)
    """The prepared transactions whose content was stored under ``_prepared/`` and is now in these segments, each with
    its ``commit_lsn``."""

    def add(self, other: StagedSegments) -> None:
        self.files += other.files
        self.tally.add(other.tally)
        self.kept |= other.kept


@dataclass(frozen=True)
class SpilledSegment:
    """A segment of a transaction in progress, and the tally of all its rows, including rows that were rolled back."""

    segment: SegmentDraft
    tally: Tally
    """Its schema ids are the provisional ids of the transaction's :class:`Overlay`."""
    lowest: int
    highest: int
    """``lowest`` and ``highest``: the lowest and the highest ``subxid`` of the rows."""

    def to_json(self) -> dict[str, Any]:
        """The segment as JSON for a manifest. :meth:`of_json` reads it, perhaps in another process."""
        report, tally = self.segment.report, self.tally
        return {
            "file": report.path, "size": report.size, "rows": report.rows, "stats": report.stats,
            "counts": [[relation, kind, number] for (relation, kind), number in tally.counts.items()],
            "schema_ids": sorted(tally.schema_ids), "partitions": sorted(tally.partitions), "bytes": tally.bytes,
            "lowest": self.lowest, "highest": self.highest,
        }  # fmt: skip

    @classmethod
    def of_json(cls, given: Mapping[str, Any], draft: DraftFile) -> Self:
        """Reads the form of :meth:`to_json`. ``draft`` is the segment's file."""
        tally = Tally(
            counts=Counter({(relation, kind): number for relation, kind, number in given["counts"]}),
            schema_ids=set(given["schema_ids"]),
            partitions={(root, leaf) for root, leaf in given["partitions"]},
            bytes=given["bytes"],
        )
        report = FileReport(given["file"], given["size"], given["rows"], given["stats"])
        return cls(SegmentDraft(draft, report), tally, int(given["lowest"]), int(given["highest"]))

    def counted(self, aborted: tuple[int, ...]) -> int:
        """The number of the segment's rows without the rows of aborted subtransactions. ``aborted``: their xids,
        ascending."""
        gone = between(aborted, self.lowest, self.highest)
        if not gone:
            return self.segment.report.rows
        subxid = pq.read_table(self.segment.draft.path, columns=[SUBXID])[SUBXID].to_numpy()
        return int((~np.isin(subxid, np.array(gone))).sum())

    def at(self, commit: CommitFacts) -> StagedSegments | None:
        """The segment with the commit facts that it needs in the log; None if all its rows were rolled back."""
        schema_ids = {provisional: commit.schema_ids[provisional] for provisional in sorted(self.tally.schema_ids)}
        facts = replace(commit.within(self.lowest, self.highest), schema_ids=schema_ids)
        if not facts.aborted:
            return StagedSegments([(self.segment, facts)], replace(self.tally, schema_ids=set(schema_ids.values())))
        table = pq.read_table(self.segment.draft.path, columns=_COUNTED)
        aborted = np.array(facts.aborted, dtype=np.int64)
        facts = replace(facts, aborted=tuple(aborted[np.isin(aborted, table[SUBXID].to_numpy())].tolist()))
        tally = tally_of_table(facts.fill(table), self.tally.partitions)
        return StagedSegments([(self.segment, facts)], tally) if tally.rows else None


@dataclass(frozen=True)
class BlockFrames:
    """Frames of one transaction's blocks, in the form of protocol version 1, and each frame's subtransaction."""

    run: FrameRun
    subxid: Ints


@dataclass
class InProgressFrames:
    """The frames of a transaction in progress that are in memory."""

    opening: OpenBlock
    """The state of the transaction before these frames."""
    blocks: list[BlockFrames] = field(default_factory=list)
    size: int = 0
    """An estimate of memory in bytes: for the frames, and later for the rows that are made from them."""

    def rows(self, overlay: Overlay) -> Rows:
        """The rows of these frames. Releases the frames, so that memory holds their bytes only once."""
        run = joined([block.run for block in self.blocks])
        subxid = np.concatenate([block.subxid for block in self.blocks if len(block.run)] or [_NONE])
        self.blocks.clear()
        return rows_in_progress(run, subxid, self.opening, overlay)


_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass
class InProgressContent:
    """The received part of one transaction in progress."""

    frames: InProgressFrames
    overlay: Overlay
    changes: int = 0
    """Number of changes received, including changes that were rolled back."""
    spilled: list[SpilledSegment] = field(default_factory=list)
    spilled_size: int = 0
    """Bytes of the frames that were written to the segments in ``spilled``."""

    @classmethod
    def of(cls, transaction: PreparedTransaction) -> Self:
        """The content of a prepared transaction. No frames are in memory, because all of them were stored on disk after
        the PREPARE."""
        opening = OpenBlock(transaction.key.xid, transaction.changes, transaction.origin)
        return cls(InProgressFrames(opening), transaction.overlay, transaction.changes, spilled_size=transaction.bytes)

    def add(self, block: BlockFrames, origin: str | None) -> None:
        """Add the next frames. ``origin``: the transaction's replication origin, which the server sends before the
        first change."""
        if not self.changes:
            self.frames.opening = replace(self.frames.opening, origin=origin)
        self.frames.blocks.append(block)
        self.frames.size += block.run.footprint
        self.changes += int(IS_CHANGE[block.run.kinds].sum())

    def take(self) -> InProgressFrames:
        """Remove and return the frames in memory, to write them to disk."""
        taken = self.frames
        self.frames = InProgressFrames(replace(taken.opening, ordinal=self.changes))
        self.spilled_size += taken.size
        return taken


@dataclass(frozen=True)
class CommittedContent:
    """A transaction that has committed, and may still have frames in memory."""

    content: InProgressContent
    facts: CommitFacts
    kept: PreparedKey | None = None
    """The key of a prepared transaction whose segments were stored under ``_prepared/``; otherwise None."""

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self.content.frames.size


class ContentByXid:
    """The transactions in progress, by xid, and the prepared transactions that are not stored on disk yet."""

    def __init__(self) -> None:
        self._open: dict[int, InProgressContent] = {}
        self._prepared: dict[PreparedKey, tuple[PreparedTransaction, InProgressContent]] = {}

    @property
    def size(self) -> int:
        """Bytes of all frames in memory."""
        return sum(content.frames.size for content in self._all())

    def add(self, xid: int, overlay: Overlay, block: BlockFrames, origin: str | None) -> None:
        content = self._open.get(xid)
        if content is None:
            content = self._open[xid] = InProgressContent(InProgressFrames(OpenBlock(xid)), overlay)
        content.add(block, origin)

    def pop(self, xid: int) -> InProgressContent | None:
        """Remove and return a transaction that is no longer in progress. None if no frames of it were added."""
        return self._open.pop(xid, None)

    def prepare(self, transaction: PreparedTransaction) -> None:
        """Record that a transaction is prepared. It is found by its :class:`PreparedKey` after this, because another
        transaction may get the same xid."""
        content = self._open.pop(transaction.key.xid, None) or InProgressContent.of(transaction)
        self._prepared[transaction.key] = transaction, content

    def take_prepared(self) -> list[tuple[PreparedTransaction, InProgressContent]]:
        """Remove and return the prepared transactions, to store them on disk."""
        taken, self._prepared = list(self._prepared.values()), {}
        return taken

    def pop_prepared(self, key: PreparedKey) -> InProgressContent | None:
        """Remove and return a prepared transaction that has ended. None if :meth:`take_prepared` has already returned
        it."""
        _, content = self._prepared.pop(key, (None, None))
        return content

    @property
    def largest(self) -> InProgressContent:
        """The transaction with the most bytes in memory."""
        return max(self._all(), key=lambda content: content.frames.size)

    def _all(self) -> Iterator[InProgressContent]:
        yield from self._open.values()
        yield from (content for _, content in self._prepared.values())
