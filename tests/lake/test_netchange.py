"""`Lake.diff`, `Lake.undo` and `LakeAt.changes`.

`diff` returns the net change between two points: one row for each key whose row differs, with its old and new values.
`undo` returns SQL that restores the old rows on the source. `changes` returns each single change from the change feed.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.catalog import Column, PgType, Table
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.errors import FeedGap, LakeError, UnknownTable, UsageError
from pgcdc_assets.feed.file import FeedWriter
from pgcdc_assets.feed.schema import feed_schema
from pgcdc_assets.lake import netchange, tableat
from pgcdc_assets.lake.undo import equals, literal, table_identifier, value_text
from pgcdc_assets.mirror.delta import rowgroups
from pgcdc_assets.protocol.text.typed import RAW_TYPE
from pgcdc_assets.structure.successor import successor
from tests.lake.onetable import (
    DELETE,
    INSERT,
    INT,
    NAME,
    OLD,
    OWNER,
    TAGS,
    TEXT,
    TIME,
    TRUNCATE,
    UPDATE,
    OneTable,
    T,
    renamed,
)

ROWS = [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}, {"id": "3", "v": "three"}]


def changed_rows(change: pa.Table) -> list[tuple[str, Any, Any]]:
    """For each changed key, in order: the kind of change, and ``(id, v)`` of the old and of the new row."""
    rows = [
        (row["kind"], *(image and (image["id"], image["v"]) for image in (row["before"], row["after"])))
        for row in change.to_pylist()
    ]
    return sorted(rows, key=lambda row: row[1] or row[2])


def test_diff_has_one_row_with_old_and_new_values_for_each_key_whose_row_differs(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), (DELETE, {"id": "2"}), (INSERT, {"id": "4", "v": "four"}))
    change = at.lake.diff("public.t", 100)
    assert changed_rows(change) == [
        ("update", (1, "one"), (1, "ONE")),
        ("delete", (2, "two"), None),
        ("insert", None, (4, "four")),
    ]
    assert [row["after"]["_pgcdc_commit_lsn"] for row in change.to_pylist() if row["kind"] == "update"] == [199]
    assert changed_rows(at.lake.diff(NAME, at.lake.at(200), at.lake.at(100))) == [
        ("update", (1, "ONE"), (1, "one")), ("insert", None, (2, "two")), ("delete", (4, "four"), None),
    ]  # fmt: skip
    assert at.lake.diff(NAME, 200, 200).num_rows == 0


def test_diff_omits_rows_that_were_changed_and_changed_back(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    at.turn(200, (UPDATE, {"id": "1", "v": "other"}), (OLD, {"id": "2"}), (UPDATE, {"id": "9", "v": "two"}))
    at.turn(300, (UPDATE, {"id": "1", "v": "one"}), (OLD, {"id": "9"}), (UPDATE, {"id": "2", "v": "two"}))
    assert at.lake.diff(NAME, 100, 300).num_rows == 0
    assert changed_rows(at.lake.diff(NAME, 100, 200)) == [
        ("update", (1, "one"), (1, "other")), ("delete", (2, "two"), None), ("insert", None, (9, "two")),
    ]  # fmt: skip


def test_diff_omits_rows_that_only_a_compaction_wrote_again(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    at.compact()
    at.turn(200, (DELETE, {"id": "3"}))
    at.compact()
    at.publish(200)
    assert changed_rows(at.lake.diff(NAME, 100)) == [("delete", (3, "three"), None)]
    assert changed_rows(at.lake.diff(NAME, 200, 100)) == [("insert", None, (3, "three"))]


def test_diff_reads_only_rows_that_were_written_or_deleted_between_its_two_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = OneTable(tmp_path, [{"id": str(number)} for number in range(1000)])
    at.turn(200, (INSERT, {"id": "1000"}))
    at.turn(300, (INSERT, {"id": "1001"}), (DELETE, {"id": "1000"}))
    read: list[tuple[int, int]] = []
    real = rowgroups.RowGroup.read

    def counted(group: rowgroups.RowGroup, names: list[str]) -> pa.Table:
        read.append((group.rows, len(names)))
        return real(group, names)

    monkeypatch.setattr(rowgroups.RowGroup, "read", counted)
    assert changed_rows(at.lake.diff(NAME, 200)) == [("delete", (1000, None), None), ("insert", None, (1001, None))]
    assert {rows for rows, _ in read} == {1}, "the file of the copy is the same at both points"
    at.turn(400, (DELETE, {"id": "7"}))
    assert netchange._Side(version(at, 300), version(at, 400)).count == 1, "the other rows of the file stay"


def test_diff_shows_a_truncate_as_deletes_of_the_rows_that_were_not_inserted_again(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    at.turn(200, (TRUNCATE, {}), (INSERT, {"id": "2", "v": "two"}))
    assert [row[:2] for row in changed_rows(at.lake.diff(NAME, 100))] == [
        ("delete", (1, "one")),
        ("delete", (3, "three")),
    ]


def test_diff_of_points_with_different_columns_is_refused(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    wider = replace(T, columns=(*T.columns, Column(6, "more", TEXT)))
    other = OneTable(tmp_path / "other", ROWS, wider)
    with pytest.raises(
        LakeError, match=r"does not have the same columns in versions .*; compare points that are both before"
    ):
        netchange.net_change(version(at), version(other), wider)
    with pytest.raises(UnknownTable):
        at.lake.diff("public.u", 100)


def test_diff_of_points_with_different_keys_is_refused(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "same"}, {"id": "2", "v": "same"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "same", "n": "1.00"}), (UPDATE, {"id": "2", "v": "same", "n": "1.00"}))
    before, after = version(at, 100), version(at, 200)
    with pytest.raises(LakeError, match="two rows with equal values of the table's key columns"):
        netchange.net_change(before, after, replace(T, key=(2,)))
    with pytest.raises(LakeError, match="key columns had in version"):
        netchange.net_change(before, after, replace(T, key=(7,)))


def test_diff_compares_rows_by_value_if_the_structure_changed_between_the_points(tmp_path: Path) -> None:
    """A schema change may rewrite a mirror's rows without a new commit_lsn. So an equal commit_lsn does not prove that
    two rows are equal."""
    at = OneTable(tmp_path, ROWS)
    before = version(at)
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), lsn=100)
    after = version(at)
    assert netchange.net_change(before, after, T).num_rows == 0, "the same transaction changed the row last"
    reshaped = replace(after, metadata={**after.metadata, "configuration": {"pgcdc.structure": "{}"}})
    assert changed_rows(netchange.net_change(before, reshaped, T)) == [("update", (1, "one"), (1, "ONE"))]


def test_diff_pairs_rows_by_the_key_although_another_column_had_its_present_name(tmp_path: Path) -> None:
    table = replace(T, key=(2,))
    at = OneTable(tmp_path, [{"id": "1", "v": "key"}], table)
    at.turn(200, (OLD, {"id": "1", "v": "key"}), (UPDATE, {"id": "2", "v": "key"}))
    for now in (renamed(renamed(table, id="c"), v="id"), renamed(table, id="v", v="id")):
        at.alter(now)
        assert at.lake.diff(NAME, 100, 200)["kind"].to_pylist() == ["update"]


def test_diff_takes_the_name_of_the_key_from_the_structure_that_the_mirror_records(tmp_path: Path) -> None:
    then = replace(renamed(T, id="c", v="id"), key=(2,))
    at = OneTable(tmp_path, [{"id": "key", "c": "1"}], then)
    at.detach()
    at.publish(150)
    at.turn(200, (UPDATE, {"id": "key", "c": "2"}))
    at.alter(renamed(then, id="c", c="id"))
    assert at.lake.diff(NAME, 150, 200)["kind"].to_pylist() == ["update"]


def version(at: OneTable, lsn: int | None = None) -> DeltaVersion:
    return at.lake.at(lsn).table_at(NAME).mirror


def test_diff_ignores_the_order_of_the_texts_in_pgcdc_raw() -> None:
    rows = [
        pa.table({"id": pa.array([1], pa.int32()), "_pgcdc_raw": pa.array([raw], RAW_TYPE)})
        for raw in ([("n", "NaN"), ("at", "infinity")], [("at", "infinity"), ("n", "NaN")])
    ]
    assert netchange._paired(rows, ["id"], T).num_rows == 0


VALUES = st.sampled_from(["a", "b", None])
CHANGES = st.lists(st.tuples(st.sampled_from(["put", "drop"]), st.integers(0, 4), VALUES), max_size=4)


@pytest.mark.timeout(120)
@settings(max_examples=12, deadline=None)
@given(turns=st.lists(CHANGES, min_size=2, max_size=5), compacted=st.sets(st.integers(0, 4)), data=st.data())
def test_diff_equals_the_difference_between_the_rows_of_two_points(
    tmp_path_factory: pytest.TempPathFactory, turns: list[list[Any]], compacted: set[int], data: st.DataObject
) -> None:
    at = OneTable(tmp_path_factory.mktemp("lake"), ROWS)
    held = {int(str(row["id"])): row["v"] for row in ROWS}
    states = {100: dict(held)}
    for number, changes in enumerate(turns):
        found: list[tuple[str, dict[str, Any]]] = []
        for kind, key, value in changes:
            if kind == "put":
                found.append((UPDATE if key in held else INSERT, {"id": str(key)} | ({"v": value} if value else {})))
                held[key] = value
            elif key in held:
                found.append((DELETE, {"id": str(key)}))
                del held[key]
        end = 200 + 100 * number
        if found:
            at.turn(end, *found)
        else:
            at.publish(end)
        if number in compacted and held:
            at.compact()
            at.publish(end)
        states[end] = dict(held)
    one, other = (data.draw(st.sampled_from(sorted(states))) for _ in range(2))
    before, after = states[one], states[other]
    expected = [
        ("insert" if key not in before else "delete" if key not in after else "update",
         (key, before[key]) if key in before else None, (key, after[key]) if key in after else None)
        for key in sorted(before.keys() | after.keys()) if before.get(key, "-") != after.get(key, "-")
    ]  # fmt: skip
    assert changed_rows(at.lake.diff(NAME, Lsn(one), Lsn(other))) == expected


# The SQL of an undo, as text ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "written"),
    [("a", "'a'"), ("", "''"), ("it's", "'it''s'"), ("a\\b", "E'a\\\\b'"), ("\\'", "E'\\\\'''"), (None, "NULL"),
     ("$undo$", "'$undo$'"), ("a\nb", "'a\nb'")],
)  # fmt: skip
def test_sql_literal_means_the_same_with_any_setting_of_the_session(text: str | None, written: str) -> None:
    assert literal(text) == written


def test_identifiers_in_the_sql_of_an_undo_are_always_quoted() -> None:
    assert table_identifier(TableName("Odd schema", "select")) == '"Odd schema"."select"'


BOXES = PgType(1020, "_box", element=PgType(603, "box", delimiter=";"))


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (True, PgType(16, "bool"), "true"), (-5, INT, "-5"), (0.1, PgType(701, "float8"), "0.1"),
        (float("nan"), PgType(701, "float8"), "nan"), (float("-inf"), PgType(701, "float8"), "-inf"),
        (Decimal("1E+3"), PgType(1700, "numeric"), "1000"), (b"\x00\xff", PgType(17, "bytea"), "\\x00ff"),
        (date(33, 1, 2), PgType(1082, "date"), "0033-01-02"),
        (datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), TIME, "2026-01-02 03:04:05.000006+00:00"),
        (["a", "", "NULL", None, 'q"\\', "x y", "é;"], TAGS, '{a,"","NULL",NULL,"q\\"\\\\","x y",é;}'),
        (["(1,1),(0,0)", None], BOXES, "{(1,1),(0,0);NULL}"), ([], TAGS, "{}"),
        (["a,b"], PgType(1, "d", base=TAGS), '{"a,b"}'),
    ],
)  # fmt: skip
def test_value_in_the_sql_of_an_undo_is_text_that_its_type_can_read(value: Any, kind: PgType, text: str) -> None:
    assert value_text(value, kind) == text


def test_undo_of_a_value_that_cannot_be_written_as_sql_is_refused() -> None:
    with pytest.raises(LakeError, match="cannot be written as SQL"):
        value_text({}, INT)


def test_where_conditions_of_an_undo_match_only_exactly_equal_values() -> None:
    assert equals("a", None, pa.int32()) == 'pg_catalog.num_nulls("a") = 1'
    assert equals("a", "5", pa.int32()) == "\"a\" = '5'"
    assert equals("a", "-0.0", pa.float64()).endswith("= '-0' COLLATE pg_catalog.\"C\"")
    text = 'pg_catalog.num_nulls("a") = 0 AND pg_catalog.format(\'%s\', "a") = \'x\' COLLATE pg_catalog."C"'
    assert equals("a", "x", pa.string()) == text
    assert equals("a", "x", pa.string(), indexed=True) == f"\"a\" = 'x' AND {text}"


def statements(sql: str) -> list[str]:
    found = [line.strip() for line in sql.splitlines()]
    return [line for line in found if line.startswith(("UPDATE", "INSERT", "DELETE"))]


T_SQL = '"public"."t"'


def found(**values: str) -> str:
    """The WHERE condition for a row with these values. All values except the id are compared as text."""
    names = [column.name for column in T.columns]
    return " AND ".join(equals(name, values.get(name), pa.int32() if name == "id" else pa.string()) for name in names)


def test_undo_of_a_range_reverts_only_rows_that_still_have_the_values_at_the_ranges_end(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}, {"id": "2", "v": "it's"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE", "n": "NaN"}), (DELETE, {"id": "2"}), (INSERT, {"id": "3"}))
    sql = at.lake.undo(NAME, 100, 200)
    deleted, updated, inserted = statements(sql)
    assert deleted == f"DELETE FROM {T_SQL} WHERE {found(id='3')};"
    assert updated == f'UPDATE {T_SQL} SET "v" = \'one\', "n" = NULL WHERE {found(id="1", v="ONE", n="NaN")};'
    assert inserted == (
        f'INSERT INTO {T_SQL} ("id", "v", "n", "at", "tags") OVERRIDING SYSTEM VALUE '
        f"SELECT '2', 'it''s', NULL, NULL, NULL WHERE NOT EXISTS (SELECT FROM {T_SQL} WHERE \"id\" = '2');"
    )
    assert sql.startswith("DO $undo$\n")
    assert sql.count("GET DIAGNOSTICS") == 3
    assert at.lake.undo(NAME, 100, 100) == ""
    assert statements(at.lake.undo(NAME, 100, key=3)) == statements(sql)[:1]
    assert at.lake.undo(NAME, 100, key={"id": 9}) == ""


def test_the_dollar_quote_of_the_undo_block_occurs_in_no_value(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "$undo$; DROP TABLE t; $undo1$"}])
    at.turn(200, (DELETE, {"id": "1"}))
    assert at.lake.undo(NAME, 100).startswith("DO $undo2$\n")


def test_undo_of_one_transaction_leaves_the_changes_of_other_transactions(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), publish=False)
    at.turn(300, (UPDATE, {"id": "2", "v": "TWO"}))
    (only,) = statements(at.lake.undo(NAME, xid=299))
    assert "\"v\" = 'two' WHERE \"id\" = '2'" in only
    assert at.lake.undo(NAME, commit_lsn=299) == at.lake.undo(NAME, xid=299) == at.lake.undo(NAME, xid=(3 << 32) + 299)
    before = at.lake.undo(NAME, xid=299)
    at.turn(400, (UPDATE, {"id": "2", "v": "later"}))
    assert at.lake.undo(NAME, xid=299) == before, "the nearest point above the transaction decides"
    (only,) = statements(at.lake.undo(NAME, commit_lsn="0/C7"))
    assert "\"v\" = 'one' WHERE \"id\" = '1'" in only


def test_undo_of_a_transaction_is_refused_if_another_transaction_changed_the_same_rows(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}), publish=False)
    at.turn(300, (UPDATE, {"id": "1", "v": "b"}))
    with pytest.raises(LakeError, match=r"other transactions changed the same rows.*0/64 and 0/12C.*undo the range"):
        at.lake.undo(NAME, commit_lsn=299)
    for unknown in ({"xid": 7}, {"commit_lsn": 150}):
        with pytest.raises(LakeError, match=r"contains no (transaction with the xid|change of the transaction)"):
            at.lake.undo(NAME, **unknown)
    with pytest.raises(LakeError, match="no consistent point contains the transaction to undo"):
        at.lake.undo(NAME, commit_lsn=300)


def test_undo_of_a_transaction_that_did_not_change_the_table_is_refused_even_if_the_feed_is_empty(
    tmp_path: Path,
) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.publish(200)
    with pytest.raises(LakeError, match="contains no change of the transaction to undo"):
        at.lake.undo(NAME, commit_lsn=150)


def test_undo_of_one_transaction_leaves_the_rows_of_a_detached_partition(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), publish=False)
    at.detach("2")
    at.publish(200)
    (only,) = statements(at.lake.undo(NAME, commit_lsn=199))
    assert only.startswith("UPDATE")


def test_undo_of_a_transaction_is_refused_if_the_partition_of_its_rows_was_detached(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}])
    at.turn(
        200, (DELETE, {"id": "1"}), (UPDATE, {"id": "2", "v": "TWO"}), (UPDATE, {"id": "2", "v": "2"}), publish=False
    )
    at.detach("2")
    at.publish(200)
    with pytest.raises(LakeError, match="partitions were removed"):
        at.lake.undo(NAME, commit_lsn=199)


@pytest.mark.parametrize("before", [DELETE, OLD])
def test_undo_of_a_transaction_is_refused_if_the_partition_of_a_new_key_was_detached(
    tmp_path: Path, before: str
) -> None:
    """An UPDATE that moves a row to another partition arrives as a DELETE and an INSERT."""
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}])
    after = INSERT if before == DELETE else UPDATE
    at.turn(200, (before, {"id": "1"}), (after, {"id": "1001", "v": "one"}), publish=False)
    at.detach("1001")
    at.publish(200)
    with pytest.raises(LakeError, match="partitions were removed"):
        at.lake.undo(NAME, commit_lsn=199)


def test_undo_of_a_new_key_is_written_if_the_partition_of_other_rows_was_detached(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}])
    at.turn(200, (DELETE, {"id": "1"}), (INSERT, {"id": "1001", "v": "one"}), publish=False)
    at.detach("2")
    at.publish(200)
    assert [sql.split()[0] for sql in statements(at.lake.undo(NAME, commit_lsn=199))] == ["DELETE", "INSERT"]


def test_undo_restores_a_row_that_its_transaction_updated_and_then_deleted(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "one"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), (DELETE, {"id": "1"}))
    (only,) = statements(at.lake.undo(NAME, commit_lsn=199))
    assert only.startswith("INSERT")


@pytest.mark.parametrize(("key", "change"), [((1,), (TRUNCATE, {})), ((), (DELETE, {"id": "1"}))])
def test_undo_of_a_transaction_without_keys_is_refused_if_a_partition_was_detached(
    tmp_path: Path, key: tuple[int, ...], change: tuple[str, dict[str, str]]
) -> None:
    """Neither a TRUNCATE nor a table without a key has keys that show which rows the transaction changed."""
    at = OneTable(tmp_path, [{"id": "1"}, {"id": "2"}], replace(T, key=key))
    at.turn(200, change)
    assert "INSERT" in at.lake.undo(NAME, commit_lsn=199)
    at.turn(300, (INSERT, {"id": "1"}))
    at.turn(400, change, publish=False)
    at.detach("2")
    at.publish(400)
    with pytest.raises(LakeError, match="partitions were removed"):
        at.lake.undo(NAME, commit_lsn=399)


def test_undo_with_wrong_arguments_is_refused(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    with pytest.raises(UsageError, match="undo needs"):
        at.lake.undo(NAME)
    with pytest.raises(UsageError, match=r"takes a transaction .*, or points"):
        at.lake.undo(NAME, 100, xid=5)


def test_undo_is_refused_if_the_columns_of_the_table_have_changed(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.turn(200, (DELETE, {"id": "1"}))
    at.alter(replace(T, columns=(*T.columns, Column(6, "more", TEXT))))
    with pytest.raises(LakeError, match="does not have the same columns now"):
        at.lake.undo(NAME, 100)


WIDER = replace(T, columns=(*T.columns, Column(6, "w", TEXT)))
SWAPPED = renamed(WIDER, v="w", w="v")


@pytest.mark.parametrize("now", [SWAPPED, replace(SWAPPED, lineage=None)], ids=["renamed", "copied again"])
def test_undo_is_refused_if_columns_have_swapped_their_names(tmp_path: Path, now: Table) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "v", "w": "w"}], WIDER)
    at.turn(200, (DELETE, {"id": "1"}))
    at.alter(now)
    with pytest.raises(LakeError, match="does not have the same columns now"):
        at.lake.undo(NAME, 100)


def test_undo_is_refused_if_a_column_was_replaced_by_a_column_of_the_same_name(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "v", "w": "w"}], WIDER)
    at.turn(200, (DELETE, {"id": "1"}))
    dropped = successor(WIDER, T, Lsn(200))
    at.alter(successor(dropped, replace(T, columns=(*T.columns, Column(7, "w", TEXT))), Lsn(200)))
    with pytest.raises(LakeError, match="does not have the same columns now"):
        at.lake.undo(NAME, 100)


def test_undo_finds_the_columns_that_rows_added_after_the_mirror_recorded_a_structure(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "v"}])
    at.detach()
    at.widen(WIDER)
    at.publish(150)
    at.turn(200, (UPDATE, {"id": "1", "v": "v", "w": "w"}))
    (update,) = statements(at.lake.undo(NAME, 150))
    assert f'UPDATE {T_SQL} SET "w" = NULL' in update
    at.alter(successor(successor(WIDER, T, Lsn(200)), replace(T, columns=(*T.columns, Column(7, "w", TEXT))), Lsn(200)))
    with pytest.raises(LakeError, match="does not have the same columns now"):
        at.lake.undo(NAME, 150)


@pytest.mark.parametrize("names", [{"id": "key"}, {"id": "n", "n": "id"}], ids=["renamed", "swapped"])
def test_undo_is_refused_if_a_repair_derived_the_feed_after_the_key_was_renamed(
    tmp_path: Path, names: dict[str, str]
) -> None:
    columns = tuple(replace(column, type=INT) if column.name == "n" else column for column in T.columns)
    table = replace(T, columns=columns)
    at = OneTable(tmp_path, [{"id": "1", "n": "5"}], table)
    at.turn(200, (DELETE, {"id": "1", "n": "5"}))
    at.derive_again(renamed(table, **names), 200, (DELETE, {names["id"]: "1"}))
    with pytest.raises(LakeError, match="does not have the same columns now"):
        at.lake.undo(NAME, commit_lsn=199)
    with pytest.raises(LakeError, match="does not have the same columns now"):
        at.lake.undo(NAME, 100, key=1)
    assert at.lake.undo(NAME, 200, key=1) == "", "nothing differs"


def test_undo_compares_keys_of_composite_types_as_text(tmp_path: Path) -> None:
    """PostgreSQL cannot compare a composite value with a literal."""
    place = PgType(20000, "place", family="c")
    columns = tuple(
        replace(column, type=PgType(1, "d", base=place)) if column.name == "v" else column for column in T.columns
    )
    at = OneTable(tmp_path, [{"id": "1", "v": "(,)"}], replace(T, columns=columns, key=(1, 2)))
    at.turn(200, (DELETE, {"id": "1", "v": "(,)"}))
    (insert,) = statements(at.lake.undo(NAME, 100))
    assert "\"id\" = '1' AND " + equals("v", "(,)", pa.string()) in insert


def test_undo_does_not_write_generated_columns(tmp_path: Path) -> None:
    columns = tuple(replace(column, generated="s") if column.name == "v" else column for column in T.columns)
    at = OneTable(tmp_path, [{"id": "1", "v": "x"}], replace(T, columns=columns))
    at.turn(200, (DELETE, {"id": "1"}))
    (insert,) = statements(at.lake.undo(NAME, 100))
    assert '"v"' not in insert


# The single changes between two points. If the feed lacks some of them, an error reports the gap -----


def taken(at: OneTable, after: int, upto: int | None = None) -> list[tuple[str, int, int]]:
    """Operation, LSN and key of each change."""
    rows = [row for part in at.lake.at(upto).changes(NAME, after) for row in part.to_pylist()]
    return [(row["_pgcdc_op"], row["_pgcdc_commit_lsn"], row["id"]) for row in rows]


@pytest.fixture
def at(tmp_path: Path) -> OneTable:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}), (INSERT, {"id": "2"}))
    at.turn(300, (INSERT, {"id": "3"}))
    return at


def test_changes_returns_each_change_between_two_points_once_and_in_order(at: OneTable) -> None:
    assert taken(at, 100, 200) == [("update_postimage", 199, 1), ("insert", 199, 2)]
    assert taken(at, 200) == [("insert", 299, 3)]
    assert taken(at, 100) == taken(at, 100, 200) + taken(at, 200)
    assert taken(at, 300) == []


def test_changes_omits_changes_above_the_newest_point(at: OneTable) -> None:
    at.turn(400, (DELETE, {"id": "3"}), publish=False)
    assert taken(at, 200) == [("insert", 299, 3)]
    at.publish(400)
    assert taken(at, 300) == [("delete", 399, 3)]


def test_changes_names_the_columns_whose_values_were_not_sent(at: OneTable) -> None:
    at.turn(400, (UPDATE, {"id": "1", "_pgcdc_unchanged": [2, 5]}), (UPDATE, {"id": "2"}), (DELETE, {"id": "3"}))
    (part,) = at.lake.at().changes(NAME, 300)
    assert part["_pgcdc_unchanged"].to_pylist() == [["v", "tags"], None, None]


def test_changes_of_a_table_without_changes_since_its_copy_are_empty(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.publish(200)
    assert taken(at, 100) == []
    with pytest.raises(FeedGap):
        taken(at, 99)


def test_changes_reports_a_gap_if_retention_has_deleted_some_changes(at: OneTable) -> None:
    assert at.feeds.open(T).forget(Lsn(250)) == 1
    assert taken(at, 250) == [("insert", 299, 3)]
    with pytest.raises(FeedGap, match=r"lacks the changes between 0/C8 and 0/FA.*read the whole mirror"):
        taken(at, 200)


def test_changes_reports_a_gap_if_the_feed_ends_below_the_lsn_of_a_new_copy(at: OneTable) -> None:
    """The feed has no changes between its end and the copy."""
    mirror = at.lake.at().table_at(NAME).mirror
    positions = {**mirror.positions, f"{OWNER.app_id()}/snapshot/public/t": 350}
    object.__setattr__(mirror, "positions", positions)
    feed = tableat.ChangeFeed.at(at.layout, T, mirror, OWNER.app_id(), Lsn(400))
    assert feed.covered == LsnRange(Lsn(350), Lsn(400))
    with pytest.raises(FeedGap):
        feed.require(Lsn(300))
    feed.require(Lsn(350))


def test_changes_reports_a_gap_while_the_feed_is_being_derived_again(at: OneTable) -> None:
    """A run died between the two commits that begin a feed for another structure of the table."""
    feed = at.feeds.open(T)
    feed._write(feed._delta.files if feed._delta else (), [], LsnRange(Lsn(0), Lsn(0)))
    with pytest.raises(FeedGap):
        taken(at, 200)
    assert taken(at, 300) == []


def test_changes_reports_a_gap_if_the_feed_has_rows_of_an_earlier_structure(at: OneTable) -> None:
    """The names in the feed are those of the earlier structure, so `_pgcdc_unchanged` cannot name a column that was
    renamed since."""
    at.turn(400, (UPDATE, {"id": "1", "_pgcdc_unchanged": [2]}))
    at.alter(renamed(T, v="w"))
    at.publish(500)
    with pytest.raises(FeedGap, match="the structure of the table changed"):
        taken(at, 300)
    with pytest.raises(FeedGap):
        at.lake.undo(NAME, commit_lsn=399)
    assert taken(at, 400) == [], "the table has not changed since"
    with pytest.raises(FeedGap):
        taken(at, 200, upto=300)
    assert taken(at, 300, upto=300) == []


def test_compaction_and_sweep_of_the_feed_do_not_alter_its_changes(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "0"}])
    for number in range(1, 10):
        at.turn(100 + 10 * number, (INSERT, {"id": str(number)}))
    before = taken(at, 120)
    assert len(before) == 7
    feed = at.feeds.open(T)
    assert feed.compact(Lsn(200)) > 0
    feed.sweep(timedelta(0))
    assert taken(at, 120) == before


def test_changes_returns_a_large_transaction_in_parts_of_bounded_size(
    at: OneTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction is in several files of the feed, and the rows in a file are not sorted."""
    schema, files = feed_schema(T), []
    for first in (1, 0):
        writer = FeedWriter(at.layout.changes(NAME), first, 2)
        rows: list[dict[str, Any]] = [
            {"_pgcdc_op": "insert", "_pgcdc_commit_lsn": 350, "_pgcdc_ordinal": number, "id": number, "v": "x" * 50}
            for number in reversed(range(first, 2000, 2))
        ]
        writer.write(pa.Table.from_pylist(rows, schema))
        files.append(writer.close())
    at.feeds.open(T).commit(files, LsnRange(Lsn(300), Lsn(400)))
    at.turn(410, (DELETE, {"id": "1"}))
    monkeypatch.setattr(tableat, "BATCH_BYTES", sum(file.size for file in files) // 10)
    parts = list(at.lake.at().changes(NAME, 300))
    assert max(part.num_rows for part in parts) <= 201
    assert [key for part in parts for key in part["id"].to_pylist()] == [*range(2000), 1]
