"""The computation of net effects, compared with a simple model: a dict of rows, which each event changes as PostgreSQL
would."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.feed.schema import FeedColumn
from pgcdc_assets.mirror.net.neteffect import ARRIVES, after_truncates, collapse, net_rows
from tests.feed.feed_rows import COLUMNS, SCHEMA

KEYS = st.integers(0, 5)
NAMES = ("id", "b", "c", "d")
WIDE = (*COLUMNS, FeedColumn("d", "d", 4, False))


@dataclass
class Source:
    """The model: a table (id primary key, b, c, d) that records each change as a feed would."""

    rows: dict[int, tuple[Any, ...]]
    events: list[dict[str, Any]] = field(default_factory=list)
    lsn: int = 100
    n: int = 0
    values: int = 0

    def fresh(self) -> str:
        self.values += 1
        return f"v{self.values}"

    def insert(self, key: int) -> None:
        if key not in self.rows:
            self.rows[key] = (self.fresh(), self.fresh(), self.fresh())
            self._note("insert", key, self.rows[key])

    def update(self, key: int, sent: frozenset[int]) -> None:
        """Updates a row. b always changes. c and d change if they are in ``sent``. Otherwise the event has them as
        unchanged TOAST values."""
        if key in self.rows:
            self.rows[key] = self._changed(key, sent)
            self._note("update_postimage", key, self.rows[key], {3, 4} - sent)

    def move(self, key: int, to: int, sent: frozenset[int]) -> None:
        if key in self.rows and to not in self.rows:
            self._note("update_preimage", key, half=True)
            self.rows[to] = self._changed(key, sent)
            del self.rows[key]
            self._note("update_postimage", to, self.rows[to], {3, 4} - sent)

    def swap(self, a: int, b: int, sent: frozenset[int]) -> None:
        """Swaps two keys through an unused key value, in three statements."""
        if a in self.rows and b in self.rows and a != b:
            self.move(a, 99, frozenset())
            self.move(b, a, sent)
            self.move(99, b, frozenset())

    def shift(self) -> None:
        """``UPDATE t SET id = id + 1``, in the only order of rows that a non-deferrable key allows."""
        for key in sorted(self.rows, reverse=True):
            self.move(key, key + 1, frozenset())

    def delete(self, key: int) -> None:
        if self.rows.pop(key, None):
            self._note("delete", key)

    def truncate(self) -> None:
        self.rows.clear()
        self._note("truncate", None)

    def commit(self) -> None:
        self.lsn, self.n = self.lsn + 7, 0

    def _changed(self, key: int, sent: frozenset[int]) -> tuple[Any, ...]:
        _, c, d = self.rows[key]
        return self.fresh(), self.fresh() if 3 in sent else c, self.fresh() if 4 in sent else d

    def _note(self, op: str, key: int | None, row: tuple[Any, ...] = (None,) * 3, hidden: Any = frozenset(),
              half: bool = False) -> None:  # fmt: skip
        shown = [None if attnum in hidden else value for attnum, value in zip((2, 3, 4), row, strict=True)]
        self.events.append(
            {"_pgcdc_op": op, "_pgcdc_commit_lsn": self.lsn, "_pgcdc_ordinal": 2 * self.n + (not half),
             "_pgcdc_commit_ts": self.lsn, "_pgcdc_unchanged": sorted(hidden) or None, "_pgcdc_raw": None,
             **dict(zip(NAMES, (key, *shown), strict=True))}
        )  # fmt: skip
        self.n += not half


SENT = st.frozensets(st.sampled_from([3, 4]))
STEPS = st.one_of(
    st.tuples(st.just("insert"), KEYS),
    st.tuples(st.just("update"), KEYS, SENT),
    st.tuples(st.just("update"), KEYS, SENT),
    st.tuples(st.just("move"), KEYS, KEYS, SENT),
    st.tuples(st.just("move"), KEYS, KEYS, SENT),
    st.tuples(st.just("swap"), KEYS, KEYS, SENT),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("shift")),
    st.tuples(st.just("commit")),
)


def events_of(source: Source, shuffle: int) -> pa.Table:
    table = pa.Table.from_pylist(source.events, SCHEMA.append(pa.field("d", pa.string())))
    return table.take(pa.array(np.random.default_rng(shuffle).permutation(table.num_rows)))


def merged(target: dict[int, tuple[Any, ...]], result: pa.Table) -> dict[int, tuple[Any, ...]]:
    """Merges the net effects into the target, row by row. Checks that the target is in the state that the merge
    expects."""
    out = dict(target)
    for row in result.to_pylist():
        key = row["id"]
        assert row["_pgcdc_present"] == (key in target), "the target must hold exactly the keys that are expected"
        if row["_pgcdc_op"] == "D":
            del out[key]
            continue
        kept = target.get(row["_pgcdc_origin"]["id"] if row["_pgcdc_origin"] else key)
        out[key] = tuple(
            kept[at] if kept and row.get(f"_pgcdc_masked_{at + 2}") else row[name]
            for at, name in enumerate(("b", "c", "d"))
        )
    return out


@given(start=st.sets(KEYS), steps=st.lists(STEPS, max_size=40), truncate_at=st.none() | st.integers(0, 40),
       shuffle=st.integers(0, 99))  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_after_the_merge_of_net_effects_the_target_equals_the_source(
    start: set[int], steps: list[tuple[Any, ...]], truncate_at: int | None, shuffle: int
) -> None:
    target = {key: (f"b{key}", f"c{key}", f"d{key}") for key in start}
    source = Source(dict(target))
    for place, (kind, *args) in enumerate(steps):
        if place == truncate_at:
            source.truncate()
        getattr(source, kind)(*args)
    events = events_of(source, shuffle)
    result = collapse(after_truncates(events), WIDE, masked=(3, 4))
    assert merged({} if "truncate" in events["_pgcdc_op"].to_pylist() else target, result) == source.rows


class Sending(Source):
    """Like :class:`Source`, but each change of a key is sent with all values. So none of these values is an unchanged
    TOAST value."""

    def move(self, key: int, to: int, sent: frozenset[int]) -> None:
        super().move(key, to, frozenset({3, 4}))


@pytest.mark.long
@given(start=st.sets(KEYS), steps=st.lists(STEPS, max_size=40), buckets=st.integers(1, 4), shuffle=st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_events_merged_in_parts_have_the_same_effect_as_events_merged_at_once(
    start: set[int], steps: list[tuple[Any, ...]], buckets: int, shuffle: int
) -> None:
    """The events are divided by key, and each part is merged by itself. A change of a key is a delete and an insert,
    which may be in different parts."""
    target = {key: (f"b{key}", f"c{key}", f"d{key}") for key in start}
    source = Sending(dict(target))
    for kind, *args in steps:
        getattr(source, kind)(*args)
    events = events_of(source, shuffle)
    olds = {(row["_pgcdc_commit_lsn"], row["_pgcdc_ordinal"] + 1) for row in source.events
            if row["_pgcdc_op"] == "update_preimage"}  # fmt: skip
    places = zip(events["_pgcdc_commit_lsn"].to_pylist(), events["_pgcdc_ordinal"].to_pylist(), strict=True)
    events = events.append_column(ARRIVES, pa.array([place in olds for place in places], pa.bool_()))
    of = np.array([key % buckets for key in events["id"].to_pylist()], dtype=np.int64)
    out: dict[int, tuple[Any, ...]] = {}
    for number in range(buckets):
        held = {key: row for key, row in target.items() if key % buckets == number}
        out |= merged(held, collapse(events.filter(pa.array(of == number)), WIDE, masked=(3, 4)))
    assert out == source.rows


@pytest.mark.long
@given(
    start=st.lists(st.sampled_from("abc"), max_size=6),
    steps=st.lists(st.tuples(st.sampled_from(["add", "drop", "turn"]), *[st.sampled_from("abc")] * 2), max_size=30),
    shuffle=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_after_a_merge_equal_rows_without_a_key_occur_as_often_as_in_the_source(
    start: list[str], steps: list[tuple[str, str, str]], shuffle: int
) -> None:
    rows = list(start)
    events: list[tuple[str, str]] = []
    for kind, value, other in steps:
        if kind == "add":
            rows.append(value)
            events.append(("insert", value))
        elif value in rows:
            rows.remove(value)
            events.append(("delete" if kind == "drop" else "update_preimage", value))
            if kind == "turn":
                rows.append(other)
                events.append(("update_postimage", other))
    table = pa.table(
        {
            "_pgcdc_op": pa.array([op for op, _ in events], pa.string()),
            "_pgcdc_commit_lsn": pa.array([100] * len(events), pa.int64()),
            "_pgcdc_ordinal": pa.array(range(len(events)), pa.int64()),
            "_pgcdc_commit_ts": pa.array([0] * len(events), pa.timestamp("us", "UTC")),
            "_pgcdc_raw": pa.nulls(len(events), pa.map_(pa.string(), pa.string())),
            "_pgcdc_row": pa.array([str(place) for place in range(len(events))], pa.string()),
            "_pgcdc_hash": pa.array([ord(value) for _, value in events], pa.int64()),
            "v": pa.array([value for _, value in events], pa.string()),
        }
    )
    order = np.random.default_rng(shuffle).permutation(len(events))
    net = net_rows(table.take(pa.array(order)), [FeedColumn("v", "v", 1, False)])
    out = list(start)
    for row in net.removed.to_pylist():
        for _ in range(row["_pgcdc_count"]):
            out.remove(row["v"])
    assert sorted([*out, *net.added["v"].to_pylist()]) == sorted(rows)
    assert len(set(net.added["_pgcdc_row"].to_pylist())) == net.added.num_rows
