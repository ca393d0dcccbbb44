"""The net change between two points: one row per key that differs, with both images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcdc_assets.core.catalog import Column
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.delta.log import DeltaVersion
from pgcdc_assets.errors import LakeError, UnknownTable
from pgcdc_assets.lake import netchange
from pgcdc_assets.mirror.delta import rowgroups
from pgcdc_assets.protocol.text.typed import RAW_TYPE
from tests.lake.onetable import DELETE, INSERT, NAME, OLD, TEXT, TRUNCATE, UPDATE, OneTable, T

ROWS = [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}, {"id": "3", "v": "three"}]


def told(change: pa.Table) -> list[tuple[str, Any, Any]]:
    """Kind, and the texts of both images, in the order of the keys."""
    rows = [
        (row["kind"], *(image and (image["id"], image["v"]) for image in (row["before"], row["after"])))
        for row in change.to_pylist()
    ]
    return sorted(rows, key=lambda row: row[1] or row[2])


def test_each_key_that_differs_is_one_row_with_both_images(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), (DELETE, {"id": "2"}), (INSERT, {"id": "4", "v": "four"}))
    change = at.lake.diff("public.t", 100)
    assert told(change) == [
        ("update", (1, "one"), (1, "ONE")),
        ("delete", (2, "two"), None),
        ("insert", None, (4, "four")),
    ]
    assert [row["after"]["_pgcdc_commit_lsn"] for row in change.to_pylist() if row["kind"] == "update"] == [199]
    assert told(at.lake.diff(NAME, at.lake.at(200), at.lake.at(100))) == [
        ("update", (1, "ONE"), (1, "one")), ("insert", None, (2, "two")), ("delete", (4, "four"), None),
    ]  # fmt: skip
    assert at.lake.diff(NAME, 200, 200).num_rows == 0


def test_what_was_changed_and_changed_back_is_no_difference(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    at.turn(200, (UPDATE, {"id": "1", "v": "other"}), (OLD, {"id": "2"}), (UPDATE, {"id": "9", "v": "two"}))
    at.turn(300, (UPDATE, {"id": "1", "v": "one"}), (OLD, {"id": "9"}), (UPDATE, {"id": "2", "v": "two"}))
    assert at.lake.diff(NAME, 100, 300).num_rows == 0
    assert told(at.lake.diff(NAME, 100, 200)) == [
        ("update", (1, "one"), (1, "other")), ("delete", (2, "two"), None), ("insert", None, (9, "two")),
    ]  # fmt: skip


def test_a_compaction_between_the_points_is_no_difference(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    at.compact()
    at.turn(200, (DELETE, {"id": "3"}))
    at.compact()
    at.publish(200)
    assert told(at.lake.diff(NAME, 100)) == [("delete", (3, "three"), None)]
    assert told(at.lake.diff(NAME, 200, 100)) == [("insert", None, (3, "three"))]


def test_only_rows_that_were_written_between_the_points_are_read(
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
    assert told(at.lake.diff(NAME, 200)) == [("delete", (1000, None), None), ("insert", None, (1001, None))]
    assert {rows for rows, _ in read} == {1}, "the file of the copy is the same at both points"
    at.turn(400, (DELETE, {"id": "7"}))
    assert netchange._Side(version(at, 300), version(at, 400)).count == 1, "the other rows of the file stay"


def test_a_truncate_deletes_each_row(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    at.turn(200, (TRUNCATE, {}), (INSERT, {"id": "2", "v": "two"}))
    assert [row[:2] for row in told(at.lake.diff(NAME, 100))] == [("delete", (1, "one")), ("delete", (3, "three"))]


def test_points_with_other_columns_are_refused(tmp_path: Path) -> None:
    at = OneTable(tmp_path, ROWS)
    wider = replace(T, columns=(*T.columns, Column(6, "more", TEXT)))
    other = OneTable(tmp_path / "other", ROWS, wider)
    with pytest.raises(LakeError, match=r"has other columns in version .*; compare points that are both before"):
        netchange.net_change(version(at), version(other), wider)
    with pytest.raises(UnknownTable):
        at.lake.diff("public.u", 100)


def test_a_key_that_was_another_one_at_the_points_is_refused(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "same"}, {"id": "2", "v": "same"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "same", "n": "1.00"}), (UPDATE, {"id": "2", "v": "same", "n": "1.00"}))
    before, after = version(at, 100), version(at, 200)
    with pytest.raises(LakeError, match="contains a key twice"):
        netchange.net_change(before, after, replace(T, key=(2,)))
    with pytest.raises(LakeError, match="has no key in version"):
        netchange.net_change(before, after, replace(T, key=(7,)))


def test_a_column_that_replaced_one_of_the_same_name_is_compared_by_value(tmp_path: Path) -> None:
    """A rewrite for another structure keeps the commit_lsn of each row."""
    at = OneTable(tmp_path, ROWS)
    before = version(at)
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), lsn=100)
    after = version(at)
    assert netchange.net_change(before, after, T).num_rows == 0, "the same transaction changed the row last"
    reshaped = replace(after, metadata={**after.metadata, "configuration": {"pgcdc.structure": "{}"}})
    assert told(netchange.net_change(before, reshaped, T)) == [("update", (1, "one"), (1, "ONE"))]


def version(at: OneTable, lsn: int | None = None) -> DeltaVersion:
    return at.lake.at(lsn).table_at(NAME).mirror


def test_texts_that_fit_no_type_have_no_order() -> None:
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
def test_net_change_equals_the_difference_of_the_rows(
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
    assert told(at.lake.diff(NAME, Lsn(one), Lsn(other))) == expected
