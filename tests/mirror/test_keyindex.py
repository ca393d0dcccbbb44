"""KeyIndex finds keys in a target as a dict does, for every type of key column that PostgreSQL has."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.feed.schema import FeedColumn
from pgcdc_assets.mirror.delta.keyindex import KeyIndex

NAN = float("nan")
DOMAINS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int32(), [-1, 0, 1, 2**31 - 1]),
    (pa.string(), ["", "a", "A", "é", "a\x00b"]),
    (pa.float64(), [0.0, -0.0, 1.5, NAN, float("inf")]),
    (pa.decimal128(9, 2), [Decimal("1.00"), Decimal("-1.00"), Decimal("0.00")]),
    (pa.bool_(), [True, False]),
    (pa.date32(), [date(1, 1, 1), date(2024, 2, 29)]),
    (pa.timestamp("us", "UTC"), [datetime(1900, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, 0, 0, 0, 1, tzinfo=UTC)]),
    (pa.binary(), [b"", b"\x00", b"a"]),
    (pa.list_(pa.int32()), [[], [1], [1, 2], [2, 1], [None], [12]]),
    (pa.list_(pa.float64()), [[], [0.0], [-0.0], [NAN, 1.0]]),
    (pa.list_(pa.list_(pa.string())), [[], [[]], [["a"], ["b"]], [["a", "b"]], [["a,b"]]]),
]
RAW_TYPE = pa.map_(pa.string(), pa.string())


def comparable(value: Any) -> Any:
    """The value in a form in which 0 equals -0, and NaN equals NaN."""
    if isinstance(value, float):
        return "NaN" if value != value else value + 0.0
    return tuple(comparable(item) for item in value) if isinstance(value, list) else value


def texts(row: tuple[Any, ...]) -> dict[str, str] | None:
    found = {f"k{place}": value.removeprefix("raw ") for place, value in enumerate(row) if misfit(value)}
    return found or None


def misfit(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("raw ")


def table(rows: list[tuple[Any, ...]], kinds: list[pa.DataType]) -> pa.Table:
    data = {
        f"c{place}": pa.array([None if misfit(row[place]) else row[place] for row in rows], kind)
        for place, kind in enumerate(kinds)
    }
    return pa.table({**data, "_pgcdc_raw": pa.array([texts(row) for row in rows], RAW_TYPE)})


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[pa.DataType], list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    chosen = draw(st.lists(st.sampled_from(DOMAINS), min_size=1, max_size=3))
    values = [st.sampled_from([*domain, "raw x", "raw y"]) for _, domain in chosen]
    rows = st.lists(st.tuples(*values), max_size=12)
    source = draw(rows)
    unique = {tuple(comparable(value) for value in row): row for row in source}
    return [kind for kind, _ in chosen], list(unique.values()), draw(rows)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_exactly_the_keys_of_the_source_are_found(case: tuple[Any, ...]) -> None:
    kinds, source, target = case
    columns = [FeedColumn(f"c{place}", f"k{place}", place + 1, True) for place in range(len(kinds))]
    index = KeyIndex(table(source, kinds), columns)
    at, rows = index.find(table(target, kinds).select(index.columns))
    places = {tuple(comparable(value) for value in row): place for place, row in enumerate(source)}
    keys = [tuple(comparable(value) for value in row) for row in target]
    assert sorted(zip(at.tolist(), rows.tolist(), strict=True)) == [
        (place, places[key]) for place, key in enumerate(keys) if key in places
    ]


def test_duplicate_key_in_rows_to_merge_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="2 rows of a merge source have 1 keys"):
        KeyIndex(table([(1,), (1,)], [pa.int32()]), [FeedColumn("c0", "k0", 1, True)])
