"""Segments that are not in the table yet: written under ``_spill/``, and moved into the table when their batch is cut.

VACUUM ignores names that begin with ``_``, so a transaction may stay open for longer than the retention of VACUUM. No
commit names the files in this folder. They are all deleted at each connect, because the server sends the transactions
again from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from pgcdc_assets.core.location import Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.datafile import FileReport
from pgcdc_assets.log.framerun import IS_CHANGE
from pgcdc_assets.log.preparedfolder import PreparedFolder
from pgcdc_assets.log.rows import Rows, tally_of
from pgcdc_assets.log.segment import StagedSegment, clustered, draft_name, table_of, write_segment
from pgcdc_assets.log.spool import EndedStream, SpooledSegment, Staged
from pgcdc_assets.store import storage

SPILL = "_spill"
_PUT_AT_A_TIME: Final = 4
"""Segments that are sent in parallel. Each is held in memory during this."""


class SpillFolder:
    """``_spill/`` in the log's folder, or a local folder if the log is not on this machine. Used by the writing thread
    only."""

    def __init__(self, table: Location, prepared: PreparedFolder) -> None:
        self._table = table
        self._prepared = prepared
        self._drafts = storage.scratch(table / SPILL)

    def clear(self) -> None:
        self._drafts.clear()

    def write(self, groups: Sequence[pa.Table]) -> StagedSegment:
        """Write a segment with a row group for each table."""
        with self._drafts.named():
            return write_segment(self._drafts.draft(draft_name()), groups)

    def stage(self, rows: Rows) -> Staged:
        """Write rows, clustered by relation."""
        staged, rest = self.stage_large(rows)
        if len(rest):
            staged.files.append((self.write([table_of(rest)]), None))
        return staged

    def stage_large(self, rows: Rows) -> tuple[Staged, Rows]:
        """Write the relations that get their own file, and return the rest. The tally counts all rows."""
        alone, rest = clustered(rows)
        return Staged([(self.write([table_of(part)]), None) for part in alone], tally_of(rows)), rest

    def spool(self, rows: Rows) -> list[SpooledSegment]:
        """Write rows of a transaction in progress, clustered by relation."""
        alone, rest = clustered(rows)
        return [self._spooled(part) for part in (*alone, rest) if len(part)]

    def _spooled(self, rows: Rows) -> SpooledSegment:
        assert rows.subxid is not None
        segment = self.write([table_of(rows)])
        return SpooledSegment(segment, tally_of(rows), int(rows.subxid.min()), int(rows.subxid.max()))

    def settled(self, ended: EndedStream) -> tuple[Staged, Rows]:
        """The part of a committed transaction that counts: the segments with such rows, and the rows that are still in
        memory."""
        staged, stream = Staged(), ended.stream
        spools = stream.spooled
        if ended.kept is not None:
            staged.kept[ended.kept] = ended.end.commit_lsn
            spools = self._prepared.taken(ended.kept, self._drafts)
        for spooled in spools:
            if (counted := spooled.at(ended.end)) is None:
                spooled.segment.draft.discard()
            else:
                staged.add(counted)
        rows = ended.end.rows(stream.pending.rows(stream.overlay))
        if not staged.files and not IS_CHANGE[rows.kind].any():
            rows = rows.take(np.zeros(0, dtype=np.int64))
        return staged, rows

    def move(self, staged: Staged, batch_end: Lsn) -> list[FileReport]:
        """Move the segments of the batch that ends at ``batch_end`` into the table, unchanged."""
        calls = [partial(file.put, self._table, batch_end, batch_end, late) for file, late in staged.files]
        begins = range(0, len(calls), _PUT_AT_A_TIME)
        return [put for begin in begins for put in storage.together(self._table, calls[begin : begin + _PUT_AT_A_TIME])]
