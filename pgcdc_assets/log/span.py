"""What the log contains in a range of LSNs: batches, shapes of relations, and numbers of rows. Each turn (one pass of
transform, apply and publish) makes one LogSpan, so that the summaries of the batches are read only once."""

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
    """The part of the log with the transactions that commit in ``lsns``. Each property is read from the log at its
    first use, and cached."""

    log: ChangeLog
    lsns: LsnRange
    _wider: LogSpan | None = None
    """A span that contains this span. This span takes its properties from there, and does not read the log again."""
    _parts: dict[LsnRange, LogSpan] = field(default_factory=dict, init=False, repr=False)

    def part(self, lsns: LsnRange) -> LogSpan:
        """The span ``lsns`` of the same log. If it lies within this span, the log is not read again."""
        if lsns == self.lsns:
            return self
        within = self.lsns.start <= lsns.start <= lsns.end <= self.lsns.end
        return self._parts.setdefault(lsns, LogSpan(self.log, lsns, self if within else None))

    @cached_property
    def batches(self) -> list[BatchSummary]:
        """The batches that overlap the span, in order. The span may begin or end inside a batch, for example at the
        consistent point of a snapshot copy, or at an LSN that ``verify`` asks for."""
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
        """The exact number of rows in the span, by relation and kind. The counts come from the summaries. If only a
        part of a batch is in the span, the rows of this part are read and counted."""
        found: dict[int, Counter[str]] = {}
        for batch in self.batches:
            part = LsnRange(max(batch.start, self.lsns.start), min(batch.end, self.lsns.end))
            whole = part == LsnRange(batch.start, batch.end)
            for relation, kinds in batch.rows.items() if whole else self._counted(part):
                found.setdefault(relation, Counter()).update(kinds)
        return found

    def kinds(self, relations: Collection[int]) -> Counter[str]:
        """The approximate number of rows that these relations have in the span, by kind. If only a part of a batch is
        in the span, all rows of the batch are counted."""
        found: Counter[str] = Counter()
        for batch in self.batches:
            for relation in batch.rows.keys() & relations:
                found.update(batch.rows[relation])
        return found

    def segments(self, relations: Collection[int] | None = None) -> list[Segment]:
        """:meth:`ChangeLog.segments` for the span."""
        return self.log.segments(self.lsns, relations)

    def used(self, schema_ids: Collection[int], relations: Collection[int]) -> set[int]:
        """Returns those of the ``schema_ids`` that occur in rows of the span. ``relations``: the relations to which
        these ids belong. Segments without rows of these relations are not read."""
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
    """The catalog facts that the log contains for these ``schema_ids``, by ``schema_id``."""
    found: dict[int, RelationFacts] = {}
    asked = (pc.field("kind") == FACTS) & pc.field("schema_id").isin(list(schema_ids))
    for segment in filter(lambda segment: segment.notes, log.all_segments()):
        if found.keys() >= schema_ids:
            break
        for note in read_rows(segment.file, ["schema_id", "payload"], asked).to_pylist():
            found[note["schema_id"]] = RelationFacts.from_json(json.loads(note["payload"]))
    return found


def _committed(lsns: LsnRange) -> pc.Expression:
    """A filter for the changes (I, U, D, T) of the transactions that commit in the span."""
    at = pc.field("commit_lsn")
    return (at >= int(lsns.start)) & (at < int(lsns.end)) & pc.field("kind").isin(list(ROW_KINDS))
