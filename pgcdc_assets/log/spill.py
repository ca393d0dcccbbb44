"""Segments on their way: written under ``_spill/``, moved into the table when their batch is cut.

VACUUM leaves names that begin with ``_`` alone, so a transaction may stay open for longer than its
retention. What lies here is in no commit; all of it is dropped at each connect, because the server
sends it again from the start.
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
"""Segments that are sent side by side, each of them held in memory for it."""


class SpillFolder:
    """``_spill/`` in the log's folder, or on this machine if that is elsewhere. Used by the writing thread alone."""

    def __init__(self, table: Location, prepared: PreparedFolder) -> None:
        self._table = table
        self._prepared = prepared
        self._drafts = storage.scratch(table / SPILL)

    def clear(self) -> None:
        self._drafts.clear()

    def write(self, groups: Sequence[pa.Table]) -> StagedSegment:
        """A segment with a row group for each table."""
        with self._drafts.named():
            return write_segment(self._drafts.draft(draft_name()), groups)

    def stage(self, rows: Rows) -> Staged:
        """Write rows, clustered by relation."""
        staged, rest = self.stage_large(rows)
        if len(rest):
            staged.files.append((self.write([table_of(rest)]), None))
        return staged

    def stage_large(self, rows: Rows) -> tuple[Staged, Rows]:
        """Write the relations that get a file of their own; the rest is handed back. The tally is of all."""
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
        """What counts of a transaction that has committed: the segments that hold some of it, and its other rows."""
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
        """Move segments into the table, as they are; they are those of the batch that ends there."""
        calls = [partial(file.put, self._table, batch_end, batch_end, late) for file, late in staged.files]
        begins = range(0, len(calls), _PUT_AT_A_TIME)
        return [put for begin in begins for put in storage.together(self._table, calls[begin : begin + _PUT_AT_A_TIME])]
