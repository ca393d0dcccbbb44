"""The change log for those who read it: position, batches, segments, shapes, and whether it is sound.

Reading needs neither the source nor a JVM, and goes on beside a running receiver.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.layout import DELTA_LOG, Layout
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.private import private_folder
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.errors import LogCorrupt, SetupNeeded
from pgcdc_assets.log.commit import check_file, create_log, start_app_id, timeline_app_id
from pgcdc_assets.log.segment import FACTS, SUMMARY, SegmentFile, read_rows
from pgcdc_assets.protocol.shape import RelationFacts, Shape

_FORMAT = "1"
_FILE_FIELDS: Final = {
    "path": pa.string(), "size_bytes": pa.int64(), "num_records": pa.int64(), "modification_time": pa.int64(),
    **{f"{end}.{name}": pa.int64() for name in ("batch_end", "commit_lsn", "relation_id") for end in ("min", "max")},
    "min.kind": pa.string(),
}  # fmt: skip
"""The columns of a file that are read: its add action and the statistics in it."""


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
    """Size of the messages, uncompressed."""
    relations: dict[int, TableName]
    schemas: tuple[int, ...]
    """The schema_ids that its rows refer to."""
    partitions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For relations that are published via their root: the leaves that their rows came from, as far as the stream named
    them within the batch (once in a connection, before the first row of each)."""

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
            partitions={int(root): tuple(leaves) for root, leaves in data.get("partitions", {}).items()},
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
    written: datetime
    """When it was added to the table; a compacted file is as old as its compaction."""

    def may_hold(self, relation_ids: Collection[int]) -> bool:
        low, high = self.relation_min, self.relation_max
        return low is not None and high is not None and any(low <= relation <= high for relation in relation_ids)


class ChangeLog:
    """The log of one lake. Cheap to make; the table is opened with the first question and kept up to date."""

    def __init__(self, layout: Layout) -> None:
        self.path = layout.change_log
        self.layout = layout
        self._table: DeltaTable | None = None
        self._shapes: dict[int, Shape] = {}
        self._summaries: dict[str, tuple[BatchSummary, ...]] = {}
        self._actions: tuple[int, pa.Table] | None = None

    @property
    def exists(self) -> bool:
        return (self.path / DELTA_LOG).is_dir() and DeltaTable.is_deltatable(str(self.path))

    def create(self, identity: Identity, start: Lsn, timeline: int) -> None:
        """Make the empty log of a slot, standing at ``start`` (the slot's consistent point)."""
        private_folder(self.layout.root)
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
    def began(self) -> Lsn:
        """Where the log of this slot began."""
        return Lsn.parse(self._properties()["pgcdc.start_lsn"])

    @property
    def start(self) -> Lsn:
        """From here on every transaction is held: where the log began, or where retention has cut it off."""
        return max(self.began, Lsn(self._current().transaction_version(start_app_id(self.identity)) or 0))

    def position(self) -> Lsn:
        """``transform_lsn``: every transaction that ends at or below it is durable here."""
        return Lsn(self._current().transaction_version(self.identity.app_id()) or 0)

    @property
    def timeline(self) -> int:
        """The source's timeline at the newest commit."""
        return self._current().transaction_version(timeline_app_id(self.identity)) or 0

    def batches(self, after: Lsn, upto: Lsn | None = None) -> list[BatchSummary]:
        """The batches whose end is above ``after`` and, if given, at or below ``upto``, in order."""
        summaries = (summary for segment in self._noted(after, upto) for summary in self._summaries_in(segment))
        chosen = (s for s in summaries if s.end > after and (upto is None or s.end <= upto))
        return sorted(chosen, key=lambda summary: summary.end)

    def segments(self, span: LsnRange, relation_ids: Collection[int] | None = None) -> list[Segment]:
        """The files that may hold changes of these relations (None: all) committed in the span.

        They may hold others too: filter by ``commit_lsn`` (start <= it < end) and ``relation_id``.
        """
        files = self._added()
        held = pc.and_(
            pc.greater_equal(files["max.commit_lsn"], int(span.start)), pc.less(files["min.commit_lsn"], int(span.end))
        )
        found = self._segments(files.filter(held))
        if relation_ids is None:
            return found
        return [segment for segment in found if segment.may_hold(relation_ids)]

    def all_segments(self) -> list[Segment]:
        """Every file of the log."""
        return self._segments(self._added())

    def shapes(self, span: LsnRange) -> dict[int, Shape]:
        """The shapes of all rows in the span, by ``schema_id``; from the log alone."""
        wanted: set[int] = set()
        holders: dict[Path, set[int]] = {}
        for segment in self._noted(span.start, None):
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
        for segment in self._segments(self._between(span.start, span.end)):
            check_file(segment.path, SegmentFile(segment.path.name, segment.size, segment.rows, {}))
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

    def _added(self) -> pa.Table:
        """One row for each live file. This is kept and filtered as Arrow: a log has thousands of files, and a question
        concerns few of them."""
        table = self._current()
        version = table.version()
        if self._actions is None or self._actions[0] != version:
            actions = pa.table(table.get_add_actions(flatten=True))
            columns = {name: _column(actions, name, type_) for name, type_ in _FILE_FIELDS.items()}
            self._actions = version, pa.table(columns)
        return self._actions[1]

    def _between(self, after: Lsn, upto: Lsn | None) -> pa.Table:
        """The files with rows of batches that end above ``after`` and at or below ``upto``."""
        files = self._added()
        files = files.filter(pc.greater(files["max.batch_end"], int(after)))
        return files if upto is None else files.filter(pc.less_equal(files["min.batch_end"], int(upto)))

    def _noted(self, after: Lsn, upto: Lsn | None) -> list[Segment]:
        """The files among them that hold notes."""
        files = self._between(after, upto)
        return self._segments(files.filter(pc.equal(files["min.kind"], SUMMARY)))

    def _segments(self, files: pa.Table) -> list[Segment]:
        return [_segment(self.path, file) for file in files.to_pylist()]

    def _summaries_in(self, segment: Segment) -> tuple[BatchSummary, ...]:
        name = segment.path.name
        if name not in self._summaries:
            payloads = _notes_in(segment.path, [SUMMARY])["payload"].to_pylist()
            try:
                self._summaries[name] = tuple(BatchSummary.from_json(json.loads(payload)) for payload in payloads)
            except (ValueError, KeyError, TypeError):
                raise LogCorrupt("holds no summary that can be read", thing=str(segment.path)) from None
        return self._summaries[name]


def _column(actions: pa.Table, name: str, type_: pa.DataType) -> pa.ChunkedArray | pa.Array:
    """A table without files has no statistics."""
    return actions[name].cast(type_) if name in actions.column_names else pa.nulls(actions.num_rows, type_)


def _segment(folder: Path, file: dict[str, Any]) -> Segment:
    return Segment(
        path=folder / file["path"],
        size=file["size_bytes"],
        rows=file["num_records"],
        batch_end=Lsn(file["max.batch_end"]),
        first_batch_end=Lsn(file["min.batch_end"]),
        commit_min=_lsn(file["min.commit_lsn"]),
        commit_max=_lsn(file["max.commit_lsn"]),
        relation_min=file["min.relation_id"],
        relation_max=file["max.relation_id"],
        # It sorts before the letters of all messages.
        notes=file["min.kind"] == SUMMARY,
        written=datetime.fromtimestamp(file["modification_time"] / 1000, UTC),
    )


def _notes_in(path: Path, kinds: Iterable[str]) -> pa.Table:
    """The notes of a file. They have a row group of their own, which the filter finds by its statistics."""
    return read_rows(path, ["kind", "relation_id", "schema_id", "payload"], pc.field("kind").isin(list(kinds)))


def _shapes_in(path: Path) -> dict[int, Shape]:
    notes = _notes_in(path, ["R", FACTS]).to_pylist()
    payloads = {(note["kind"], note["schema_id"]): note["payload"] for note in notes}
    shapes = {
        schema_id: Shape.resolve(payload, RelationFacts.from_json(json.loads(payloads[FACTS, schema_id])))
        for (kind, schema_id), payload in payloads.items()
        if kind == "R"
    }
    # By the ids that the rows carry: a version that notes more facts would give others to the same relations.
    return {schema_id: replace(shape, schema_id=schema_id) for schema_id, shape in shapes.items()}


def _counts_in(path: Path) -> Counter[tuple[int, int | None, str]]:
    """Rows of a file by batch_end, relation and kind, notes left out."""
    table = read_rows(path, ["batch_end", "relation_id", "kind"])
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
