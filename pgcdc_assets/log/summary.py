"""The summary row of a batch, for readers. :func:`pgcdc_assets.log.batch.summary_of` writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName


@dataclass(frozen=True)
class BatchSummary:
    """The summary of a batch: whole transactions of the WAL in ``(start, end]``."""

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
    """Rows that belong to no relation, by kind (C, M)."""
    bytes: int
    """Size of the messages, uncompressed."""
    relations: dict[int, TableName]
    schemas: tuple[int, ...]
    """The schema_ids of its rows."""
    partitions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For relations that are published via their root: the leaves that the stream named within the batch. The stream
    names a leaf once per connection, before the first row of the leaf."""

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
