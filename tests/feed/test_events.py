"""How row messages of a table become events of its change feed, and which messages are refused."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.names import TableName
from pgcdc_assets.feed.events import Route, RowChanges, Unfollowable, changes, unchanged_lists
from pgcdc_assets.protocol.layouts import RowKind
from pgcdc_assets.protocol.shape import Shape, ShapeColumn

UNCHANGED = object()
Value = str | None | object


def row_message(kind: str, *tuples: tuple[str, Sequence[Value]], relation_id: int = 1000) -> bytes:
    """Returns a row message of pgoutput, for example of ``row_message("U", ("K", [...]), ("N", [...]))``."""
    return (
        kind.encode()
        + struct.pack(">I", relation_id)
        + b"".join(
            letter.encode() + struct.pack(">H", len(values)) + b"".join(map(_value, values))
            for letter, values in tuples
        )
    )


def _value(value: Value) -> bytes:
    if value is None:
        return b"n"
    if not isinstance(value, str):
        return b"u"
    data = value.encode()
    return b"t" + struct.pack(">I", len(data)) + data


U = UNCHANGED
INT, TEXT = PgType(23, "int4"), PgType(25, "text")
NAME = TableName("public", "t")
COLUMNS = (Column(1, "id", INT, True), Column(3, "b", TEXT), Column(4, "c", TEXT))
TABLE = Table(1000, NAME, COLUMNS, key=(1,), identity_key=(1,))


def route(table: Table = TABLE, *, full: bool = False) -> Route:
    flagged = {c.attnum for c in table.columns if full or c.attnum in table.identity_key}
    columns = tuple(ShapeColumn(c.name, c.attnum, c.type, c.attnum in flagged) for c in table.columns)
    key = tuple(column.name for column in table.key_columns)
    return Route.of(Shape(1, 1000, NAME, columns, "f" if full else "d", key), table)


def decoded(kind: RowKind, messages: list[bytes], way: Route | None = None) -> list[Any]:
    payload = pa.array(messages, pa.binary())
    return [shown(item) for item in changes(kind, payload, way or route(), pa.array(range(len(messages))))]


def shown(item: RowChanges | Unfollowable) -> Any:
    if isinstance(item, Unfollowable):
        return item.row, item.reason.split()[:3]
    columns = {attnum: text.to_pylist() for attnum, text in item.text.items()}
    lists = unchanged_lists(item, [1, 3, 4]).to_pylist()
    return item.op, item.half, item.rows.tolist(), columns, lists


def test_an_insert_is_one_event() -> None:
    found = decoded("I", [row_message("I", ("N", ["1", "x", None])), row_message("I", ("N", ["2", "", "y"]))])
    assert found == [("insert", 1, [0, 1], {1: ["1", "2"], 3: ["x", ""], 4: [None, "y"]}, [None, None])]


def test_an_update_that_keeps_the_key_is_one_event_with_a_list_of_unchanged_columns() -> None:
    found = decoded("U", [row_message("U", ("N", ["1", U, U])), row_message("U", ("N", ["2", "x", U]))])
    text = {1: ["1", "2"], 3: [None, "x"], 4: [None, None]}
    assert found == [("update_postimage", 1, [0, 1], text, [[3, 4], [4]])]


def test_an_update_that_changes_the_key_is_two_events() -> None:
    found = decoded(
        "U",
        [row_message("U", ("N", ["5", "x", "y"])), row_message("U", ("K", ["1", None, None]), ("N", ["2", "x", U]))],
    )
    assert found == [
        ("update_preimage", 0, [1], {1: ["1"]}, [None]),
        ("update_postimage", 1, [0, 1], {1: ["5", "2"], 3: ["x", "x"], 4: ["y", None]}, [None, [4]]),
    ]


def test_an_update_with_a_key_tuple_is_one_event_if_the_key_did_not_change() -> None:
    found = decoded("U", [row_message("U", ("K", ["1", None, None]), ("N", [U, "x", "y"]))])
    assert found == [("update_postimage", 1, [0], {1: ["1"], 3: ["x"], 4: ["y"]}, [None])]


def test_with_identity_full_an_unsent_toast_value_is_taken_from_the_old_tuple() -> None:
    found = decoded("U", [row_message("U", ("O", ["1", "x", "big"]), ("N", ["2", "x2", U]))], route(full=True))
    assert found == [
        ("update_preimage", 0, [0], {1: ["1"]}, [None]),
        ("update_postimage", 1, [0], {1: ["2"], 3: ["x2"], 4: ["big"]}, [None]),
    ]


def test_an_unsent_value_is_not_taken_from_an_old_tuple_that_lacks_it() -> None:
    """With publish_via_partition_root, the old tuple has the letter of the root's REPLICA IDENTITY FULL, but only the
    key columns of the partition. An unsent value is never NULL, so NULL in the old tuple means that it lacks the
    value."""
    whole, lacking = ("O", ["1", "x", "big"]), ("O", ["3", None, None])
    messages = [row_message("U", whole, ("N", ["2", "x", U])), row_message("U", lacking, ("N", ["4", "x", U]))]
    assert decoded("U", messages, route(full=True)) == [
        ("update_preimage", 0, [0, 1], {1: ["1", "3"]}, [None, None]),
        ("update_postimage", 1, [0, 1], {1: ["2", "4"], 3: ["x", "x"], 4: ["big", None]}, [None, [4]]),
    ]


def test_a_delete_by_key_contains_only_the_key() -> None:
    found = decoded("D", [row_message("D", ("K", ["1", None, None]))])
    assert found == [("delete", 1, [0], {1: ["1"]}, [None])]


def test_a_delete_under_identity_full_contains_the_whole_row() -> None:
    found = decoded("D", [row_message("D", ("O", ["1", "x", None]))], route(full=True))
    assert found == [("delete", 1, [0], {1: ["1"], 3: ["x"], 4: [None]}, [None])]


def test_update_of_a_table_without_key_contains_the_old_and_the_new_row() -> None:
    way = route(replace(TABLE, key=(), identity_key=(), replica_identity="f"), full=True)
    found = decoded("U", [row_message("U", ("O", ["1", "x", "big"]), ("N", ["1", "x2", U]))], way)
    assert found == [
        ("update_preimage", 0, [0], {1: ["1"], 3: ["x"], 4: ["big"]}, [None]),
        ("update_postimage", 1, [0], {1: ["1"], 3: ["x2"], 4: ["big"]}, [None]),
    ]


def test_an_insert_that_lacks_a_value_is_refused() -> None:
    found = decoded("I", [row_message("I", ("N", ["1", "x", "y"])), row_message("I", ("N", ["2", "x", U]))])
    assert found[0] == (1, ["an", "inserted", "row"])


def test_an_update_without_the_old_row_is_refused_for_a_table_without_a_key() -> None:
    way = route(replace(TABLE, key=(), identity_key=(), replica_identity="f"), full=True)
    found = decoded("U", [row_message("U", ("N", ["1", "x", U]))], way)
    assert found == [(0, ["an", "update", "or"])]


def test_an_update_whose_old_row_lacks_a_value_is_refused_for_a_table_without_a_key() -> None:
    way = route(replace(TABLE, key=(), identity_key=(), replica_identity="f"), full=True)
    whole, lacking = ("O", ["1", "x", "big"]), ("O", ["3", None, None])
    messages = [row_message("U", old, ("N", ["2", "x", U])) for old in (whole, lacking)]
    assert decoded("U", messages, way) == [(0, ["an", "update", "or"])]


def test_an_update_or_delete_without_the_rows_key_is_refused() -> None:
    assert decoded("D", [row_message("D", ("K", [None, None, None]))]) == [(0, ["the", "source", "sent"])]
    assert decoded("U", [row_message("U", ("N", [U, "x", "y"]))]) == [(0, ["the", "source", "sent"])]


def test_updates_and_deletes_of_a_table_published_for_inserts_only_are_refused() -> None:
    way = route(replace(TABLE, key=(), updates_seen=False))
    assert decoded("D", [row_message("D", ("K", ["1", None, None]))], way) == [(0, ["updates", "or", "deletes"])]
    assert decoded("I", [row_message("I", ("N", ["1", "x", "y"]))], way)[0][0] == "insert"


def test_events_lack_mirror_columns_that_the_relation_message_does_not_have() -> None:
    table = replace(TABLE, columns=(*COLUMNS, Column(5, "d", TEXT)))
    way = Route.of(route().shape, table)
    assert decoded("I", [row_message("I", ("N", ["1", "x", "y"]))], way)[0][3].keys() == {1, 3, 4}


def test_rows_that_were_written_before_a_column_was_added_get_the_columns_default() -> None:
    table = replace(TABLE, columns=(*COLUMNS, Column(5, "d", TEXT, missing="it's"), Column(6, "e", TEXT)))
    way = Route.of(route().shape, table, None, (1, 3, 4))
    assert decoded("I", [row_message("I", ("N", ["1", "x", "y"]))], way) == [
        ("insert", 1, [0], {1: ["1"], 3: ["x"], 4: ["y"], 5: ["it's"], 6: [None]}, [None])
    ]
    key = decoded("D", [row_message("D", ("K", ["1", None, None]))], way)
    assert key == [("delete", 1, [0], {1: ["1"]}, [None])]


def test_columns_are_matched_by_attnum_even_if_their_names_were_exchanged() -> None:
    table = replace(TABLE, columns=(COLUMNS[0], Column(3, "c", TEXT), Column(4, "b", TEXT)))
    way = Route.of(route().shape, table, None, (1, 3, 4))
    assert decoded("I", [row_message("I", ("N", ["1", "x", "y"]))], way)[0][3] == {1: ["1"], 3: ["x"], 4: ["y"]}
    gone = Route.of(route().shape, table, None, (1, None, 4))
    assert decoded("I", [row_message("I", ("N", ["1", "x", "y"]))], gone)[0][3] == {1: ["1"], 3: [None], 4: ["y"]}
