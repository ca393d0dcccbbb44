"""Keeps the content of prepared transactions from PREPARE to COMMIT PREPARED: ``_prepared/`` in the log's folder.

Each prepared transaction has a manifest and the segments that the manifest names. The segments are written like those
of any transaction in progress. At the COMMIT PREPARED they are copied into the log (as hard links, if the store has
links). They are copied, not moved, because the log's commit may be lost: then the COMMIT PREPARED comes again, and
needs the segments again. If the log's commit is not lost, the COMMIT PREPARED never comes again, because the stream
begins where the log ends. So, before the commit, a mark next to the manifest records the ``commit_lsn``. If the log is
above this LSN, it holds the content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.formats import MALFORMED, reading
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LogCorrupt, ProtocolError
from pgcdc_assets.log.prepared import PreparedKey, PreparedTransaction
from pgcdc_assets.log.relations import Overlay
from pgcdc_assets.log.segment import check_content, draft_name
from pgcdc_assets.log.spool import SpooledSegment, StreamEnd
from pgcdc_assets.source.connect.failures import COPY_ANEW
from pgcdc_assets.store import storage
from pgcdc_assets.store.scratch import DraftFile, Scratch

PREPARED: Final = "_prepared"
_MANIFEST: Final = ".json"
_COMMITTING: Final = ".committing"
"""``_MANIFEST`` and ``_COMMITTING`` end the file names of the manifest and of the mark."""


class PreparedFolder:
    """The folder of one log. Only the receiver writes; other processes may read :meth:`pending`."""

    def __init__(self, log: Location) -> None:
        self._folder = log / PREPARED

    def keep(self, transaction: PreparedTransaction, segments: Sequence[SpooledSegment]) -> None:
        """Keep a transaction whose content is in these segments. Durable when this returns."""
        for spooled in segments:
            storage.put(spooled.segment.draft, self._folder / spooled.segment.report.path)
        if segments:
            storage.settle([self._folder])
        content = _content(transaction, [spooled.to_json() for spooled in segments])
        storage.replace(self._place(transaction.key, _MANIFEST), json.dumps(content).encode())
        storage.settle([self._folder.parent])

    def recover(self, position: Lsn) -> list[PreparedTransaction]:
        """Returns the transactions that still wait for their end, for a log at ``position``. Deletes everything else in
        the folder.

        A transaction prepared above ``position`` comes again, and a transaction that commits below it is in the log.
        """
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
        """Deletes everything, because the slot's two_phase was turned off: all prepared transactions come whole at
        their COMMIT PREPARED."""
        storage.delete(self._folder / entry.name for entry in storage.list_after(self._folder))

    def pending(self) -> list[PreparedTransaction]:
        """The transactions that are kept. A transaction that has just committed may be among them."""
        names = [entry.name for entry in storage.list_after(self._folder) if entry.name.endswith(_MANIFEST)]
        found: list[PreparedTransaction] = []
        for name in names:
            with suppress(FileNotFoundError):
                found.append(_transaction(_read(self._folder / name)))
        return found

    def taken(self, key: PreparedKey, into: Scratch) -> list[SpooledSegment]:
        """The segments of a transaction that commits, as drafts. Raises LogCorrupt if the manifest or a segment is
        missing or damaged."""
        segments: list[SpooledSegment] = []
        manifest = self._place(key, _MANIFEST)
        if not storage.exists(manifest):
            raise LogCorrupt("is missing", thing=str(manifest), do=COPY_ANEW)
        for given in _read(manifest)["segments"]:
            place, draft = self._folder / given["file"], into.draft(draft_name())
            check_content(place)
            storage.copy(place, Location(draft.path))
            segments.append(SpooledSegment.of_json(given, draft))
        return segments

    def committing(self, commits: Mapping[PreparedKey, int]) -> None:
        """Write the marks of transactions that are about to be committed to the log, each with its ``commit_lsn``."""
        for key, commit_lsn in commits.items():
            storage.replace(self._place(key, _COMMITTING), str(int(commit_lsn)).encode())
            passed(FaultPoint.PREPARED_COMMITTING)

    def drop(self, keys: Iterable[PreparedKey]) -> None:
        """Delete transactions that the log holds, or that were rolled back. Each manifest goes first, durably, because
        after a rollback no later message would lead to its deletion."""
        for key in keys:
            manifest = self._place(key, _MANIFEST)
            segments = _read(manifest)["segments"] if storage.exists(manifest) else ()
            storage.delete([manifest])
            storage.settle([self._folder])
            passed(FaultPoint.PREPARED_DROPPED)
            storage.delete([*(self._folder / given["file"] for given in segments), self._place(key, _COMMITTING)])

    def _place(self, key: PreparedKey, kind: str) -> Location:
        # Two transactions with the same xid end at different LSNs. The gid is left out, because it may hold any
        # character.
        return self._folder / f"{key.xid}-{int(key.end_lsn):016x}{kind}"


def _read(place: Location) -> dict[str, Any]:
    """Reads a manifest. Raises LogCorrupt if it is not as it was written."""
    content = storage.read(place)
    try:
        found: dict[str, Any] = json.loads(content)
        relations = range(len(_transaction(found).overlay.payloads))
        committed = StreamEnd(0, 0, np.zeros(0, dtype=np.int64), dict(zip(relations, relations, strict=True)))
        for given in found["segments"]:
            SpooledSegment.of_json(given, DraftFile(given["file"])).at(committed)
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
