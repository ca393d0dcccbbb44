"""The change log for those who read it: position, batches, segments, shapes, and whether it is sound.

Reading needs neither the source nor a JVM, and goes on beside a running receiver.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import LogCorrupt, SetupNeeded
from pgcdc_assets.log.commit import DELTA_LOG, check_file, create_log, timeline_app_id
from pgcdc_assets.log.segment import FACTS, SUMMARY, SegmentFile, check_content
from pgcdc_assets.protocol.shape import RelationFacts, Shape

_FORMAT = "1"


@dataclass(frozen=True)
class BatchSummary:
    """What a batch says of itself: ``(start, end]`` of the WAL, whole transactions."""

    start: Lsn
    end: Lsn
    timeline: int
    transactions: int
    last_xid: int | None
    first_commit_ts: datetime | None
    last_commit_ts: datetime | None
    counts: dict[int, dict[str, int]]
    """Rows by relation_id and kind (I, U, D, T)."""
    others: dict[str, int]
    """Rows of no relation, by kind (C, M)."""
    bytes: int
    """Of the messages, uncompressed."""
    relations: dict[int, TableName]
    schemas: tuple[int, ...]
    """The schema_ids that its rows refer to."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        counts = {key: dict(value) for key, value in data["counts"].items()}
        others = counts.pop("", {})
        return cls(
            start=Lsn(data["start"]),
            end=Lsn(data["end"]),
            timeline=data["timeline"],
            transactions=data["transactions"],
            last_xid=data["last_xid"],
            first_commit_ts=_time(data["first_commit_ts"]),
            last_commit_ts=_time(data["last_commit_ts"]),
            counts={int(key): value for key, value in counts.items()},
            others=others,
            bytes=data["bytes"],
            relations={int(key): TableName(*name) for key, name in data["relations"].items()},
            schemas=tuple(data["schemas"]),
        )


@dataclass(frozen=True)
class Segment:
    """A file of the log with the bounds by which it is read or skipped; None where it has no such rows."""

    path: Path
    size: int
    rows: int
    batch_end: Lsn
    """The highest, where a file holds several batches."""
    first_batch_end: Lsn
    commit_min: Lsn | None
    commit_max: Lsn | None
    relation_min: int | None
    relation_max: int | None
    notes: bool
    """Holds the notes of a batch: summary, relations, facts."""

    def may_hold(self, span: LsnRange, relation_ids: Collection[int] | None) -> bool:
        if self.commit_min is None or self.commit_max is None:
            return False
        if self.commit_max < span.start or self.commit_min >= span.end:
            return False
        if relation_ids is None:
            return True
        low, high = self.relation_min, self.relation_max
        return low is not None and high is not None and any(low <= relation <= high for relation in relation_ids)


class ChangeLog:
    """The log of one lake. Cheap to make; the table is opened with the first question and kept up to date."""

    def __init__(self, layout: Layout) -> None:
        self.path = layout.change_log
        self._table: DeltaTable | None = None
        self._shapes: dict[int, Shape] = {}
        self._summaries: dict[str, tuple[BatchSummary, ...]] = {}

    @property
    def exists(self) -> bool:
        return (self.path / DELTA_LOG).is_dir() and DeltaTable.is_deltatable(str(self.path))

    def create(self, identity: Identity, start: Lsn, timeline: int) -> None:
        """Make the empty log of a slot, standing at ``start`` (the slot's consistent point)."""
        create_log(self.path, identity, start, timeline)

    def open(self) -> Self:
        """Open it, or raise SetupNeeded; LogCorrupt for a format that this version does not know."""
        self._current()
        return self

    @property
    def identity(self) -> Identity:
        properties = self._properties()
        return Identity(*(properties[f"pgcdc.{name}"] for name in ("system_identifier", "database", "slot")))

    @property
    def start(self) -> Lsn:
        """Where the log began; it may be cut off above by retention."""
        return Lsn.parse(self._properties()["pgcdc.start_lsn"])

    def position(self) -> Lsn:
        """``transform_lsn``: every transaction that ends at or below it is durable here."""
        return Lsn(self._current().transaction_version(self.identity.app_id()) or 0)

    @property
    def timeline(self) -> int:
        """The source's timeline at the newest commit."""
        return self._current().transaction_version(timeline_app_id(self.identity)) or 0

    def batches(self, after: Lsn, upto: Lsn | None = None) -> list[BatchSummary]:
        """The batches whose end is above ``after`` and, if given, at or below ``upto``, in order."""
        summaries = (
            summary
            for segment in self.all_segments()
            if segment.notes and segment.batch_end > after and (upto is None or segment.first_batch_end <= upto)
            for summary in self._summaries_in(segment)
        )
        chosen = (s for s in summaries if s.end > after and (upto is None or s.end <= upto))
        return sorted(chosen, key=lambda summary: summary.end)

    def segments(self, span: LsnRange, relation_ids: Collection[int] | None = None) -> list[Segment]:
        """The files that may hold changes of these relations (None: all) committed in the span.

        They may hold others too: filter by ``commit_lsn`` (start <= it < end) and ``relation_id``.
        """
        return [segment for segment in self.all_segments() if segment.may_hold(span, relation_ids)]

    def all_segments(self) -> list[Segment]:
        """Every file of the log."""
        return [_segment(self.path, file) for file in self._files()]

    def shapes(self, span: LsnRange) -> dict[int, Shape]:
        """The shapes of all rows in the span, by ``schema_id``; from the log alone."""
        wanted: set[int] = set()
        holders: dict[Path, set[int]] = {}
        for segment in self.all_segments():
            if not segment.notes or segment.batch_end <= span.start:
                continue
            summaries = self._summaries_in(segment)
            ids = {i for s in summaries if s.end > span.start and s.start < span.end for i in s.schemas}
            wanted |= ids
            holders[segment.path] = ids
        for path, ids in holders.items():
            if ids - self._shapes.keys():
                self._shapes.update(_shapes_in(path))
        missing = wanted - self._shapes.keys()
        if missing:
            raise LogCorrupt(f"{len(missing)} relations of {span} are not described", thing=str(self.path))
        return {schema_id: self._shapes[schema_id] for schema_id in wanted}

    def verify(self, span: LsnRange) -> list[BatchSummary]:
        """Check the span's batches: files whole, byte for byte, rows as the summaries count them. Raises LogCorrupt.

        Returns the batches. Every byte of their files is read.
        """
        found: Counter[tuple[int, int | None, str]] = Counter()
        for file in self._files():
            segment = _segment(self.path, file)
            if segment.batch_end > span.start and segment.first_batch_end <= span.end:
                check_file(segment.path, file)
                check_content(segment.path)
                found.update(_counts_in(segment.path))
        batches = self.batches(span.start, span.end)
        for batch in batches:
            _check_counts(batch, found, self.path)
        unknown = {end for end, _, _ in found if span.start < end <= span.end} - {batch.end for batch in batches}
        if unknown:
            raise LogCorrupt("holds a batch without a summary", thing=str(self.path), lsn=Lsn(min(unknown)))
        return batches

    # Within -----------------------------------------------------------------------------------------

    def _current(self) -> DeltaTable:
        if self._table is None:
            try:
                self._table = DeltaTable(self.path)
            except TableNotFoundError:
                raise SetupNeeded("does not exist", thing=f"change log {self.path}") from None
            if self._properties().get("pgcdc.format") != _FORMAT:
                raise LogCorrupt("has a format that this version does not read", thing=str(self.path))
        else:
            self._table.update_incremental()
        return self._table

    def _properties(self) -> dict[str, str]:
        table = self._table or self._current()
        return dict(table.metadata().configuration)

    def _files(self) -> Iterator[SegmentFile]:
        actions = pa.table(self._current().get_add_actions(flatten=True))
        for row in actions.to_pylist():
            stats: dict[str, Any] = {"numRecords": row["num_records"], "minValues": {}, "maxValues": {}}
            for name in ("batch_end", "commit_lsn", "kind", "relation_id"):
                stats["minValues"][name] = row.get(f"min.{name}")
                stats["maxValues"][name] = row.get(f"max.{name}")
            yield SegmentFile(row["path"], row["size_bytes"], row["num_records"], stats)

    def _summaries_in(self, segment: Segment) -> tuple[BatchSummary, ...]:
        name = segment.path.name
        if name not in self._summaries:
            payloads = _notes_in(segment.path, [SUMMARY])["payload"].to_pylist()
            self._summaries[name] = tuple(BatchSummary.from_json(json.loads(payload)) for payload in payloads)
        return self._summaries[name]


def _segment(folder: Path, file: SegmentFile) -> Segment:
    low, high = file.stats["minValues"], file.stats["maxValues"]
    return Segment(
        path=folder / file.path,
        size=file.size,
        rows=file.rows,
        batch_end=Lsn(high["batch_end"]),
        first_batch_end=Lsn(low["batch_end"]),
        commit_min=_lsn(low["commit_lsn"]),
        commit_max=_lsn(high["commit_lsn"]),
        relation_min=low["relation_id"],
        relation_max=high["relation_id"],
        # It sorts before the letters of all messages.
        notes=low["kind"] == SUMMARY,
    )


def _notes_in(path: Path, kinds: Iterable[str]) -> pa.Table:
    """The notes of a file. They fill a row group of their own, which the filter finds by its statistics."""
    columns = ["kind", "relation_id", "schema_id", "payload"]
    try:
        return pq.read_table(path, columns=columns, filters=pc.field("kind").isin(list(kinds)), partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise LogCorrupt(f"cannot be read: {type(error).__name__}", thing=str(path)) from None


def _shapes_in(path: Path) -> dict[int, Shape]:
    check_content(path)
    notes = _notes_in(path, ["R", FACTS]).to_pylist()
    payloads = {(note["kind"], note["schema_id"]): note["payload"] for note in notes}
    return {
        schema_id: Shape.resolve(payload, RelationFacts.from_json(json.loads(payloads[FACTS, schema_id])))
        for (kind, schema_id), payload in payloads.items()
        if kind == "R"
    }


def _counts_in(path: Path) -> Counter[tuple[int, int | None, str]]:
    """Rows of a file by batch_end, relation and kind, notes left out."""
    table = pq.read_table(path, columns=["batch_end", "relation_id", "kind"], partitioning=None)
    grouped = table.group_by(["batch_end", "relation_id", "kind"]).aggregate([([], "count_all")]).to_pylist()
    rows = {(row["batch_end"], row["relation_id"], row["kind"]): row["count_all"] for row in grouped}
    return Counter({key: number for key, number in rows.items() if key[2] not in (SUMMARY, FACTS, "R", "Y")})


def _check_counts(batch: BatchSummary, found: Counter[tuple[int, int | None, str]], path: Path) -> None:
    told: dict[tuple[int | None, str], int] = {(None, kind): number for kind, number in batch.others.items()}
    told |= {(relation, kind): n for relation, kinds in batch.counts.items() for kind, n in kinds.items()}
    held = {key[1:]: number for key, number in found.items() if key[0] == batch.end}
    if held != told:
        raise LogCorrupt(
            f"batch {batch.start}..{batch.end} holds {sum(held.values())} rows where its summary counts "
            f"{sum(told.values())}", thing=str(path),
        )  # fmt: skip


def _lsn(value: int | None) -> Lsn | None:
    return None if value is None else Lsn(value)


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
