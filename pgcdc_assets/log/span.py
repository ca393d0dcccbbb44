"""What the log says about the transactions in a span of LSNs. A turn makes one LogSpan and passes it on, so that the
summaries of its batches are read once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow.compute as pc

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.log.reader import ChangeLog, Segment
from pgcdc_assets.log.segment import FACTS, read_rows
from pgcdc_assets.log.summary import ROW_KINDS, BatchSummary
from pgcdc_assets.protocol.shape import RelationFacts, Shape


@dataclass(frozen=True, eq=False)
class LogSpan:
    """The transactions that commit in ``lsns``. Each fact is read at its first use, and kept."""

    log: ChangeLog
    lsns: LsnRange
    _wider: LogSpan | None = None
    """A span that contains this span, and reads the log for it."""
    _parts: dict[LsnRange, LogSpan] = field(default_factory=dict, init=False, repr=False)

    def part(self, lsns: LsnRange) -> LogSpan:
        """The same facts for another span. The log is read again only if that span reaches beyond this span."""
        if lsns == self.lsns:
            return self
        within = self.lsns.start <= lsns.start <= lsns.end <= self.lsns.end
        return self._parts.setdefault(lsns, LogSpan(self.log, lsns, self if within else None))

    @cached_property
    def batches(self) -> list[BatchSummary]:
        """The batches that overlap the span, in order. The span may begin and end inside a batch: the consistent point
        of a copy, or an LSN that ``verify`` asks for, may be inside."""
        start, end = self.lsns.start, self.lsns.end
        if start >= end:
            return []
        found = self.log.batches(start) if self._wider is None else self._wider.batches
        return [batch for batch in found if batch.end > start and batch.start < end]

    def ending_within(self, start: Lsn, end: Lsn) -> list[BatchSummary]:
        """The batches whose ends are above ``start`` and at or below ``end``, in order."""
        if start >= end:
            return []
        return [batch for batch in self.part(LsnRange(start, end)).batches if batch.end <= end]

    @cached_property
    def shapes(self) -> dict[int, Shape]:
        """The shapes of all rows of :attr:`batches`, by ``schema_id``."""
        wanted = {schema_id for batch in self.batches for schema_id in batch.schemas}
        if not wanted:
            return {}
        found = self.log.shapes(self.lsns) if self._wider is None else self._wider.shapes
        return {schema_id: found[schema_id] for schema_id in wanted}

    @cached_property
    def rows(self) -> dict[int, Counter[str]]:
        """Exactly how many rows the log holds in the span, by relation and kind. The summaries have these counts,
        except for a batch that the span cuts, whose rows are read."""
        found: dict[int, Counter[str]] = {}
        for batch in self.batches:
            part = LsnRange(max(batch.start, self.lsns.start), min(batch.end, self.lsns.end))
            whole = part == LsnRange(batch.start, batch.end)
            for relation, kinds in batch.rows.items() if whole else self._counted(part):
                found.setdefault(relation, Counter()).update(kinds)
        return found

    def kinds(self, relations: Collection[int]) -> Counter[str]:
        """About how many rows these relations have in the span, by kind: rows of whole batches are counted."""
        found: Counter[str] = Counter()
        for batch in self.batches:
            for relation in batch.rows.keys() & relations:
                found.update(batch.rows[relation])
        return found

    def segments(self, relations: Collection[int] | None = None) -> list[Segment]:
        """:meth:`ChangeLog.segments` for the span."""
        return self.log.segments(self.lsns, relations)

    def used(self, schema_ids: Collection[int], relations: Collection[int]) -> set[int]:
        """Which of these shapes a row of the span really has. ``relations``: the relations of the shapes."""
        found: set[int] = set()
        asked = _committed(self.lsns) & pc.field("schema_id").isin(list(schema_ids))
        for segment in self.segments(relations):
            rows = read_rows(segment.file, ["schema_id"], asked)
            found |= set(pc.unique(rows["schema_id"]).to_pylist())
        return found

    def _counted(self, lsns: LsnRange) -> Iterator[tuple[int, dict[str, int]]]:
        for segment in self.log.segments(lsns):
            rows = read_rows(segment.file, ["relation_id", "kind"], _committed(lsns))
            for row in rows.group_by(["relation_id", "kind"]).aggregate([([], "count_all")]).to_pylist():
                yield row["relation_id"], {row["kind"]: row["count_all"]}


def facts_of(log: ChangeLog, schema_ids: set[int]) -> dict[int, RelationFacts]:
    """The catalog facts that the log carries for these shapes, by ``schema_id``."""
    found: dict[int, RelationFacts] = {}
    asked = (pc.field("kind") == FACTS) & pc.field("schema_id").isin(list(schema_ids))
    for segment in filter(lambda segment: segment.notes, log.all_segments()):
        if found.keys() >= schema_ids:
            break
        for note in read_rows(segment.file, ["schema_id", "payload"], asked).to_pylist():
            found[note["schema_id"]] = RelationFacts.from_json(json.loads(note["payload"]))
    return found


def _committed(lsns: LsnRange) -> pc.Expression:
    """A filter for the rows of changes of the transactions that commit in the span."""
    at = pc.field("commit_lsn")
    return (at >= int(lsns.start)) & (at < int(lsns.end)) & pc.field("kind").isin(list(ROW_KINDS))
