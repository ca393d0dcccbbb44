"""How all events of a key are combined into one change (the net effect). The events are written by hand. A raw text is
the text of a value that does not fit the type of its column."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.errors import MergeMismatch
from pgcdc_assets.feed.schema import COMMIT_LSN, HASH, LEAF, FeedColumn
from pgcdc_assets.mirror.delta.keyindex import KeyIndex
from pgcdc_assets.mirror.net.neteffect import (
    COUNT,
    after_truncates,
    collapse,
    collapse_touched,
    map_keys,
    net_rows,
    raw_maps,
)
from tests.feed.feed_rows import COLUMNS, feed_rows


def net(*events: tuple[Any, ...], columns: Sequence[FeedColumn] = COLUMNS) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = collapse(feed_rows(events), columns, masked=(3,)).to_pylist()
    return rows


def essence(row: dict[str, Any]) -> tuple[Any, ...]:
    origin = row["_pgcdc_origin"]
    return (row["_pgcdc_op"], row["id"], row["_pgcdc_present"], row["b"], row["c"], row["_pgcdc_masked_3"],
            origin and origin["id"])  # fmt: skip


def test_order_of_events_in_files_does_not_change_the_net_effect() -> None:
    events = feed_rows([("I", 1, "x", "y"), ("U", 1, "x2", "y"), ("D", 1)])
    reverse = events.take(pa.array([2, 1, 0]))
    assert collapse(reverse, COLUMNS).num_rows == 0


def test_an_unsent_value_is_taken_from_an_earlier_event_of_the_row() -> None:
    rows = net(("U", 1, "x", "big"), ("U", 1, "x2", None, True), ("U", 1, "x3", None, True))
    assert [essence(row) for row in rows] == [("U", 1, True, "x3", "big", False, None)]


def test_an_unsent_value_is_not_taken_from_a_deleted_row() -> None:
    """The row that is now under key 2 was under key 1 before. The value X belonged to a row that was deleted."""
    rows = net(("U", 2, "x", "X"), ("D", 2), ("M", 1, 2, "y", None, True))
    assert ("U", 2, True, "y", None, True, 1) in [essence(row) for row in rows]


def test_a_row_whose_key_changed_and_changed_back_is_looked_up_under_its_original_key() -> None:
    rows = net(("M", 1, 2, "x", None, True), ("M", 2, 1, "x", None, True))
    assert [essence(row) for row in rows] == [("U", 1, True, "x", None, True, None)]


def test_the_raw_text_of_a_value_is_kept_while_the_value_is_unchanged() -> None:
    events = feed_rows([("U", 1, "x", None, False, {"c": "infinity"}), ("U", 1, "x2", None, True, {"b": "odd"})])
    row = collapse(events, COLUMNS, masked=(3,)).to_pylist()[0]
    assert sorted(row["_pgcdc_raw"]) == [("b", "odd"), ("c", "infinity")]
    assert row["_pgcdc_masked_3"] is False


def test_the_raw_text_of_an_overwritten_value_is_dropped() -> None:
    events = feed_rows([("U", 1, "x", None, False, {"c": "infinity"}), ("U", 1, "x2", "fits")])
    assert collapse(events, COLUMNS).to_pylist()[0]["_pgcdc_raw"] is None


def test_key_values_that_do_not_fit_their_type_are_distinguished_by_their_raw_texts() -> None:
    events = feed_rows([("I", None, "x", "y", False, {"id": "inf"}), ("I", None, "p", "q", False, {"id": "-inf"})])
    assert collapse(events, COLUMNS).num_rows == 2


@pytest.mark.parametrize(
    "events",
    [
        [("I", 1, "x", "y"), ("I", 1, "x", "y")],
        [("D", 1), ("U", 1, "x", "y")],
        [("D", 1), ("D", 1)],
        [("I", 2, "x", "y"), ("M", 1, 2, "x", "y")],
    ],
)
def test_changes_that_contradict_each_other_are_refused(events: list[tuple[Any, ...]]) -> None:
    with pytest.raises(MergeMismatch, match="contradict"):
        net(*events)


def test_a_change_of_key_with_only_one_of_its_two_events_is_refused() -> None:
    with pytest.raises(MergeMismatch, match="but not the new row") as refused:
        collapse(feed_rows([("M", 1, 2, "x", "y")]).slice(0, 1), COLUMNS)
    assert refused.value.lsn == 100


def test_truncate_drops_earlier_events() -> None:
    left = after_truncates(feed_rows([("I", 1, "x", "y"), ("T",), ("I", 2, "p", "q"), ("T",), ("I", 3, "r", "s")]))
    assert left["id"].to_pylist() == [3]


def test_without_a_truncate_all_events_are_kept() -> None:
    left = after_truncates(feed_rows([("I", 1, "x", "y")]))
    assert left["id"].to_pylist() == [1]


def test_truncate_of_a_leaf_drops_earlier_events_of_that_leaf() -> None:
    events = feed_rows([("I", 1, "x", "y"), ("I", 2, "x", "y"), ("T",), ("I", 3, "x", "y")])
    events = events.append_column("_pgcdc_leaf", pa.array(["a", "b", "a", "a"]))
    left = after_truncates(events)
    assert left["id"].to_pylist() == [2, 3]


def test_a_truncate_of_a_leaf_keeps_rows_that_other_leaves_got_after_a_truncate_of_the_table() -> None:
    """A truncate of a leaf also keeps a row whose leaf is not known."""
    events = feed_rows([("I", 1, "x", "y"), ("T",), *(("I", key, "x", "y") for key in (2, 3, 4)), ("T",)])
    events = events.append_column("_pgcdc_leaf", pa.array(["a", None, "a", "b", None, "a"], pa.string()))
    left = after_truncates(events)
    assert left["id"].to_pylist() == [3, 4]


def test_no_events_give_no_rows_to_merge() -> None:
    events = feed_rows([("I", 1, "x", "y")]).slice(0, 0)
    assert collapse(events, COLUMNS, masked=(3,)).num_rows == 0


def test_an_array_may_be_a_key() -> None:
    """Equal arrays are the same key. An empty array, an array with a NULL, and NULL (for a value that does not fit) are
    different keys."""
    events = feed_rows([("I", place, "x", "y") for place in range(4)] + [("D", 0)])
    keys = pa.array([[1, 2], [], [None], None, [1, 2]], pa.list_(pa.int32()))
    table = events.set_column(events.schema.get_field_index("id"), "id", keys)
    rows = collapse(table, COLUMNS).to_pylist()
    assert [row["id"] for row in rows] == [[], [None], None]


# A repair computes the net effect of the keys that changed in an LSN range again. It uses all events between the start
# of the range and the mirror's position. In these tests, each transaction has three events, and the transactions have
# the LSNs 100, 101 and 102.


def repaired(
    events: Sequence[tuple[Any, ...]] | pa.Table, touched: LsnRange | None, masked: Sequence[int] = (3,)
) -> dict[int, dict[str, Any]]:
    table = events if isinstance(events, pa.Table) else feed_rows(events)
    return {row["id"]: row for row in collapse_touched(table, COLUMNS, masked, touched).to_pylist()}


def test_repair_covers_the_keys_changed_in_the_range_and_the_keys_their_rows_moved_to() -> None:
    events = [
        ("I", 1, "x", "y"), ("I", 2, "x", "y"), ("I", 3, "x", "y"),
        ("U", 1, "x2", "y"), ("M", 2, 9, "x", "y"), ("D", 3),
        ("M", 9, 8, "x", "y"), ("I", 4, "x", "y"), ("U", 4, "x2", "y"),
    ]  # fmt: skip
    rows = repaired(events, LsnRange(Lsn(101), Lsn(102)))
    assert {key: row["_pgcdc_op"] for key, row in rows.items()} == {1: "U", 2: "D", 3: "D", 8: "U", 9: "D"}
    assert repaired(events, None).keys() == {1, 2, 3, 4, 8, 9}


def test_repair_follows_a_row_through_several_keys_in_any_order_of_feed_files() -> None:
    events = feed_rows([
        ("I", 1, "x", "y"), ("U", 1, "x2", "y"), ("U", 1, "x3", "y"),
        ("M", 1, 2, "x3", "y"), ("M", 2, 3, "x3", "y"), ("M", 5, 6, "p", "q"),
    ])  # fmt: skip
    for first in range(len(events)):
        rotated = pa.concat_tables([events.slice(first), events.slice(0, first)])
        assert repaired(rotated, LsnRange(Lsn(100), Lsn(101))).keys() == {1, 2, 3}


def test_repair_of_a_range_without_events_computes_no_row_again() -> None:
    assert repaired(feed_rows([("I", 1, "x", "y")]).slice(0, 0), LsnRange(Lsn(100), Lsn(101))) == {}


def test_repair_expects_a_row_in_the_mirror_only_if_a_value_was_not_sent() -> None:
    events = [("U", 1, "x", None, True), ("U", 2, "x", "y"), ("D", 3), ("M", 4, 5, "x", "y")]
    rows = repaired(events, None)
    assert {key: row["_pgcdc_present"] for key, row in rows.items()} == {1: True, 2: None, 3: None, 4: None, 5: None}
    assert {key for key, row in rows.items() if row["_pgcdc_masked_3"]} == {1}
    assert {row["_pgcdc_origin"] for row in rows.values()} == {None}


@pytest.mark.parametrize(
    "events",
    [
        [("D", 2), ("M", 1, 2, "x", None, True)],
        [("D", 2), ("M", 1, 2, "x", None, True), ("I", 1, "x", "y"), ("U", 2, "x2", None, True)],
        [("M", 1, 2, "x", None, True), ("M", 3, 1, "x", "y"), ("M", 1, 4, "x", "y"), ("M", 2, 1, "x", None, True)],
    ],
    ids=["the key of a deleted row", "the old key used again", "the same key again"],
)
def test_repair_is_refused_if_a_row_with_an_unsent_value_has_changed_its_key(events: list[tuple[Any, ...]]) -> None:
    """The mirror may still have another row under this key."""
    for touched in (None, LsnRange(Lsn(100), Lsn(101))):
        with pytest.raises(MergeMismatch, match="changed its key"):
            repaired(events, touched)


def test_repair_allows_a_change_of_the_key_if_an_event_has_all_values_or_the_row_is_not_repaired() -> None:
    events = [
        ("U", 1, "x", "y"), ("M", 1, 2, "x", None, True), ("U", 2, "x2", None, True),
        ("M", 3, 4, "x", None, True), ("M", 5, 6, "x", None, True), ("D", 6),
    ]  # fmt: skip
    rows = repaired(events, LsnRange(Lsn(100), Lsn(101)))
    assert {key: (row["_pgcdc_op"], row["c"], row["_pgcdc_present"]) for key, row in rows.items()} == {
        1: ("D", None, None),
        2: ("U", "y", None),
    }


def test_repair_expects_a_row_in_the_mirror_if_a_value_of_any_column_was_not_sent() -> None:
    events = feed_rows([("U", 1, None, "y"), ("U", 2, "x", None), ("U", 3, "x", "y")])
    lacking = pa.array([[2], [3], None], pa.list_(pa.int32()))
    events = events.set_column(events.schema.get_field_index("_pgcdc_unchanged"), "_pgcdc_unchanged", lacking)
    rows = repaired(events, None, masked=(2, 3))
    assert {key: row["_pgcdc_present"] for key, row in rows.items()} == {1: True, 2: True, 3: None}


def test_raw_texts_of_a_row_are_null_if_all_its_values_fit_their_types() -> None:
    kind = pa.map_(pa.string(), pa.string())
    texts = {"a": pa.array(["x", None, "z", None]), "b": pa.array([None, None, "y", None])}
    maps = raw_maps(texts, 4, kind)
    assert maps.to_pylist() == [[("a", "x")], None, [("a", "z"), ("b", "y")], None]
    assert map_keys(pa.chunked_array([maps])).to_pylist() == ["a", "a", "b"]
    assert map_keys(pa.chunked_array([], kind)) == pa.array([], pa.string())


# KeyIndex finds the same keys as a Python dict would, for every type of a key column ----------------

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
def test_key_index_finds_exactly_the_wanted_keys(case: tuple[Any, ...]) -> None:
    kinds, source, target = case
    columns = [FeedColumn(f"c{place}", f"k{place}", place + 1, True) for place in range(len(kinds))]
    index = KeyIndex(table(source, kinds), columns)
    at, rows = index.find(table(target, kinds).select(index.columns))
    places = {tuple(comparable(value) for value in row): place for place, row in enumerate(source)}
    keys = [tuple(comparable(value) for value in row) for row in target]
    assert sorted(zip(at.tolist(), rows.tolist(), strict=True)) == [
        (place, places[key]) for place, key in enumerate(keys) if key in places
    ]


def test_rows_to_merge_with_the_same_key_are_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="2 rows of a merge source have only 1 different keys"):
        KeyIndex(table([(1,), (1,)], [pa.int32()]), [FeedColumn("c0", "k0", 1, True)])


# Net effects of changes to tables without a key -----------------------------------------------------

MULTISET_COLUMNS = (FeedColumn("b", "b", 2, False), FeedColumn("c", "c", 3, False))


def events(*rows: tuple[str, str, str]) -> pa.Table:
    """Events from tuples ``("I"|"D", value, leaf)``. The hash of a row depends only on its value."""
    table = feed_rows((op, 0, value, value) for op, value, _ in rows)
    hashes = pa.array([ord(value) for _, value, _ in rows], pa.int64())
    return table.append_column(HASH, hashes).append_column(LEAF, pa.array([leaf for *_, leaf in rows], pa.string()))


def test_equal_rows_of_different_leaves_are_combined_separately() -> None:
    net = net_rows(events(("D", "x", "one"), ("D", "x", "one"), ("I", "x", "two"), ("D", "y", "two")), MULTISET_COLUMNS)
    assert net.added.select(["b", LEAF]).to_pylist() == [{"b": "x", LEAF: "two"}]
    assert sorted(net.removed.select(["b", LEAF, COUNT]).to_pylist(), key=str) == [
        {"b": "x", LEAF: "one", COUNT: 2},
        {"b": "y", LEAF: "two", COUNT: 1},
    ]


def test_an_insert_and_a_delete_of_equal_rows_cancel_out_and_the_newest_insert_is_kept() -> None:
    """Each transaction has three events, so the last insert of x is in the second transaction, at LSN 101."""
    net = net_rows(
        events(("I", "x", "a"), ("D", "x", "a"), ("I", "z", "a"), ("D", "z", "a"), ("I", "x", "a"), ("D", "y", "a")),
        MULTISET_COLUMNS,
    )
    assert net.added.select(["b", COMMIT_LSN]).to_pylist() == [{"b": "x", COMMIT_LSN: 101}]
    assert net.removed["b"].to_pylist() == ["y"]
    # The row y is inserted once, and the row x three times. One x is deleted again.
    net = net_rows(
        events(("I", "x", "a"), ("D", "x", "a"), ("I", "y", "a"), ("I", "x", "a"), ("I", "x", "a")), MULTISET_COLUMNS
    )
    assert sorted(net.added.select(["b", COMMIT_LSN]).to_pydict()[COMMIT_LSN]) == [100, 101, 101]


def test_removed_rows_have_no_leaf_if_the_mirror_has_no_leaf_column() -> None:
    net = net_rows(events(("D", "x", "one")), MULTISET_COLUMNS, by_leaf=False)
    assert LEAF not in net.removed.column_names


@pytest.mark.parametrize(("gone", "came"), [("x", "y"), ("x", None), (None, "x")])
def test_different_rows_with_the_same_hash_are_distinguished(gone: str | None, came: str | None) -> None:
    table = feed_rows([("D", 0, gone, "c"), ("I", 0, came, "c")]).append_column(HASH, pa.array([7, 7], pa.int64()))
    net = net_rows(table, MULTISET_COLUMNS)
    assert (net.removed["b"].to_pylist(), net.added["b"].to_pylist()) == ([gone], [came])


def test_a_delete_and_an_insert_of_equal_rows_with_nan_cancel_out() -> None:
    table = feed_rows([("D", 0, "b", "c"), ("I", 0, "b", "c")]).append_column(HASH, pa.array([7, 7], pa.int64()))
    floats = pa.array([float("nan"), float("nan")], pa.float64())
    net = net_rows(table.set_column(table.schema.get_field_index("b"), "b", floats), MULTISET_COLUMNS)
    assert (net.removed.num_rows, net.added.num_rows) == (0, 0)


def test_the_net_effect_of_an_empty_list_of_events_is_empty() -> None:
    net = net_rows(events(("D", "x", "one")).slice(0, 0), MULTISET_COLUMNS)
    assert (net.added.num_rows, net.removed.num_rows) == (0, 0)
