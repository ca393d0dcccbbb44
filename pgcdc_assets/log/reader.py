"""Reads and checks the change log: its position, batches and segments, and the shapes (columns and types) of its
relations. Needs neither the source nor a JVM, and works while a receiver writes to the log."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.formats import EPOCH, MALFORMED, reading
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.delta.commit import LEADER
from pgcdc_assets.delta.log import Added, DeltaLog, DeltaVersion
from pgcdc_assets.errors import LogCorrupt, SetupNeeded
from pgcdc_assets.log.commit import check_file, create_log, newest_of, start_app_id, timeline_app_id
from pgcdc_assets.log.commitfacts import SUBXID, CommitFacts
from pgcdc_assets.log.segment import FACTS, FIRST_BATCH_END, LAST_BATCH_END, SUMMARY, SegmentFile, read_rows
from pgcdc_assets.log.summary import BatchSummary, check_rows
from pgcdc_assets.protocol.shape import RelationFacts, Shape
from pgcdc_assets.store import storage


@dataclass(frozen=True)
class Segment:
    """A file of the log. ``commit_min`` to ``relation_max`` are the lowest and highest values in the file's rows, None
    if the column is NULL in every row. With these bounds, a reader skips files that have no wanted rows."""

    path: Location
    size: int
    rows: int
    """Number of rows in the file, including rows of aborted subtransactions."""
    batch_end: Lsn
    """The end of the last batch that has rows in the file."""
    first_batch_end: Lsn
    """The end of the first batch that has rows in the file. Most files have rows of only one batch."""
    commit_min: Lsn | None
    commit_max: Lsn | None
    relation_min: int | None
    relation_max: int | None
    notes: bool
    """Whether the file contains the notes of a batch: summary, Relation messages, catalog facts."""
    written: datetime
    """When the file was added to the table. For a compacted file, this is the time of the compaction."""
    unrelated: bool = True
    """Whether the file may contain rows that belong to no relation, such as Commit rows."""
    commit_facts: CommitFacts | None = None

    @property
    def file(self) -> SegmentFile:
        """The file with its :class:`CommitFacts`, as the functions that read rows need it."""
        return SegmentFile(self.path, self.commit_facts)

    def reaches_into(self, span: LsnRange) -> bool:
        """Whether the file may contain transactions that commit in the span."""
        low, high = self.commit_min, self.commit_max
        return low is not None and high is not None and high >= span.start and low < span.end

    def may_hold(self, relation_ids: Collection[int]) -> bool:
        low, high = self.relation_min, self.relation_max
        return low is not None and high is not None and any(low <= relation <= high for relation in relation_ids)


class ChangeLog:
    """The change log of one lake. Every access reads the Delta table's newest version."""

    def __init__(self, layout: Layout) -> None:
        self.path = layout.change_log
        self.layout = layout
        self._table = DeltaLog(self.path)
        self._shapes: dict[int, Shape] = {}
        self._summaries: dict[str, tuple[BatchSummary, ...]] = {}
        self._known: tuple[int, dict[str, Segment]] = (-1, {})

    @property
    def exists(self) -> bool:
        try:
            self.version()
        except SetupNeeded:
            return False
        return True

    def create(self, identity: Identity, start: Lsn, timeline: int) -> None:
        """Create the empty log of a slot. Its position is ``start``, the slot's consistent point."""
        storage.make_private(self.layout.root)
        create_log(self.path, identity, start, timeline)

    def open(self) -> Self:
        """Open the log. Raises SetupNeeded if there is no log, UnknownFormat if it has another format, and LogCorrupt
        if it cannot be read."""
        self.version()
        return self

    def version(self) -> DeltaVersion:
        """The table's newest version. Raises the errors of :meth:`open`."""
        return newest_of(self._table)

    @property
    def id(self) -> str:
        """The id of the Delta table. Two logs have the same id only if one is a copy of the other."""
        return str(self.version().metadata["id"])

    @property
    def identity(self) -> Identity:
        properties = self.version().configuration
        names = ("system_identifier", "database", "slot", "database_oid")
        with reading(f"change log {self.path}", LogCorrupt):
            system, database, slot, oid = (properties[f"pgcdc.{name}"] for name in names)
            return Identity(system, database, slot, int(oid))

    @property
    def began(self) -> Lsn:
        """The LSN at which the log of this slot began."""
        properties = self.version().configuration
        with reading(f"change log {self.path}", LogCorrupt):
            return Lsn.parse(properties["pgcdc.start_lsn"])

    @property
    def start(self) -> Lsn:
        """The LSN above which the log contains every transaction: :attr:`began`, or the LSN below which retention has
        deleted the log."""
        return max(self.began, Lsn(self.version().positions.get(start_app_id(self.identity), 0)))

    def position(self) -> Lsn:
        """``transform_lsn``: every transaction that ends at or below this LSN is durable in the log."""
        return Lsn(self.version().positions.get(self.identity.app_id(), 0))

    @property
    def leader(self) -> int | None:
        """The number of the last leader. A leader is a process that took over the lake's lease although the previous
        holder had not released it. None if there was no leader, or if there is no log."""
        return self.version().positions.get(LEADER) if self.exists else None

    @property
    def timeline(self) -> int:
        """The source's timeline at the newest commit."""
        return self.version().positions.get(timeline_app_id(self.identity), 0)

    def batches(self, after: Lsn, upto: Lsn | None = None) -> list[BatchSummary]:
        """The batches whose end is above ``after``, and at or below ``upto`` if given, in order."""
        summaries = (summary for segment in self._noted(after, upto) for summary in self._summaries_in(segment))
        chosen = (s for s in summaries if s.end > after and (upto is None or s.end <= upto))
        return sorted(chosen, key=lambda summary: summary.end)

    def segments(self, span: LsnRange, relation_ids: Collection[int] | None = None) -> list[Segment]:
        """The files that may contain changes of these relations (None: of all relations) that were committed in the
        span. The files may also contain other changes, so the caller must filter their rows by ``commit_lsn`` (start <=
        commit_lsn < end) and ``relation_id``."""
        found = (segment for segment in self.all_segments() if segment.reaches_into(span))
        return [segment for segment in found if relation_ids is None or segment.may_hold(relation_ids)]

    def segments_of(self, batches: Sequence[BatchSummary]) -> list[Segment]:
        """The files in which these batches may have rows that belong to no relation, such as logical messages.
        ``batches`` is ordered by LSN, and may have gaps."""
        if not batches:
            return []
        ends = np.array([batch.end for batch in batches], np.int64)
        found = (segment for segment in self._between(batches[0].start, batches[-1].end) if segment.unrelated)
        # A compacted file contains several batches, but is returned only once.
        return [s for s in found if ((ends >= s.first_batch_end) & (ends <= s.batch_end)).any()]

    def all_segments(self) -> list[Segment]:
        """Every file of the log."""
        version = self.version()
        number, known = self._known
        if number != version.number:
            files = ((file, known.get(file.path)) for file in version.files)
            with reading(f"Delta commit of change log {self.path}", LogCorrupt):
                known = {file.path: segment or _segment(self.path, file) for file, segment in files}
            self._known = version.number, known
            names = {segment.path.name for segment in known.values()}
            self._summaries = {name: found for name, found in self._summaries.items() if name in names}
        return list(known.values())

    def written(self, batches: Sequence[BatchSummary]) -> dict[Lsn, datetime]:
        """Maps each batch's end to the time when the batch became durable. Leaves out batches whose files were merged,
        because a merged file shows only the time of the merge."""
        if not batches:
            return {}
        noted = self._noted(batches[0].start, batches[-1].end)
        return {segment.batch_end: segment.written for segment in noted if segment.first_batch_end == segment.batch_end}

    def in_order(self, after: Lsn) -> Iterator[tuple[Segment, tuple[BatchSummary, ...]]]:
        """Yields each file with the notes of batches that end above ``after``, and these batches' summaries, in the
        order of the batches. Reads a file only when it is yielded."""
        for segment in sorted(self._noted(after, None), key=lambda segment: segment.batch_end):
            yield segment, self._summaries_in(segment)

    def shapes(self, span: LsnRange) -> dict[int, Shape]:
        """The shapes (the columns of a relation with their types) of all rows in the span, by ``schema_id``. Reads only
        the log. Raises LogCorrupt if a shape is missing."""
        wanted: set[int] = set()
        holders: list[tuple[Segment, set[int]]] = []
        for segment in self._noted(span.start, None):
            summaries = self._summaries_in(segment)
            ids = {i for s in summaries if s.end > span.start and s.start < span.end for i in s.schemas}
            wanted |= ids
            holders.append((segment, ids))
        for segment, ids in holders:
            if ids - self._shapes.keys():
                self._shapes.update(_shapes_in(segment.file))
        missing = wanted - self._shapes.keys()
        if missing:
            raise LogCorrupt(
                f"lacks {len(missing)} Relation messages that describe rows of the LSN range {span}",
                thing=str(self.path),
            )
        return {schema_id: self._shapes[schema_id] for schema_id in wanted}

    def verify(self, span: LsnRange) -> list[BatchSummary]:
        """Check the batches of the span: reads every byte of their files, and compares their rows with the counts in
        their summaries. Returns the batches. Raises LogCorrupt if a check fails."""
        batches = self.batches(span.start, span.end)
        segments = self._between(span.start, span.end)
        for segment in segments:
            check_file(segment.path, segment.size, segment.rows)
        check_rows(batches, [segment.file for segment in segments], span, self.path)
        return batches

    # Helper methods ---------------------------------------------------------------------------------

    def _between(self, after: Lsn, upto: Lsn | None) -> list[Segment]:
        """The files that may have rows of batches that end above ``after`` and at or below ``upto``."""
        above = (segment for segment in self.all_segments() if segment.batch_end > after)
        return [segment for segment in above if upto is None or segment.first_batch_end <= upto]

    def _noted(self, after: Lsn, upto: Lsn | None) -> list[Segment]:
        """The files of :meth:`_between` that contain notes."""
        return [segment for segment in self._between(after, upto) if segment.notes]

    def _summaries_in(self, segment: Segment) -> tuple[BatchSummary, ...]:
        name = segment.path.name
        if name not in self._summaries:
            payloads = _notes_in(segment.file, [SUMMARY])["payload"].to_pylist()
            try:
                self._summaries[name] = tuple(BatchSummary.from_json(json.loads(payload)) for payload in payloads)
            except MALFORMED:
                raise LogCorrupt("has a batch summary that cannot be read", thing=str(segment.path)) from None
        return self._summaries[name]


def _segment(folder: Location, file: Added) -> Segment:
    stats, tags = json.loads(file.action["stats"]), file.action.get("tags") or {}
    low, high = stats["minValues"], stats["maxValues"]
    path = folder / file.path
    return Segment(
        path=path,
        size=file.size,
        rows=stats["numRecords"],
        batch_end=Lsn(int(tags[LAST_BATCH_END])),
        first_batch_end=Lsn(int(tags[FIRST_BATCH_END])),
        commit_min=_lsn(low.get("commit_lsn")),
        commit_max=_lsn(high.get("commit_lsn")),
        relation_min=low.get("relation_id"),
        relation_max=high.get("relation_id"),
        # SUMMARY sorts before all other kinds. So a file has summaries if its lowest kind is SUMMARY.
        notes=low.get("kind") == SUMMARY,
        unrelated=(stats.get("nullCount") or {}).get("relation_id") != 0,
        written=EPOCH + timedelta(milliseconds=file.action["modificationTime"]),
        commit_facts=_commit_facts(path, tags, needed=SUBXID in (stats.get("nullCount") or {})),
    )


def _commit_facts(path: Location, tags: Mapping[str, str], *, needed: bool) -> CommitFacts | None:
    try:
        facts = CommitFacts.of_tags(tags)
    except ValueError:
        raise LogCorrupt("its Delta commit has tags that cannot be read", thing=str(path)) from None
    if needed and facts is None:
        what = "the Delta commit that added this file lacks the commit LSN and commit time of its rows"
        raise LogCorrupt(what, thing=str(path))
    return facts


def _notes_in(file: SegmentFile, kinds: Iterable[str]) -> pa.Table:
    """Reads a file's notes (summaries, Relation messages, catalog facts) of these kinds. Notes are in a row group of
    their own, so no other row group is read."""
    return read_rows(file, ["kind", "relation_id", "schema_id", "payload"], pc.field("kind").isin(list(kinds)))


def _shapes_in(file: SegmentFile) -> dict[int, Shape]:
    notes = _notes_in(file, ["R", FACTS]).to_pylist()
    payloads = {(note["kind"], note["schema_id"]): note["payload"] for note in notes}
    shapes = {
        schema_id: Shape.resolve(payload, RelationFacts.from_json(json.loads(payloads[FACTS, schema_id])))
        for (kind, schema_id), payload in payloads.items()
        if kind == "R"
    }
    # Use the schema ids that the log's rows contain: another version of pgcdc may have computed them in another way.
    return {schema_id: replace(shape, schema_id=schema_id) for schema_id, shape in shapes.items()}


def _lsn(value: int | None) -> Lsn | None:
    return None if value is None else Lsn(value)
