"""The summary row of a batch, which counts the batch's rows. Writes and reads summaries, and checks rows against
them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc_assets.core.arrays import Ints
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
    rows in the span. Also checks that the commit time in each file's commit facts is the time in the transaction's
    Commit row."""
    stated_times = _commit_times(files)
    counts: defaultdict[int, Counter[tuple[int | None, str]]] = defaultdict(Counter)
    schema_ids: defaultdict[int, set[int]] = defaultdict(set)
    times: dict[int, int] = {}
    starts = np.array([batch.start for batch in batches], np.int64)
    ends = np.array([*(batch.end for batch in batches), 0], np.int64)
    for file in files:
        rows = _numbered(read_rows(file, _COLUMNS), starts, ends, span)
        groups = rows.group_by(["batch", "relation_id", "schema_id", "kind"]).aggregate([([], "count_all")])
        for group in groups.to_pylist():
            counts[group["batch"]][group["relation_id"], group["kind"]] += group["count_all"]
            if group["relation_id"] is not None:
                schema_ids[group["batch"]].add(group["schema_id"])
        late = pc.is_in(rows["commit_lsn"], value_set=pa.array(list(stated_times), pa.int64()))
        commits = rows.filter(pc.and_(late, pc.equal(rows["kind"], "C")))
        times.update(
            zip(commits["commit_lsn"].to_pylist(), commits["commit_ts"].cast(pa.int64()).to_pylist(), strict=True)
        )
    for number, batch in enumerate(batches):
        _check(batch, counts[number], schema_ids[number], log)
    for commit_lsn, stated in stated_times.items():
        if span.holds_commit(Lsn(commit_lsn)) and times.get(commit_lsn) != stated:
            raise _unlike_its_commit(log, commit_lsn)
    if _NO_BATCH in counts:
        raise LogCorrupt("has rows that do not belong to any batch", thing=str(log), lsn=span.end)


def _numbered(rows: pa.Table, starts: Ints, ends: Ints, span: LsnRange) -> pa.Table:
    """The rows of the span, without notes. The new column ``batch`` has the index of each row's batch, or _NO_BATCH.
    ``starts`` and ``ends`` have the LSNs of the batches; ``ends`` has one more LSN, 0, for _NO_BATCH. A row belongs to
    the batch that contains the start of its transaction's commit record. A non-transactional logical message belongs to
    the batch that contains the message's own WAL record. The ``lsn`` of such a row is the end of this record."""
    rows = rows.filter(pc.invert(pc.is_in(rows["kind"], value_set=pa.array(NOTES))))
    at = pc.coalesce(rows["commit_lsn"], pc.subtract(rows["lsn"], 1)).to_numpy()
    number = np.searchsorted(starts, at, side="right") - 1
    number = np.where((number >= 0) & (at < ends[number]), number, _NO_BATCH)
    inside = (at >= span.start) & (at < span.end)
    return rows.append_column("batch", pa.array(number)).filter(pa.array(inside))


def _check(batch: BatchSummary, held: Counter[tuple[int | None, str]], schema_ids: set[int], log: Location) -> None:
    stated: dict[tuple[int | None, str], int] = {(None, kind): count for kind, count in batch.others.items()}
    stated |= {(relation, kind): count for relation, kinds in batch.counts.items() for kind, count in kinds.items()}
    if held != stated:
        raise LogCorrupt(
            f"batch {batch.start}..{batch.end} does not have the rows that its summary counts: it has "
            f"{held.total()} rows, and the summary counts {sum(stated.values())}", thing=str(log),
        )  # fmt: skip
    if odd := schema_ids - set(batch.schemas):
        raise LogCorrupt(
            f"batch {batch.start}..{batch.end} has rows of {len(odd)} table structures that its summary lacks",
            thing=str(log),
        )


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
