"""Counts the rows of each relation that the log holds in a span, from the receiver's own counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import pyarrow.compute as pc

from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.log.segment import read_rows

ROW_KINDS: Final = ("I", "U", "D", "T")


def rows_by_relation(log: ChangeLog, span: LsnRange) -> dict[int, Counter[str]]:
    """Rows, by relation and kind, of the transactions that commit in the span.

    The summaries of the batches hold these counts. The rows themselves are counted only for a batch that the span cuts,
    because the consistent point of a copy may be inside a batch.
    """
    found: dict[int, Counter[str]] = {}
    for batch in log.batches(span.start):
        if batch.start >= span.end:
            continue
        part = LsnRange(max(batch.start, span.start), min(batch.end, span.end))
        whole = part == LsnRange(batch.start, batch.end)
        counted = batch.counts.items() if whole else _counted(log, part)
        for relation, kinds in counted:
            rows = {kind: number for kind, number in kinds.items() if kind in ROW_KINDS}
            found.setdefault(relation, Counter()).update(rows)
    return found


def _counted(log: ChangeLog, span: LsnRange) -> Iterator[tuple[int, dict[str, int]]]:
    """Rows of the span by relation and kind, from the files of the log."""
    at, kind = pc.field("commit_lsn"), pc.field("kind")
    asked = (at >= int(span.start)) & (at < int(span.end)) & kind.isin(list(ROW_KINDS))
    for segment in log.segments(span):
        rows = read_rows(segment.file, ["relation_id", "kind"], asked)
        for row in rows.group_by(["relation_id", "kind"]).aggregate([([], "count_all")]).to_pylist():
            yield row["relation_id"], {row["kind"]: row["count_all"]}
