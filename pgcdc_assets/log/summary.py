"""What a batch says of itself, as it is read. :func:`pgcdc_assets.log.batch.summary_of` writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName


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
            partitions={int(root): tuple(leaves) for root, leaves in data["partitions"].items()},
        )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
