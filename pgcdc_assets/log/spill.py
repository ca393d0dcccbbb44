"""Content of open transactions on disk, next to the log's files.

``_spill/``: segments that are written before their batch is committed to the log. They move into the table with the
batch. VACUUM ignores names that begin with ``_``, so it does not delete segments of a transaction that stays open for
longer than VACUUM's retention. At each connect, the receiver deletes all files in this folder, because the server sends
open transactions again from their start.

``_prepared/``: the content of prepared transactions from PREPARE to COMMIT PREPARED, which the server does not send
again. Each transaction has a manifest, which names its segments. At the COMMIT PREPARED the segments are copied into
the log (as hard links, if the store has links). They are not moved, because they are needed again if the Delta commit
fails: the server then sends the COMMIT PREPARED again. If the Delta commit succeeds, and the process is killed before
it has deleted the files here, the COMMIT PREPARED is not sent again. So before the Delta commit, a file next to the
manifest (the mark) records the transaction's ``commit_lsn``. At the next start, if the log's position is above this
LSN, the log contains the transaction, and the files here are deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.formats import MALFORMED, reading
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.errors import LogCorrupt, ProtocolError
from pgcdc_assets.log.commitfacts import CommitFacts
from pgcdc_assets.log.content import CommittedContent, SpilledSegment, StagedSegments
from pgcdc_assets.log.framerun import IS_CHANGE
from pgcdc_assets.log.relations import Overlay
from pgcdc_assets.log.rows import Rows, tally_of
from pgcdc_assets.log.segment import SegmentDraft, check_content, clustered, draft_name, table_of, write_segment
from pgcdc_assets.log.transactions import PreparedKey, PreparedTransaction
from pgcdc_assets.source.connect.failures import COPY_ANEW
from pgcdc_assets.store import storage
from pgcdc_assets.store.scratch import DraftFile, Scratch

SPILL: Final = "_spill"
_PUT_AT_A_TIME: Final = 4
"""How many segments are sent to the store in parallel. Each of them is in memory."""
PREPARED: Final = "_prepared"
_MANIFEST: Final = ".json"
_COMMITTING: Final = ".committing"
"""``_MANIFEST`` and ``_COMMITTING``: the file name suffixes of the manifest and of the mark."""


class SpillFolder:
    """``_spill/`` in the log's folder, or a local folder if the log is on an object store. Used only by the writing
    thread."""

    def __init__(self, table: Location, prepared: PreparedFolder) -> None:
        self._table = table
        self._prepared = prepared
        self._drafts = storage.scratch(table / SPILL)

    def clear(self) -> None:
        self._drafts.clear()

    def write(self, groups: Sequence[pa.Table]) -> SegmentDraft:
        """Write a segment with a row group for each table."""
        with self._drafts.named():
            return write_segment(self._drafts.draft(draft_name()), groups)

    def stage(self, rows: Rows) -> StagedSegments:
        """Write rows of complete transactions to segments, clustered by relation (:func:`clustered`)."""
        staged, rest = self.stage_large(rows)
        if len(rest):
            staged.files.append((self.write([table_of(rest)]), None))
        return staged

    def stage_large(self, rows: Rows) -> tuple[StagedSegments, Rows]:
        """Write the rows of each large relation to a separate file, and return the other rows. The returned tally
        counts all rows."""
        alone, rest = clustered(rows)
        return StagedSegments([(self.write([table_of(part)]), None) for part in alone], tally_of(rows)), rest

    def spill(self, rows: Rows) -> list[SpilledSegment]:
        """Write rows of a transaction in progress to segments, clustered by relation (:func:`clustered`)."""
        alone, rest = clustered(rows)
        return [self._spilled(part) for part in (*alone, rest) if len(part)]

    def _spilled(self, rows: Rows) -> SpilledSegment:
        assert rows.subxid is not None
        segment = self.write([table_of(rows)])
        return SpilledSegment(segment, tally_of(rows), int(rows.subxid.min()), int(rows.subxid.max()))

    def committed(self, committed: CommittedContent) -> tuple[StagedSegments, Rows]:
        """Returns a committed transaction without its aborted subtransactions: the segments that still contain rows,
        and the rows that are in memory."""
        staged, content, facts = StagedSegments(), committed.content, committed.facts
        segments = content.spilled
        if committed.kept is not None:
            staged.kept[committed.kept] = facts.commit_lsn
            segments = self._prepared.taken(committed.kept, self._drafts)
        for spilled in segments:
            if (counted := spilled.at(facts)) is None:
                spilled.segment.draft.discard()
            else:
                staged.add(counted)
        rows = facts.fill_rows(content.frames.rows(content.overlay))
        if not staged.files and not IS_CHANGE[rows.kind].any():
            rows = rows.take(np.zeros(0, dtype=np.int64))
        return staged, rows

    def move(self, staged: StagedSegments, batch_end: Lsn) -> list[FileReport]:
        """Move the segments of the batch that ends at ``batch_end`` into the table, unchanged."""
        calls = [partial(file.put, self._table, batch_end, batch_end, facts) for file, facts in staged.files]
        begins = range(0, len(calls), _PUT_AT_A_TIME)
        return [put for begin in begins for put in storage.together(self._table, calls[begin : begin + _PUT_AT_A_TIME])]


class PreparedFolder:
    """``_prepared/`` in the folder of one log. Only the receiver writes to it; other processes may call
    :meth:`pending`."""

    def __init__(self, log: Location) -> None:
        self._folder = log / PREPARED

    def keep(self, transaction: PreparedTransaction, segments: Sequence[SpilledSegment]) -> None:
        """Store a prepared transaction, whose content is in these segments. Manifest and segments are durable when this
        returns."""
        for spilled in segments:
            storage.put(spilled.segment.draft, self._folder / spilled.segment.report.path)
        if segments:
            storage.settle([self._folder])
        content = _content(transaction, [spilled.to_json() for spilled in segments])
        storage.replace(self._place(transaction.key, _MANIFEST), json.dumps(content).encode())
        storage.settle([self._folder.parent])

    def recover(self, position: Lsn) -> list[PreparedTransaction]:
        """Returns the stored transactions whose COMMIT or ROLLBACK PREPARED has not arrived, and deletes all other
        files. ``position``: the log's position. Transactions prepared above ``position`` are sent again. Transactions
        that committed below ``position`` are in the log."""
        found: list[PreparedTransaction] = []
        names = {entry.name for entry in storage.list_after(self._folder)}
        kept: set[str] = set()
        for name in sorted(name for name in names if name.endswith(_MANIFEST)):
            content = _read(self._folder / name)
            transaction = _transaction(content)
            mark = self._place(transaction.key, _COMMITTING)
            with reading(mark, LogCorrupt, COPY_ANEW):
                commits = int(storage.read(mark)) if mark.name in names else position
            if transaction.key.end_lsn <= position <= commits:
                found.append(transaction)
                kept |= {name, *(segment["file"] for segment in content["segments"])}
        storage.delete(self._folder / name for name in sorted(names - kept))
        return found

    def clear(self) -> None:
        """Delete everything. Called if two_phase is off: the server then sends the content at COMMIT PREPARED."""
        storage.delete(self._folder / entry.name for entry in storage.list_after(self._folder))

    def pending(self) -> list[PreparedTransaction]:
        """The prepared transactions whose content is stored here. May include a transaction that has just ended."""
        names = [entry.name for entry in storage.list_after(self._folder) if entry.name.endswith(_MANIFEST)]
        found: list[PreparedTransaction] = []
        for name in names:
            with suppress(FileNotFoundError):
                found.append(_transaction(_read(self._folder / name)))
        return found

    def taken(self, key: PreparedKey, into: Scratch) -> list[SpilledSegment]:
        """Copies the segments of a transaction, whose commit has arrived, as drafts into ``into``. Raises LogCorrupt
        if a file is missing or damaged."""
        segments: list[SpilledSegment] = []
        manifest = self._place(key, _MANIFEST)
        if not storage.exists(manifest):
            raise LogCorrupt("is missing", thing=str(manifest), do=COPY_ANEW)
        for given in _read(manifest)["segments"]:
            place, draft = self._folder / given["file"], into.draft(draft_name())
            check_content(place)
            storage.copy(place, Location(draft.path))
            segments.append(SpilledSegment.of_json(given, draft))
        return segments

    def committing(self, commits: Mapping[PreparedKey, int]) -> None:
        """Called before a Delta commit adds these transactions to the log. Writes a file with its ``commit_lsn`` for
        each of them."""
        for key, commit_lsn in commits.items():
            storage.replace(self._place(key, _COMMITTING), str(int(commit_lsn)).encode())
            passed(FaultPoint.PREPARED_COMMITTING)

    def drop(self, keys: Iterable[PreparedKey]) -> None:
        """Delete transactions that are in the log or were rolled back. Deletes each manifest first, and makes its
        deletion durable. Otherwise the manifest could exist again after a power cut, and the server would never send
        the end of the transaction again."""
        for key in keys:
            manifest = self._place(key, _MANIFEST)
            segments = _read(manifest)["segments"] if storage.exists(manifest) else ()
            storage.delete([manifest])
            storage.settle([self._folder])
            passed(FaultPoint.PREPARED_DROPPED)
            storage.delete([*(self._folder / given["file"] for given in segments), self._place(key, _COMMITTING)])

    def _place(self, key: PreparedKey, kind: str) -> Location:
        # ``end_lsn`` distinguishes transactions with the same xid. The gid is not used: it may contain any character.
        return self._folder / f"{key.xid}-{int(key.end_lsn):016x}{kind}"


def _read(place: Location) -> dict[str, Any]:
    """Reads a manifest. Raises LogCorrupt if it is damaged."""
    content = storage.read(place)
    try:
        found: dict[str, Any] = json.loads(content)
        relations = range(len(_transaction(found).overlay.payloads))
        committed = CommitFacts(0, 0, schema_ids={number: number for number in relations})
        for given in found["segments"]:
            SpilledSegment.of_json(given, DraftFile(given["file"])).at(committed)
    except (ProtocolError, AssertionError, *MALFORMED):
        raise LogCorrupt("cannot be read", thing=str(place), do=COPY_ANEW) from None
    return found


def _content(transaction: PreparedTransaction, segments: list[dict[str, Any]]) -> dict[str, Any]:
    overlay = transaction.overlay
    return {
        "xid": transaction.key.xid, "gid": transaction.key.gid, "end_lsn": int(transaction.key.end_lsn),
        "prepare_ts": transaction.prepare_ts, "aborted": sorted(transaction.aborted),
        "changes": transaction.changes, "bytes": transaction.bytes, "origin": transaction.origin,
        "counted": transaction.counted,
        "relations": [payload.hex() for payload in overlay.payloads], "types": [one.hex() for one in overlay.types],
        "segments": segments,
    }  # fmt: skip


def _transaction(given: Mapping[str, Any]) -> PreparedTransaction:
    overlay = Overlay.of(map(bytes.fromhex, given["relations"]), map(bytes.fromhex, given["types"]))
    return PreparedTransaction(
        PreparedKey(given["xid"], given["gid"], Lsn(given["end_lsn"])), given["prepare_ts"],
        frozenset(given["aborted"]), overlay, given["changes"], given["bytes"], given["origin"],
        given["counted"],
    )  # fmt: skip
