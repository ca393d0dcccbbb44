"""Upkeep of the log: compaction of closed ranges, and retention. Both work while a receiver is running. Delta's own
OPTIMIZE would lose the clustering by relation, and can only be limited to partitions. So this module merges the small
files of a range, in bounded memory, by one commit that removes and adds files without data change."""

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
from pgcdc_assets.log.segment import (
    NOTES,
    OPTIONAL,
    OWN_FILE_BYTES,
    draft_name,
    read_rows,
    write_segment,
)
from pgcdc_assets.store import storage

MERGE_BYTES = 32 << 20
"""Uncompressed bytes that are merged at a time. This bounds memory, and the size of a segment."""
_SMALL_BYTES = 4 << 20
"""Files with fewer uncompressed bytes are merged. A busy stream is written in larger files; merging these would cost as
much as receiving the stream, and would save few file openings."""


def compact(log: ChangeLog, span: LsnRange) -> int:
    """Merge the small files of whole batches within a closed range. Returns by how many the number of files falls.
    Raises LogConflict, and changes nothing, if another compaction took the same files."""
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
    """Cut the log off at ``upto``, a boundary that is inside no file's range. Returns how many files this removes. The
    caller ensures that no consumer needs anything below ``upto``. The same commit moves the log's start. The next
    :func:`sweep_log` deletes the files."""
    segments = log.all_segments()
    if any(segment.first_batch_end <= upto < segment.batch_end for segment in segments):
        raise LakeError("has a file that reaches over this boundary", thing=str(log.path), lsn=upto)
    old = [segment for segment in segments if segment.batch_end <= upto]
    if old:
        _replace(log, old, [], {start_app_id(log.identity): int(upto)})
    return len(old)


def sweep_log(log: ChangeLog, grace: timedelta) -> int:
    """Delete the files that are needed by no version that was the newest within ``grace``; returns how many. Segments
    of long transactions are safe: they move into the folder only right before their commit."""
    return sweep(log.path, grace)


def _groups(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Groups of neighbouring files that are worth merging, each of a bounded size in memory."""
    ordered = sorted(segments, key=lambda segment: segment.batch_end)
    return neighbours(ordered, lambda segment: _uncompressed(segment.path), largest=_SMALL_BYTES, full=MERGE_BYTES)


def _uncompressed(path: Location) -> int:
    footer = read_footer(path)
    return sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))


def _merged(folder: Location, group: Sequence[Segment]) -> list[FileReport]:
    # Reading checks the files, so that damage does not become the content of a sound file. Commit facts are filled in,
    # because the merged file has rows of several transactions, and tags hold for all rows of a file.
    table = pa.concat_tables(read_rows(segment.file) for segment in group).combine_chunks()
    is_note = pc.is_in(table["kind"], value_set=pa.array(NOTES))
    notes, rows = table.filter(is_note), table.filter(pc.invert(is_note))
    # A stable sort: within a relation, rows keep the order of their batches, which is commit order.
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
    """Splits rows that are sorted by relation, like :func:`pgcdc_assets.log.segment.clustered`."""
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
    """Make one commit on a version that has all files to remove. LogConflict if another process removed some of
    these."""
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
            # The receiver also commits: try again.
            continue
        passed(FaultPoint.LOG_FILES_REPLACED)
        settle([log.path])
        return
    raise LogConflict("was compacted by another process", thing=str(log.path))
