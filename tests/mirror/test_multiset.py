"""Net effects of changes to tables without a key."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pgcdc_assets.feed.schema import COMMIT_LSN, HASH, LEAF, FeedColumn
from pgcdc_assets.mirror.net.multiset import COUNT, net_rows
from tests.feed.feed_rows import feed_rows

COLUMNS = (FeedColumn("b", "b", 2, False), FeedColumn("c", "c", 3, False))


def events(*rows: tuple[str, str, str]) -> pa.Table:
    """Events from tuples ``("I"|"D", value, leaf)``. The hash of a row depends only on its value."""
    table = feed_rows((op, 0, value, value) for op, value, _ in rows)
    hashes = pa.array([ord(value) for _, value, _ in rows], pa.int64())
    return table.append_column(HASH, hashes).append_column(LEAF, pa.array([leaf for *_, leaf in rows], pa.string()))


def test_rows_of_each_leaf_are_netted_and_removed_separately() -> None:
    net = net_rows(events(("D", "x", "one"), ("D", "x", "one"), ("I", "x", "two"), ("D", "y", "two")), COLUMNS)
    assert net.added.select(["b", LEAF]).to_pylist() == [{"b": "x", LEAF: "two"}]
    assert sorted(net.removed.select(["b", LEAF, COUNT]).to_pylist(), key=str) == [
        {"b": "x", LEAF: "one", COUNT: 2},
        {"b": "y", LEAF: "two", COUNT: 1},
    ]


def test_inserted_and_deleted_equal_rows_cancel_out_and_the_newest_image_remains() -> None:
    """The helper puts three events into each transaction, so the newest image is from the second transaction."""
    net = net_rows(
        events(("I", "x", "a"), ("D", "x", "a"), ("I", "z", "a"), ("D", "z", "a"), ("I", "x", "a"), ("D", "y", "a")),
        COLUMNS,
    )
    assert net.added.select(["b", COMMIT_LSN]).to_pylist() == [{"b": "x", COMMIT_LSN: 101}]
    assert net.removed["b"].to_pylist() == ["y"]
    # The row y is inserted once, and the row x three times. One x is deleted again.
    net = net_rows(events(("I", "x", "a"), ("D", "x", "a"), ("I", "y", "a"), ("I", "x", "a"), ("I", "x", "a")), COLUMNS)
    assert sorted(net.added.select(["b", COMMIT_LSN]).to_pydict()[COMMIT_LSN]) == [100, 101, 101]


def test_removed_rows_have_no_leaf_where_the_mirror_does_not_record_it() -> None:
    net = net_rows(events(("D", "x", "one")), COLUMNS, by_leaf=False)
    assert LEAF not in net.removed.column_names


@pytest.mark.parametrize(("gone", "came"), [("x", "y"), ("x", None), (None, "x")])
def test_rows_with_the_same_hash_are_distinguished(gone: str | None, came: str | None) -> None:
    table = feed_rows([("D", 0, gone, "c"), ("I", 0, came, "c")]).append_column(HASH, pa.array([7, 7], pa.int64()))
    net = net_rows(table, COLUMNS)
    assert (net.removed["b"].to_pylist(), net.added["b"].to_pylist()) == ([gone], [came])


def test_rows_with_nan_are_equal() -> None:
    table = feed_rows([("D", 0, "b", "c"), ("I", 0, "b", "c")]).append_column(HASH, pa.array([7, 7], pa.int64()))
    floats = pa.array([float("nan"), float("nan")], pa.float64())
    net = net_rows(table.set_column(table.schema.get_field_index("b"), "b", floats), COLUMNS)
    assert (net.removed.num_rows, net.added.num_rows) == (0, 0)


def test_no_events_have_no_net_effect() -> None:
    net = net_rows(events(("D", "x", "one")).slice(0, 0), COLUMNS)
    assert (net.added.num_rows, net.removed.num_rows) == (0, 0)
