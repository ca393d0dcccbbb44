"""Content of open transactions on disk, next to the log's files.

``_spill/``: segments that are not in the table, until their batch is cut and the segments move into the table. VACUUM
ignores names that begin with ``_``, so a transaction may stay open for longer than VACUUM's retention. These files are
deleted at each connect, because the server sends the transactions again from the start.

``_prepared/``: the content of prepared transactions from PREPARE to COMMIT PREPARED, which the server does not send
again. Each transaction has a manifest, which names its segments. At the COMMIT PREPARED the segments are copied into
the log (as hard links, if the store has links), not moved: if the log's commit is lost, the COMMIT PREPARED comes again
and needs the segments. If the log's commit succeeds, the COMMIT PREPARED never comes again, because the stream begins
where the log ends. So a mark next to the manifest records the ``commit_lsn`` before the log's commit. A log above this
LSN holds the content.
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
"""How many segments are sent in parallel, each held in memory."""
PREPARED: Final = "_prepared"
_MANIFEST: Final = ".json"
_COMMITTING: Final = ".committing"
"""``_MANIFEST`` and ``_COMMITTING``: how the file names of the manifest and of the mark end."""


class SpillFolder:
    """``_spill/`` in the log's folder, or a local folder if the log is not on this machine. For the writing thread."""

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
        """Write rows, clustered by relation."""
        staged, rest = self.stage_large(rows)
        if len(rest):
            staged.files.append((self.write([table_of(rest)]), None))
        return staged

    def stage_large(self, rows: Rows) -> tuple[StagedSegments, Rows]:
        """Write the relations that get their own file, and return the other rows. The tally counts all rows."""
        alone, rest = clustered(rows)
        return StagedSegments([(self.write([table_of(part)]), None) for part in alone], tally_of(rows)), rest

    def spill(self, rows: Rows) -> list[SpilledSegment]:
        """Write rows of a transaction in progress, clustered by relation."""
        alone, rest = clustered(rows)
        return [self._spilled(part) for part in (*alone, rest) if len(part)]

    def _spilled(self, rows: Rows) -> SpilledSegment:
        assert rows.subxid is not None
        segment = self.write([table_of(rows)])
        return SpilledSegment(segment, tally_of(rows), int(rows.subxid.min()), int(rows.subxid.max()))

    def committed(self, committed: CommittedContent) -> tuple[StagedSegments, Rows]:
        """The part of a committed transaction that counts: segments with such rows, and the rows in memory."""
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
    """The folder of one log. Only the receiver writes; other processes may call :meth:`pending`."""

    def __init__(self, log: Location) -> None:
        self._folder = log / PREPARED

    def keep(self, transaction: PreparedTransaction, segments: Sequence[SpilledSegment]) -> None:
        """Keep a transaction whose content is in these segments. Durable when this returns."""
        for spilled in segments:
            storage.put(spilled.segment.draft, self._folder / spilled.segment.report.path)
        if segments:
            storage.settle([self._folder])
        content = _content(transaction, [spilled.to_json() for spilled in segments])
        storage.replace(self._place(transaction.key, _MANIFEST), json.dumps(content).encode())
        storage.settle([self._folder.parent])

    def recover(self, position: Lsn) -> list[PreparedTransaction]:
        """Returns the transactions that wait for their end, for a log at ``position``, and deletes all other files.
        Transactions prepared above ``position`` are sent again. Transactions that commit below it are in the log."""
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
        """Delete everything: with two_phase off, prepared transactions come whole at their COMMIT PREPARED."""
        storage.delete(self._folder / entry.name for entry in storage.list_after(self._folder))

    def pending(self) -> list[PreparedTransaction]:
        """The prepared transactions whose content is on disk. They may include a transaction that has just ended."""
        names = [entry.name for entry in storage.list_after(self._folder) if entry.name.endswith(_MANIFEST)]
        found: list[PreparedTransaction] = []
        for name in names:
            with suppress(FileNotFoundError):
                found.append(_transaction(_read(self._folder / name)))
        return found

    def taken(self, key: PreparedKey, into: Scratch) -> list[SpilledSegment]:
        """The segments of a committing transaction, as drafts. Raises LogCorrupt if a file is missing or damaged."""
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
        """Write the marks of transactions that are about to be committed to the log, each with its ``commit_lsn``."""
        for key, commit_lsn in commits.items():
            storage.replace(self._place(key, _COMMITTING), str(int(commit_lsn)).encode())
            passed(FaultPoint.PREPARED_COMMITTING)

    def drop(self, keys: Iterable[PreparedKey]) -> None:
        """Delete transactions that the log holds or that were rolled back. Each manifest is deleted first, durably,
        because after a rollback no later message would lead to its deletion."""
        for key in keys:
            manifest = self._place(key, _MANIFEST)
            segments = _read(manifest)["segments"] if storage.exists(manifest) else ()
            storage.delete([manifest])
            storage.settle([self._folder])
            passed(FaultPoint.PREPARED_DROPPED)
            storage.delete([*(self._folder / given["file"] for given in segments), self._place(key, _COMMITTING)])

    def _place(self, key: PreparedKey, kind: str) -> Location:
        # Two transactions with the same xid end at different LSNs. The gid is left out: it may hold any character.
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
