"""Compaction of the log in LSN ranges that get no more batches, and retention. Both work while a receiver writes to the
log. Delta's own OPTIMIZE would lose the clustering by relation, and cannot be limited to a range of LSNs. So this
module merges the small files of a range itself, in bounded memory. One Delta commit replaces the small files by the
merged files. Its actions have ``dataChange: false``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.faultpoints import FaultPoint, passed
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.delta.commit import replace_files, settle
from pgcdc_assets.delta.datafile import FileReport, neighbours, read_footer
from pgcdc_assets.delta.sweep import sweep
from pgcdc_assets.errors import CommitLost, LakeError, LogConflict
from pgcdc_assets.log.commit import ATTEMPTS, start_app_id
from pgcdc_assets.log.reader import ChangeLog, Segment
from pgcdc_assets.log.segment import NOTES, OPTIONAL, OWN_FILE_BYTES, draft_name, read_rows, write_segment
from pgcdc_assets.store import storage

MERGE_BYTES = 32 << 20
"""How many uncompressed bytes are merged at a time. This limits memory, and the size of the merged file."""
_SMALL_BYTES = 4 << 20
"""Only files with fewer uncompressed bytes are merged. A busy stream is written in larger files. To merge them would
cost as much as to receive the stream, and would save readers only a few files."""


def compact(log: ChangeLog, span: LsnRange) -> int:
    """Merge the small files of the batches that lie completely inside ``span``, which must be a range that gets no more
    batches. Returns by how much the number of files has decreased. Raises LogConflict, and changes nothing, if another
    compaction has replaced the same files."""
    inside = [s for s in log.all_segments() if s.first_batch_end > span.start and s.batch_end <= span.end]
    removed: list[Segment] = []
    added: list[FileReport] = []
    for group in _groups(inside):
        added += _merged(log.path, group)
        removed += group
    if removed:
        _replace(log, removed, added, {})
    return len(removed) - len(added)


def forget(log: ChangeLog, upto: Lsn) -> int:
    """Remove the files with batches at or below ``upto`` from the log, and move the log's start to ``upto``, in one
    Delta commit. Returns how many files this removes. The caller ensures that no consumer needs anything below
    ``upto``. Raises LakeError if a file has batches both below and above ``upto``. The next :func:`sweep_log` deletes
    the files."""
    segments = log.all_segments()
    if any(segment.first_batch_end <= upto < segment.batch_end for segment in segments):
        raise LakeError("cannot be cut here, because a file has batches on both sides", thing=str(log.path), lsn=upto)
    old = [segment for segment in segments if segment.batch_end <= upto]
    if old:
        _replace(log, old, [], {start_app_id(log.identity): int(upto)})
    return len(old)


def sweep_log(log: ChangeLog, grace: timedelta) -> int:
    """Delete the files that no recent version of the table needs, and return how many. A version is recent if it was
    the newest version at some time within ``grace``. Segments of long transactions are safe, because they move into the
    folder only right before their Delta commit."""
    return sweep(log.path, grace)


def _groups(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Groups of neighbouring small files to merge. Each group fits in bounded memory."""
    ordered = sorted(segments, key=lambda segment: segment.batch_end)
    return neighbours(ordered, lambda segment: _uncompressed(segment.path), largest=_SMALL_BYTES, full=MERGE_BYTES)


def _uncompressed(path: Location) -> int:
    footer = read_footer(path)
    return sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))


def _merged(folder: Location, group: Sequence[Segment]) -> list[FileReport]:
    # read_rows checks the files' checksums, so damaged bytes are never written under a valid checksum. It also fills in
    # the commit facts: the merged file has rows of several transactions, but tags apply to all rows of a file.
    table = pa.concat_tables(read_rows(segment.file) for segment in group).combine_chunks()
    is_note = pc.is_in(table["kind"], value_set=pa.array(NOTES))
    notes, rows = table.filter(is_note), table.filter(pc.invert(is_note))
    # The sort is stable, so within a relation the rows keep the order of their batches, which is commit order.
    order = np.argsort(pc.fill_null(rows["relation_id"], -1).to_numpy(), kind="stable")
    rows = rows.take(pa.array(order)).combine_chunks()
    alone, shared = _split(rows)
    files = [[part] for part in alone]
    if notes.num_rows or shared.num_rows:
        files.append([notes, shared])
    first, last = min(segment.first_batch_end for segment in group), max(segment.batch_end for segment in group)
    segments = [write_segment(storage.draft(folder / draft_name()), tables) for tables in files]
    return [segment.put(folder, first, last) for segment in segments]


def _split(rows: pa.Table) -> tuple[list[pa.Table], pa.Table]:
    """Like :func:`pgcdc_assets.log.segment.clustered`, for a table that is already sorted by relation."""
    relation_id = pc.fill_null(rows["relation_id"], -1).to_numpy()
    starts = np.flatnonzero(np.diff(relation_id, prepend=relation_id[:1] - 1))
    ends = np.append(starts[1:], len(relation_id))
    alone: list[pa.Table] = []
    shared: list[pa.Table] = [rows.slice(0, 0)]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        part = rows.slice(start, end - start)
        large = relation_id[start] >= 0 and pc.sum(pc.binary_length(part["payload"])).as_py() >= OWN_FILE_BYTES
        (alone if large else shared).append(part)
    return alone, pa.concat_tables(shared)


def _replace(
    log: ChangeLog, removed: Sequence[Segment], added: Sequence[FileReport], positions: Mapping[str, int]
) -> None:
    """Make one Delta commit that removes and adds these files. Raises LogConflict if another process has already
    removed some of the files ``removed``."""
    storage.settle([log.path])
    passed(FaultPoint.LOG_FILES_REPLACING)
    for _ in range(ATTEMPTS):
        version = log.version()
        live = {file.path: file for file in version.files}
        if any(segment.path.name not in live for segment in removed):
            break
        try:
            gone = [live[segment.path.name] for segment in removed]
            replace_files(version, gone, added, positions, changes=False, optional=OPTIONAL)
        except CommitLost:
            # The receiver has made a commit at the same time. Try again.
            continue
        passed(FaultPoint.LOG_FILES_REPLACED)
        settle([log.path])
        return
    raise LogConflict("another process compacted the same files", thing=str(log.path))
