"""The content of transactions in progress: frames in memory, and segments under ``_spill/`` until the commit.

Two threads share this content, as they share a batch. The receiving thread fills the frames. Only the writing thread
fills and reads ``spooled``. A segment is written once. At the commit it moves into the log unchanged, and the facts
that were not known before are stored next to it (:class:`LateFacts`). Frames that are still in memory at the commit
become ordinary rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pgcdc_assets.core.arrays import Ints
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.log.framerun import IS_CHANGE, FrameRun, joined
from pgcdc_assets.log.latefacts import SUBXID, LateFacts
from pgcdc_assets.log.prepared import PreparedKey, PreparedTransaction
from pgcdc_assets.log.relations import Overlay
from pgcdc_assets.log.rows import ABSENT, Rows, Tally, rows_in_progress, tally_of_table
from pgcdc_assets.log.segment import StagedSegment
from pgcdc_assets.log.transactions import OpenBlock
from pgcdc_assets.store.scratch import DraftFile

_COUNTED = ["relation_id", "kind", "schema_id", "payload", SUBXID]


@dataclass
class Staged:
    """Written segments that no commit names yet, and the tally of their rows."""

    files: list[tuple[StagedSegment, LateFacts | None]] = field(default_factory=list)
    """Each segment, with its late facts if it was written while its transaction was in progress."""
    tally: Tally = field(default_factory=Tally)
    kept: dict[PreparedKey, int] = field(default_factory=dict)
    """Prepared transactions whose kept content is in these segments, each with its ``commit_lsn``."""

    def add(self, other: Staged) -> None:
        self.files += other.files
        self.tally.add(other.tally)
        self.kept |= other.kept


@dataclass(frozen=True)
class SpooledSegment:
    """A segment of a transaction in progress, and the tally of its rows, rows that were rolled back included."""

    segment: StagedSegment
    tally: Tally
    """The schema ids in it are provisional."""
    lowest: int
    highest: int
    """``lowest`` and ``highest``: the bounds of the subtransactions in its rows."""

    def to_json(self) -> dict[str, Any]:
        """A form that another process reads with :meth:`of_json`."""
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
        return cls(StagedSegment(draft, report), tally, given["lowest"], given["highest"])

    def counted(self, aborted: Ints) -> int:
        """How many of its rows count if the subtransactions ``aborted`` (sorted) were rolled back."""
        gone = _within(aborted, self.lowest, self.highest)
        if not len(gone):
            return self.segment.report.rows
        subxid = pq.read_table(self.segment.draft.path, columns=[SUBXID])[SUBXID].to_numpy()
        return int((~np.isin(subxid, gone)).sum())

    def at(self, end: StreamEnd) -> Staged | None:
        """The segment as part of the log, after the transaction committed. None if no row of it counts."""
        schema_ids = {provisional: end.schema_ids[provisional] for provisional in sorted(self.tally.schema_ids)}
        aborted = _within(end.aborted, self.lowest, self.highest)
        if not len(aborted):
            late = LateFacts(end.commit_lsn, end.commit_ts, (), schema_ids)
            return Staged([(self.segment, late)], replace(self.tally, schema_ids=set(schema_ids.values())))
        table = pq.read_table(self.segment.draft.path, columns=_COUNTED)
        aborted = aborted[np.isin(aborted, table[SUBXID].to_numpy())]
        late = LateFacts(end.commit_lsn, end.commit_ts, tuple(aborted.tolist()), schema_ids)
        tally = tally_of_table(late.fill(table), self.tally.partitions)
        return Staged([(self.segment, late)], tally) if tally.rows else None


def _within(aborted: Ints, lowest: int, highest: int) -> Ints:
    first, last = np.searchsorted(aborted, (lowest, highest + 1))
    return aborted[first:last]


@dataclass(frozen=True)
class StreamEnd:
    """The facts of a transaction that are known at its commit."""

    commit_lsn: int
    commit_ts: int
    """Microseconds since 1970."""
    aborted: Ints
    """The subtransactions that were rolled back, sorted."""
    schema_ids: Mapping[int, int]
    """Maps provisional ids to the ids of the log."""

    def rows(self, rows: Rows) -> Rows:
        """Turns rows in progress into rows of the log: keeps the rows that count, and fills in the facts of the
        commit."""
        assert rows.subxid is not None
        kept = rows.take(np.flatnonzero(~np.isin(rows.subxid, self.aborted)))
        number = len(kept)
        schema_id = kept.schema_id.copy()
        known = np.flatnonzero(kept.relation_id != ABSENT)
        if len(known):
            final = np.array([self.schema_ids[provisional] for provisional in range(len(self.schema_ids))], np.int64)
            schema_id[known] = final[schema_id[known]]
        return replace(
            kept,
            commit_lsn=np.full(number, self.commit_lsn, dtype=np.int64),
            commit_ts=np.full(number, self.commit_ts, dtype=np.int64),
            schema_id=schema_id,
            subxid=None,
        )


@dataclass(frozen=True)
class BlockFrames:
    """Frames of one transaction's blocks, in the form of protocol version 1, and the subtransaction of each frame."""

    run: FrameRun
    subxid: Ints


@dataclass
class PendingBlocks:
    """The frames of a transaction in progress that are in memory."""

    opening: OpenBlock
    blocks: list[BlockFrames] = field(default_factory=list)
    size: int = 0
    """Bytes that the frames take, or will take as rows."""

    def rows(self, overlay: Overlay) -> Rows:
        """The rows that these frames put into the log. Releases the frames, so that their bytes exist only once."""
        run = joined([block.run for block in self.blocks])
        subxid = np.concatenate([block.subxid for block in self.blocks if len(block.run)] or [_NONE])
        self.blocks.clear()
        return rows_in_progress(run, subxid, self.opening, overlay)


_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass
class PendingStream:
    """The received part of one transaction in progress."""

    pending: PendingBlocks
    overlay: Overlay
    changes: int = 0
    """Number of changes received, changes that were rolled back included."""
    spooled: list[SpooledSegment] = field(default_factory=list)
    spooled_size: int = 0
    """Bytes of the frames that went into these segments."""

    @classmethod
    def of(cls, transaction: PreparedTransaction) -> Self:
        """A prepared transaction without its content, which was kept at its PREPARE."""
        opening = OpenBlock(transaction.key.xid, transaction.changes, transaction.origin)
        return cls(PendingBlocks(opening), transaction.overlay, transaction.changes, spooled_size=transaction.bytes)

    def add(self, frames: BlockFrames, origin: str | None) -> None:
        """Add the next frames. ``origin`` is the transaction's origin, which the server sends before the first
        change."""
        pending = self.pending
        if not self.changes:
            pending.opening = replace(pending.opening, origin=origin)
        pending.blocks.append(frames)
        pending.size += frames.run.footprint
        self.changes += int(IS_CHANGE[frames.run.kinds].sum())

    def take(self) -> PendingBlocks:
        """Hand over the frames in memory, to be spooled."""
        taken = self.pending
        self.pending = PendingBlocks(replace(taken.opening, ordinal=self.changes))
        self.spooled_size += taken.size
        return taken


@dataclass(frozen=True)
class EndedStream:
    """A transaction that has committed, and may still have frames in memory."""

    stream: PendingStream
    end: StreamEnd
    kept: PreparedKey | None = None
    """Set if the lake has kept its segments since its PREPARE."""

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self.stream.pending.size


class PendingStreams:
    """The transactions in progress, by xid, and the transactions that are prepared but not kept yet."""

    def __init__(self) -> None:
        self._open: dict[int, PendingStream] = {}
        self._prepared: dict[PreparedKey, tuple[PreparedTransaction, PendingStream]] = {}

    @property
    def size(self) -> int:
        """Bytes of all frames in memory."""
        return sum(stream.pending.size for stream in self._all())

    def add(self, xid: int, overlay: Overlay, frames: BlockFrames, origin: str | None) -> None:
        stream = self._open.get(xid)
        if stream is None:
            stream = self._open[xid] = PendingStream(PendingBlocks(OpenBlock(xid)), overlay)
        stream.add(frames, origin)

    def pop(self, xid: int) -> PendingStream | None:
        """Remove a transaction that is no longer in progress. None if it has no frames here."""
        return self._open.pop(xid, None)

    def prepare(self, transaction: PreparedTransaction) -> None:
        """The transaction is prepared. It is now stored by its key, because its xid may come again."""
        stream = self._open.pop(transaction.key.xid, None) or PendingStream.of(transaction)
        self._prepared[transaction.key] = transaction, stream

    def take_prepared(self) -> list[tuple[PreparedTransaction, PendingStream]]:
        """Hand over the prepared transactions, to be kept."""
        taken, self._prepared = list(self._prepared.values()), {}
        return taken

    def pop_prepared(self, key: PreparedKey) -> PendingStream | None:
        """Remove a prepared transaction that has ended. None if it was already handed over."""
        _, stream = self._prepared.pop(key, (None, None))
        return stream

    @property
    def largest(self) -> PendingStream:
        """The transaction with the most bytes in memory."""
        return max(self._all(), key=lambda stream: stream.pending.size)

    def _all(self) -> Iterator[PendingStream]:
        yield from self._open.values()
        yield from (stream for _, stream in self._prepared.values())
