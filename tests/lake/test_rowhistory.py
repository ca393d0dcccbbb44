"""The history of a row: each change that the feed holds, with the values that the stream did not send again."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import UsageError
from pgcdc_assets.lake.tableat import RowHistory, with_messages
from tests.lake.onetable import DELETE, INSERT, NAME, OLD, TRUNCATE, UPDATE, OneTable, T


def told(history: RowHistory) -> list[tuple[Any, ...]]:
    rows = history.versions.to_pylist()
    return [(row["kind"], row["lsn"], row["row"]["id"], row["row"]["v"], row["unknown"]) for row in rows]


def test_every_change_of_a_row_is_listed_with_its_transaction(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "copied"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}), (INSERT, {"id": "2", "v": "other"}))
    at.turn(300, (DELETE, {"id": "1"}))
    at.turn(400, (INSERT, {"id": "1", "v": "b", "n": "NaN"}))
    history = at.lake.at().history("public.t", 1)
    assert history.complete_from == 100
    assert told(history) == [
        ("update_postimage", 199, 1, "a", []), ("delete", 299, 1, None, []), ("insert", 399, 1, "b", []),
    ]  # fmt: skip
    last = history.versions.to_pylist()[-1]
    assert (last["xid"], last["commit_ts"].second, last["origin"], last["messages"]) == (399, 399 % 60, None, None)
    assert (last["row"]["n"], last["row"]["_pgcdc_raw"]) == (None, [("n", "NaN")])
    assert told(at.lake.at(300).history(NAME, {"id": 1})) == told(history)[:2]
    assert told(at.lake.at().history(NAME, 7)) == []


def test_values_that_were_not_sent_come_from_earlier_changes(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "copied"}])
    at.turn(200, (UPDATE, {"id": "1", "n": "1.00", "_pgcdc_unchanged": [2]}))
    at.turn(300, (UPDATE, {"id": "1", "v": "sent", "at": "infinity"}))
    at.turn(400, (UPDATE, {"id": "1", "n": "2.00", "_pgcdc_unchanged": [2, 4]}))
    at.turn(500, (UPDATE, {"id": "1", "n": "3.00", "_pgcdc_unchanged": [2]}))
    history = at.lake.at().history(NAME, 1)
    assert [row[3:] for row in told(history)] == [(None, ["v"]), ("sent", []), ("sent", []), ("sent", [])]
    rows = [row["row"] for row in history.versions.to_pylist()]
    assert [str(row["n"]) for row in rows] == ["1.00", "None", "2.00", "3.00"]
    assert [row["_pgcdc_raw"] for row in rows] == [None, [("at", "infinity")], [("at", "infinity")], None]


def test_both_halves_of_a_key_change_and_a_truncate_are_changes_of_the_row(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "x"}, {"id": "3"}])
    at.turn(200, (OLD, {"id": "1"}), (UPDATE, {"id": "2", "v": "x", "_pgcdc_unchanged": [2]}))
    at.turn(300, (TRUNCATE, {}))
    assert told(at.lake.at().history(NAME, 1)) == [
        ("update_preimage", 199, 1, None, []), ("truncate", 299, None, None, []),
    ]  # fmt: skip
    assert told(at.lake.at().history(NAME, 2))[0] == ("update_postimage", 199, 2, None, ["v"])


def test_history_says_from_which_lsn_on_it_is_complete(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.publish(150)
    history = at.lake.at().history(NAME, 1)
    assert (history.complete_from, history.versions.num_rows) == (100, 0)
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}))
    at.turn(300, (UPDATE, {"id": "1", "v": "b"}))
    at.feeds.open(T).forget(Lsn(200))
    history = at.lake.at().history(NAME, 1)
    assert (history.complete_from, [row[1] for row in told(history)]) == (200, [299])


@pytest.mark.parametrize(
    ("key", "message"),
    [({"v": "x"}, "has the key id, and the call names v"), ("one", "the key's value of id is not a value of type"),
     (2**40, "not a value of type int32"), (2.5, "not a value of type int32"), (True, "not a value of type int32"),
     (Decimal("2.5"), "not a value of type int32"), (None, "not a value of type int32")],
)  # fmt: skip
def test_a_wrong_key_is_refused(tmp_path: Path, key: Any, message: str) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}))
    with pytest.raises(UsageError, match=message):
        at.lake.at().history(NAME, key)


def test_a_table_without_a_key_has_no_history_of_a_row(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}], replace(T, key=()))
    with pytest.raises(UsageError, match="has no key"):
        at.lake.at().history(NAME, 1)


def test_each_change_has_the_messages_of_its_transaction() -> None:
    versions = pa.table({"lsn": pa.array([5, 9], pa.int64())})
    messages = pa.table({"commit_lsn": [9, 9], "prefix": ["who", "why"], "content": [b"me", b"so"], "lsn": [7, 8]})
    assert [[one["prefix"] for one in row["messages"]] for row in with_messages(versions, messages).to_pylist()] == [
        [], ["who", "why"],
    ]  # fmt: skip
    assert with_messages(versions, None)["messages"].null_count == 2
