"""The messages on changes of structure that the log holds, with the end of each one's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow.compute as pc

from pgcdc_assets.log.framerun import STRUCTURE
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import read_rows
from pgcdc_assets.log.summary import BatchSummary
from pgcdc_assets.protocol.decode import decode
from pgcdc_assets.protocol.messages import Commit, LogicalMessage
from pgcdc_assets.source.catalog.noted import StructureNote

KIND: Final = chr(STRUCTURE)


def structure_notes(log: ChangeLog, batches: Sequence[BatchSummary]) -> list[StructureNote]:
    """Those of these batches, in the order of the stream."""
    holding = [batch for batch in batches if batch.others.get(KIND)]
    found: list[tuple[int, int, bytes]] = []
    commits: dict[int, bytes] = {}
    for segment in log.segments_of(holding):
        asked = pc.field("kind").isin([KIND, "C"])
        for row in read_rows(segment.file, ["kind", "commit_lsn", "tx_ordinal", "payload"], asked).to_pylist():
            if row["kind"] == KIND:
                found.append((row["commit_lsn"], row["tx_ordinal"], row["payload"]))
            else:
                commits[row["commit_lsn"]] = row["payload"]
    notes = [_note(payload, commits[at]) for at, _, payload in sorted(found)]
    # A file that was compacted holds other batches, too.
    return [note for note in notes if any(batch.start <= note.commit_lsn < batch.end for batch in holding)]


def _note(payload: bytes, commit: bytes) -> StructureNote:
    message, ended = decode(payload), decode(commit)
    assert isinstance(message, LogicalMessage)
    assert isinstance(ended, Commit)
    return StructureNote.of(ended.commit_lsn, ended.end_lsn, message.content)
