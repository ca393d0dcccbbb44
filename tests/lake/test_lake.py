"""`Lake`: which point it reads, which arguments it refuses, and the history of a row."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.errors import LakeError, NotReached, UnknownTable, UsageError
from pgcdc_assets.lake.tableat import RowHistory, with_messages
from pgcdc_assets.log.extent import Extent
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.store import storage
from tests.lake.onetable import DELETE, INSERT, NAME, OLD, OWNER, TRUNCATE, UPDATE, OneTable, T, renamed
from tests.memorystore import lake_in_memory


def test_importing_the_package_imports_no_large_library() -> None:
    """The class ``Lake`` needs only the libraries that the package ``pgcdc_reader`` requires."""
    code = (
        "import sys, pgcdc_assets; "
        "assert not {'deltalake', 'pyarrow', 'pyspark', 'dagster'} & set(sys.modules); "
        "pgcdc_assets.Lake; assert 'deltalake' in sys.modules; "
        "assert not {'pyspark', 'dagster', 'psycopg', 'psutil', 'pydantic', 'yaml', 'click'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lake_without_points_has_no_tables(tmp_path: Path) -> None:
    assert Lake(tmp_path).tables == []
    with pytest.raises(LakeError, match="no consistent point"):
        Lake(tmp_path).at()


def test_reading_an_lsn_below_the_first_point_is_refused(tmp_path: Path) -> None:
    ConsistentPoints(Layout.of(tmp_path)).publish(Lsn(100), {}, {})
    with pytest.raises(LakeError, match="0/63"):
        Lake(tmp_path).at(99)
    assert Lake(tmp_path).at("0/FFFF").lsn == 100
    with pytest.raises(UnknownTable):
        Lake(tmp_path).at().arrow("orders")


def test_a_time_selects_the_newest_point_that_was_published_at_or_before_this_time(tmp_path: Path) -> None:
    points = ConsistentPoints(Layout.of(tmp_path))
    times = []
    for lsn in (100, 200, 300):
        points.publish(Lsn(lsn), {}, {})
        times.append(points.all()[-1].at)
    lake = Lake(tmp_path)
    assert [lake.at(time).lsn for time in times] == [100, 200, 300]
    assert lake.at(times[1] + (times[2] - times[1]) / 2).lsn == 200
    assert lake.at(times[2] + timedelta(days=1)).lsn == 300
    with pytest.raises(
        LakeError, match=r"no consistent point that was published at or before .*; the oldest point is at 0/64"
    ):
        lake.at(times[0] - timedelta(microseconds=1))
    with pytest.raises(ValueError, match="has no time zone"):
        lake.at(datetime(2026, 1, 1))


@pytest.mark.parametrize("wrong", [1.5, True, b"0/64", [100], date(2026, 1, 1)])
def test_value_of_a_wrong_type_is_refused_by_every_call_that_takes_an_lsn(tmp_path: Path, wrong: Any) -> None:
    ConsistentPoints(Layout.of(tmp_path)).publish(Lsn(100), {}, {}, messages=Lsn(100))
    lake = Lake(tmp_path)
    calls: list[Callable[[Any], object]] = [
        lake.at, lambda lsn: lake.wait(lsn, timeout=0), lake.at().messages, lambda lsn: lake.diff("t", lsn),
        lambda lsn: lake.undo("t", lsn),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"is not an LSN; an LSN is text like '16/B374D848' or an integer"):
            call(wrong)


def test_a_numpy_integer_is_accepted_as_an_lsn(tmp_path: Path) -> None:
    ConsistentPoints(Layout.of(tmp_path)).publish(Lsn(100), {}, {})
    number: Any = np.int64(100)
    assert Lake(tmp_path).at(number).lsn == 100


# Differences, the change feed and `Lake.wait` work with every kind of store -------------------------


def check_all_calls(root: Location) -> None:
    """Makes a lake at ``root``, and calls `diff`, `history`, `changes`, `undo` and `wait`."""
    at = OneTable(root, [{"id": "1", "v": "one"}, {"id": "2", "v": "two"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "ONE"}), (DELETE, {"id": "2"}))
    at.turn(300, (INSERT, {"id": "3"}))
    at.compact()
    at.publish(300)
    assert sorted(at.lake.diff(NAME, 100)["kind"].to_pylist()) == ["delete", "insert", "update"]
    assert at.lake.at().history(NAME, 1).versions["kind"].to_pylist() == ["update_postimage"]
    assert [row["id"] for part in at.lake.at().changes(NAME, 200) for row in part.to_pylist()] == [3]
    assert at.lake.undo(NAME, 100).count("GET DIAGNOSTICS") == 3
    log = ChangeLog(at.layout)
    log.create(OWNER, Lsn(300), 1)
    Extent(at.layout).note(Lsn(300), Lsn(400))
    assert at.lake.wait(400, timeout=0).lsn == 300
    with pytest.raises(NotReached):
        at.lake.wait(401, timeout=0)


def test_all_calls_of_lake_work_with_a_lake_in_memory() -> None:
    root = lake_in_memory()
    check_all_calls(root)
    storage.delete_folder(root)


@pytest.mark.long
def test_all_calls_of_lake_work_with_a_lake_in_a_bucket(bucket: Location) -> None:
    check_all_calls(bucket)


# The history of a row -------------------------------------------------------------------------------


def changes_in(history: RowHistory) -> list[tuple[Any, ...]]:
    rows = history.versions.to_pylist()
    return [(row["kind"], row["lsn"], row["row"]["id"], row["row"]["v"], row["unknown"]) for row in rows]


def test_history_lists_every_change_of_a_row_with_its_transaction(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "copied"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}), (INSERT, {"id": "2", "v": "other"}))
    at.turn(300, (DELETE, {"id": "1"}))
    at.turn(400, (INSERT, {"id": "1", "v": "b", "n": "NaN"}))
    history = at.lake.at().history("public.t", 1)
    assert history.complete_from == 100
    assert changes_in(history) == [
        ("update_postimage", 199, 1, "a", []), ("delete", 299, 1, None, []), ("insert", 399, 1, "b", []),
    ]  # fmt: skip
    last = history.versions.to_pylist()[-1]
    assert (last["xid"], last["commit_ts"].second, last["origin"], last["messages"]) == (399, 399 % 60, None, None)
    assert (last["row"]["n"], last["row"]["_pgcdc_raw"]) == (None, [("n", "NaN")])
    assert changes_in(at.lake.at(300).history(NAME, {"id": 1})) == changes_in(history)[:2]
    assert changes_in(at.lake.at().history(NAME, 7)) == []


def test_history_completes_unsent_values_from_earlier_changes_of_the_row(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "copied"}])
    at.turn(200, (UPDATE, {"id": "1", "n": "1.00", "_pgcdc_unchanged": [2]}))
    at.turn(300, (UPDATE, {"id": "1", "v": "sent", "at": "infinity"}))
    at.turn(400, (UPDATE, {"id": "1", "n": "2.00", "_pgcdc_unchanged": [2, 4]}))
    at.turn(500, (UPDATE, {"id": "1", "n": "3.00", "_pgcdc_unchanged": [2]}))
    history = at.lake.at().history(NAME, 1)
    assert [row[3:] for row in changes_in(history)] == [(None, ["v"]), ("sent", []), ("sent", []), ("sent", [])]
    rows = [row["row"] for row in history.versions.to_pylist()]
    assert [str(row["n"]) for row in rows] == ["1.00", "None", "2.00", "3.00"]
    assert [row["_pgcdc_raw"] for row in rows] == [None, [("at", "infinity")], [("at", "infinity")], None]


def test_history_of_a_row_shows_changes_of_its_key_and_each_truncate(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1", "v": "x"}, {"id": "3"}])
    at.turn(200, (OLD, {"id": "1"}), (UPDATE, {"id": "2", "v": "x", "_pgcdc_unchanged": [2]}))
    at.turn(300, (TRUNCATE, {}))
    assert changes_in(at.lake.at().history(NAME, 1)) == [
        ("update_preimage", 199, 1, None, []), ("truncate", 299, None, None, []),
    ]  # fmt: skip
    assert changes_in(at.lake.at().history(NAME, 2))[0] == ("update_postimage", 199, 2, None, ["v"])


def test_history_has_the_lsn_above_which_it_is_complete(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.publish(150)
    history = at.lake.at().history(NAME, 1)
    assert (history.complete_from, history.versions.num_rows) == (100, 0)
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}))
    at.turn(300, (UPDATE, {"id": "1", "v": "b"}))
    at.feeds.open(T).forget(Lsn(200))
    history = at.lake.at().history(NAME, 1)
    assert (history.complete_from, [row[1] for row in changes_in(history)]) == (200, [299])


@pytest.mark.parametrize(("names", "key"), [({"v": "tags", "tags": "v"}, 1), ({"id": "ident"}, {"ident": 1})])
def test_history_lists_no_change_of_an_earlier_structure(tmp_path: Path, names: dict[str, str], key: Any) -> None:
    """The feed has the names of the earlier structure. A name may belong to another column now, and the key may have
    another name."""
    at = OneTable(tmp_path, [{"id": "1"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}))
    at.alter(renamed(T, **names))
    at.publish(300)
    history = at.lake.at().history(NAME, key)
    assert (history.complete_from, history.versions.num_rows) == (200, 0)


@pytest.mark.parametrize(
    ("key", "message"),
    [({"v": "x"}, "has the key id, but the call gives v"),
     ("one", "the value given for key column id is not a value of type"), (2**40, "not a value of type int32"),
     (2.5, "not a value of type int32"), (True, "not a value of type int32"),
     (Decimal("2.5"), "not a value of type int32"), (None, "not a value of type int32")],
)  # fmt: skip
def test_history_of_a_wrong_key_is_refused(tmp_path: Path, key: Any, message: str) -> None:
    at = OneTable(tmp_path, [{"id": "1"}])
    at.turn(200, (UPDATE, {"id": "1", "v": "a"}))
    with pytest.raises(UsageError, match=message):
        at.lake.at().history(NAME, key)


def test_history_of_a_row_of_a_table_without_a_key_is_refused(tmp_path: Path) -> None:
    at = OneTable(tmp_path, [{"id": "1"}], replace(T, key=()))
    with pytest.raises(UsageError, match="has no key"):
        at.lake.at().history(NAME, 1)


def test_history_adds_the_logical_messages_of_each_transaction() -> None:
    versions = pa.table({"lsn": pa.array([5, 9], pa.int64())})
    messages = pa.table({"commit_lsn": [9, 9], "prefix": ["who", "why"], "content": [b"me", b"so"], "lsn": [7, 8]})
    assert [[one["prefix"] for one in row["messages"]] for row in with_messages(versions, messages).to_pylist()] == [
        [], ["who", "why"],
    ]  # fmt: skip
    assert with_messages(versions, None)["messages"].null_count == 2
