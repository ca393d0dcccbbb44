"""Builds rows of the feed of table ``t (id int primary key, b text, c text)`` from short tuples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from pgcdc_assets.feed.schema import FeedColumn

COLUMNS = (FeedColumn("id", "id", 1, True), FeedColumn("b", "b", 2, False), FeedColumn("c", "c", 3, False))
OPS = {"I": "insert", "U": "update_postimage", "D": "delete", "T": "truncate"}
SCHEMA = pa.schema(
    [
        ("_pgcdc_op", pa.string()),
        ("_pgcdc_commit_lsn", pa.int64()),
        ("_pgcdc_ordinal", pa.int64()),
        ("_pgcdc_commit_ts", pa.timestamp("us", "UTC")),
        ("_pgcdc_unchanged", pa.list_(pa.int32())),
        ("_pgcdc_raw", pa.map_(pa.string(), pa.string())),
        ("id", pa.int64()),
        ("b", pa.string()),
        ("c", pa.string()),
    ]
)


def feed_rows(events: Iterable[tuple[Any, ...]], start: int = 0) -> pa.Table:
    """Returns the feed rows of events. An event is written as ``("I", id, b, c[, c unchanged[, raw]])`` (insert),
    ``("U", id, b, c[, c unchanged[, raw]])`` (update), ``("D", id)`` (delete), ``("M", old id, new id, b, c[, c
    unchanged])`` (update of the key) or ``("T",)`` (truncate). Each transaction has three events."""
    rows = []
    for place, (kind, *rest) in enumerate(events, start):
        lsn, n = 100 + place // 3, place % 3
        if kind == "M":
            rows.append(_row("update_preimage", lsn, 2 * n, rest[0]))
            kind, rest = "U", rest[1:]
        rows.append(_row(OPS[kind], lsn, 2 * n + 1, *rest))
    return pa.Table.from_pylist(rows, SCHEMA)


def _row(op: str, lsn: int, ordinal: int, key: int | None = None, b: str | None = None, c: str | None = None,
         unchanged: bool = False, raw: dict[str, str] | None = None) -> dict[str, Any]:  # fmt: skip
    return {
        "_pgcdc_op": op, "_pgcdc_commit_lsn": lsn, "_pgcdc_ordinal": ordinal, "_pgcdc_commit_ts": lsn,
        "_pgcdc_unchanged": [3] if unchanged else None, "_pgcdc_raw": list(raw.items()) if raw else None,
        "id": key, "b": b, "c": c,
    }  # fmt: skip
