"""The summary row of a batch, which counts the batch's rows. Writes and reads summaries, and checks rows against
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.formats import EPOCH
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LogCorrupt
from pgcdc_assets.log.relations import RelationRecord
from pgcdc_assets.log.rows import ABSENT, Tally, TransactionEnd
from pgcdc_assets.log.segment import NOTES, SegmentFile, read_rows

_NO_BATCH: Final = -1
_COLUMNS: Final = ("commit_lsn", "commit_ts", "lsn", "relation_id", "schema_id", "kind")

ROW_KINDS: Final = ("I", "U", "D", "T")
"""The kinds of rows that belong to a relation, as pgoutput's message letters: Insert, Update, Delete, Truncate."""


@dataclass(frozen=True)
class BatchSummary:
    """The summary of a batch. The batch contains the complete transactions of the WAL in ``(start, end]``."""

    start: Lsn
    end: Lsn
    timeline: int
    transactions: int
    last_xid: int | None
    first_commit_ts: datetime | None
    last_commit_ts: datetime | None
    counts: dict[int, dict[str, int]]
    """Number of rows by relation_id and kind (I, U, D, T)."""
    others: dict[str, int]
    """Number of rows that belong to no relation, by kind (C, M)."""
    bytes: int
    """Size of the messages, uncompressed."""
    relations: dict[int, TableName]
    schemas: tuple[int, ...]
    """The schema_ids of the batch's rows."""
    partitions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For partitioned tables that are published via their roots: maps a root's OID to OIDs of its leaf partitions.
    Contains only leaves whose Relation message was sent within the batch. The server sends this message once per
    connection, before the leaf's first row."""

    @cached_property
    def rows(self) -> dict[int, dict[str, int]]:
        """The entries of :attr:`counts` for changes (I, U, D, T)."""
        return {relation: {kind: number for kind, number in kinds.items() if kind in ROW_KINDS}
                for relation, kinds in self.counts.items()}  # fmt: skip

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
            partitions={int(root): tuple(leaves) for root, leaves in data["partitions"].items()},
        )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def summary_of(start: Lsn, end: Lsn, timeline: int, tally: Tally, records: Sequence[RelationRecord]) -> dict[str, Any]:
    """Makes the content of a batch's summary row. The counts do not include the batch's notes."""
    counts: dict[str, dict[str, int]] = {}
    for (relation_id, kind), number in sorted(tally.counts.items()):
        counts.setdefault("" if relation_id == ABSENT else str(relation_id), {})[kind] = number
    partitions: dict[str, list[int]] = {}
    for root, leaf in sorted(tally.partitions):
        partitions.setdefault(str(root), []).append(leaf)
    return {
        "start": int(start),
        "end": int(end),
        "timeline": timeline,
        "transactions": tally.transactions,
        "last_xid": tally.last.xid if tally.last else None,
        "first_commit_ts": _iso(tally.first),
        "last_commit_ts": _iso(tally.last),
        "counts": counts,
        "bytes": tally.bytes,
        "relations": {str(record.relation_id): [record.name.schema, record.name.name] for record in records},
        "schemas": sorted(tally.schema_ids),
        "partitions": partitions,
    }


def _iso(ended: TransactionEnd | None) -> str | None:
    """The commit time in ISO 8601, which people can read if they open the log with another tool."""
    if ended is None:
        return None
    return (EPOCH + timedelta(microseconds=ended.commit_ts)).isoformat()


def check_rows(batches: Sequence[BatchSummary], files: Sequence[SegmentFile], span: LsnRange, log: Location) -> None:
    """Raises LogCorrupt if the files do not have exactly the rows that the summaries of ``batches`` count. Checks only
    rows in the span."""
    held = _Held(batches, span, log, _commit_times(files))
    for file in files:
        held.add(file)
    for number, batch in enumerate(batches):
        held.check(number, batch)
    held.check_commits()
    if _NO_BATCH in held.counts:
        raise LogCorrupt("has rows that do not belong to any batch", thing=str(log), lsn=span.end)


class _Held:
    """Counts the rows of the span for each batch. Rows that belong to no batch are counted under _NO_BATCH."""

    def __init__(
        self, batches: Sequence[BatchSummary], span: LsnRange, log: Location, commit_times: Mapping[int, int]
    ) -> None:
        self._starts = np.array([batch.start for batch in batches], np.int64)
        self._ends = np.array([*(batch.end for batch in batches), 0], np.int64)
        self._span = span
        self._log = log
        self._commit_times = commit_times
        self._seen: dict[int, int] = {}
        """Commit time by ``commit_lsn``, from Commit rows."""
        self.counts: dict[int, Counter[tuple[int | None, str]]] = {}
        """By the batch's index in ``batches``: the number of rows per relation and kind."""
        self._schema_ids: dict[int, set[int]] = {}

    def add(self, file: SegmentFile) -> None:
        """Count the rows of a file. A row belongs to the batch that contains the start of its transaction's commit
        record. A non-transactional logical message belongs to the batch that contains the message's own WAL record. The
        ``lsn`` of such a row is the end of this record."""
        rows = read_rows(file, _COLUMNS)
        rows = rows.filter(pc.invert(pc.is_in(rows["kind"], value_set=pa.array(NOTES))))
        at = pc.coalesce(rows["commit_lsn"], pc.subtract(rows["lsn"], 1)).to_numpy()
        number = np.searchsorted(self._starts, at, side="right") - 1
        number = np.where((number >= 0) & (at < self._ends[number]), number, _NO_BATCH)
        inside = (at >= self._span.start) & (at < self._span.end)
        rows = rows.append_column("batch", pa.array(number)).filter(pa.array(inside))
        groups = rows.group_by(["batch", "relation_id", "schema_id", "kind"]).aggregate([([], "count_all")])
        for group in groups.to_pylist():
            held = self.counts.setdefault(group["batch"], Counter())
            held[group["relation_id"], group["kind"]] += group["count_all"]
            if group["relation_id"] is not None:
                self._schema_ids.setdefault(group["batch"], set()).add(group["schema_id"])
        if self._commit_times:
            self._see_commits(rows)

    def check(self, number: int, batch: BatchSummary) -> None:
        stated: dict[tuple[int | None, str], int] = {(None, kind): count for kind, count in batch.others.items()}
        stated |= {(relation, kind): count for relation, kinds in batch.counts.items() for kind, count in kinds.items()}
        held = self.counts.get(number, Counter())
        if held != stated:
            raise LogCorrupt(
                f"batch {batch.start}..{batch.end} does not have the rows that its summary counts: it has "
                f"{held.total()} rows, and the summary counts {sum(stated.values())}", thing=str(self._log),
            )  # fmt: skip
        if odd := self._schema_ids.get(number, set()) - set(batch.schemas):
            raise LogCorrupt(
                f"batch {batch.start}..{batch.end} has rows of {len(odd)} table structures that its summary lacks",
                thing=str(self._log),
            )

    def check_commits(self) -> None:
        """Check that the commit time in each file's commit facts is the time in the transaction's Commit row."""
        for commit_lsn, commit_ts in self._commit_times.items():
            if self._span.holds_commit(Lsn(commit_lsn)) and self._seen.get(commit_lsn) != commit_ts:
                raise _unlike_its_commit(self._log, commit_lsn)

    def _see_commits(self, rows: pa.Table) -> None:
        late = pc.is_in(rows["commit_lsn"], value_set=pa.array(list(self._commit_times), pa.int64()))
        commits = rows.filter(pc.and_(late, pc.equal(rows["kind"], "C")))
        times = commits["commit_ts"].cast(pa.int64()).to_pylist()
        self._seen.update(zip(commits["commit_lsn"].to_pylist(), times, strict=True))


def _commit_times(files: Sequence[SegmentFile]) -> dict[int, int]:
    """The commit times in the files' commit facts, by ``commit_lsn``. Raises LogCorrupt if two files disagree."""
    found: dict[int, int] = {}
    for file in files:
        facts = file.commit_facts
        if facts is not None and found.setdefault(int(facts.commit_lsn), facts.commit_ts) != facts.commit_ts:
            raise _unlike_its_commit(file.path, facts.commit_lsn)
    return found


def _unlike_its_commit(thing: Location, commit_lsn: int) -> LogCorrupt:
    return LogCorrupt(
        "has a tag with another commit time than the transaction's Commit row", thing=str(thing), lsn=Lsn(commit_lsn)
    )
