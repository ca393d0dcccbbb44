"""Tables that swap names, or take one that became free: each mirror goes on under the name that its table has now."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.flow import progress
from pgcdc_assets.flow.observer import Silent
from pgcdc_assets.flow.reshaping import Reshapes
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta import rename
from pgcdc_assets.mirror.delta.deltatarget import DeltaTarget
from pgcdc_assets.points.points import ConsistentPoints
from tests.end_to_end.command import wait_for
from tests.fix_postgres import Database
from tests.flow.rig import Rig, following, named_settings, newest

pytestmark = pytest.mark.spark

A, B = TableName("public", "a"), TableName("public", "b")
TAGS = {"a": "one", "b": "two", "c": "three"}
_SWAP = ("ALTER TABLE a RENAME TO x", "ALTER TABLE b RENAME TO a", "ALTER TABLE x RENAME TO b")


@pytest.fixture
def rig(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Three tables alike. ``v`` says in each row which of them it is of: *one*, that was first called a, or another."""
    monkeypatch.chdir(tmp_path)
    settings = named_settings(database, range_seconds=1)
    with database.connect() as conn:
        for table, tag in TAGS.items():
            conn.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text, n int)".encode())
            conn.execute(f"INSERT INTO {table} SELECT g, '{tag}', 0 FROM generate_series(1, 20) g".encode())
        rig = Rig(settings, conn, lambda: spark, Silent())
        rig.setup()
        rig.sync()
        rig.commit(
            "UPDATE a SET n = 1 WHERE id < 9", "DELETE FROM b WHERE id = 4", "INSERT INTO c VALUES (21, 'three')"
        )
        rig.sync()
        rig.observer.copies.clear()
        yield rig


def _change(rig: Rig, one: str, two: str, number: int) -> None:
    rig.commit(
        f"UPDATE {one} SET n = {number} WHERE id % 3 = 0", f"INSERT INTO {one} VALUES ({100 + number}, 'one', 5)",
        f"UPDATE {two} SET n = -{number} WHERE id % 3 = 1", f"DELETE FROM {two} WHERE id = {4 + number}",
        f"INSERT INTO {two} VALUES ({200 + number}, 'two', 6)",
    )  # fmt: skip


def _hold(rig: Rig, *tables: str, copied: int = 0, swapped: Lsn = ZERO) -> None:
    """Every point lists rows of one table under each name, and the last the source's. ``swapped``: below, each table
    has its first name."""
    lake = Lake(rig.lake)
    for point in ConsistentPoints(rig.settings.layout).all():
        at = lake.at(point.replay_lsn)
        for name in at.tables:
            of = set(at.arrow(name)["v"].to_pylist())
            assert len(of) == 1, (name, point)
            assert point.replay_lsn >= swapped or of == {TAGS.get(name.name)}, (name, point)
    rig.assert_equal(*(f"public.{name}" for name in tables or ("a", "b", "c")))
    assert len(rig.observer.copies) == copied, [copy.table for copy in rig.observer.copies]


def test_two_that_swap_names(rig: Rig) -> None:
    """With rows before, in the same transaction and behind; and back."""
    before = Lake(rig.lake).at().lsn
    _change(rig, "a", "b", 1)
    rig.commit("UPDATE a SET n = 7 WHERE id = 2", *_SWAP, "UPDATE b SET n = 8 WHERE id = 2")
    _change(rig, "b", "a", 2)
    rig.sync()
    _hold(rig)
    assert {(one.table, one.what) for one in rig.observer.structures} == {
        (A, "was called public.b"), (B, "was called public.a"),
    }  # fmt: skip
    assert set(Lake(rig.lake).at(before).arrow("a")["v"].to_pylist()) == {"one"}
    _change(rig, "b", "a", 3)
    rig.sync()
    _hold(rig)
    rig.commit(*_SWAP)
    rig.sync()
    _change(rig, "a", "b", 4)
    rig.sync()
    _hold(rig)


def test_two_that_were_copied_together_and_not_changed_since(rig: Rig) -> None:
    rig.commit("CREATE TABLE d (id int PRIMARY KEY, v text)", "CREATE TABLE e (id int PRIMARY KEY, v text)",
               "INSERT INTO d VALUES (1, 'one')", "INSERT INTO e VALUES (1, 'two'), (2, 'two')")  # fmt: skip
    rig.sync()
    assert len(rig.observer.copies) == 2
    rig.observer.copies.clear()
    rig.commit(*(statement.replace("TABLE a", "TABLE d").replace("TABLE b", "TABLE e").replace("TO a", "TO d")
                 .replace("TO b", "TO e") for statement in _SWAP))  # fmt: skip
    rig.sync()
    rig.commit("UPDATE d SET id = 7 WHERE id = 1", "INSERT INTO e VALUES (8, 'one')")
    rig.sync()
    _hold(rig, "a", "b", "c", "d", "e")


def test_three_in_a_circle_while_a_run_follows(rig: Rig) -> None:
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        for number in range(3):
            rig.commit(*_SWAP[:2], "ALTER TABLE c RENAME TO b", "ALTER TABLE x RENAME TO c")
            goal = rig.commit("UPDATE a SET n = n + 1", "DELETE FROM b WHERE id = 9", f"UPDATE c SET n = {number}")
            wait_for(partial(_whole, rig, goal), what="a point of all")
    rig.sync()
    _hold(rig)


def _whole(rig: Rig, goal: int) -> bool:
    point = newest(rig)
    return point.replay_lsn >= goal - 1 and len(point.tables) == 3


def test_one_takes_the_name_of_another_that_goes(rig: Rig) -> None:
    """As a migration does that builds a new table beside the old one."""
    _change(rig, "a", "b", 1)
    rig.commit("ALTER TABLE a RENAME TO a_old", "ALTER TABLE b RENAME TO a", "UPDATE a SET n = 3", "DROP TABLE c",
               "ALTER TABLE a_old RENAME TO c", "DELETE FROM c WHERE id < 7")  # fmt: skip
    rig.sync()
    _hold(rig, "a", "c")


def test_with_another_structure(rig: Rig) -> None:
    _change(rig, "a", "b", 1)
    rig.commit("ALTER TABLE a ADD k int DEFAULT 4", "ALTER TABLE b RENAME n TO m", *_SWAP, "UPDATE b SET k = 5")
    rig.commit("UPDATE a SET m = 9 WHERE id = 2")
    rig.sync()
    _hold(rig)


def test_what_was_derived_under_the_name_is_another_s(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run derives both, and dies before it applies them; each feed holds the other table's rows then."""

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    _change(rig, "a", "b", 1)
    with monkeypatch.context() as broken:
        broken.setattr(DeltaTarget, "apply", dies)
        with pytest.raises(KeyboardInterrupt):
            rig.sync()
    rig.commit(*_SWAP)
    rig.sync()
    _hold(rig)


def test_a_feed_that_reaches_farther_than_the_mirror(rig: Rig) -> None:
    """Somebody had one derived by hand, before the two swapped names."""
    start = newest(rig).replay_lsn
    _change(rig, "a", "b", 1)
    rig.sync(receive_only=True)
    rig.engine().transform_range([A], LsnRange(start, ChangeLog(rig.settings.layout).position()))
    rig.commit(*_SWAP)
    rig.sync()
    _hold(rig)


_STEPS = [(point, nth) for point in (FaultPoint.RENAMED_FILES_LINKED, FaultPoint.RENAME_COMMITTED,
                                     FaultPoint.RENAME_RECORDED) for nth in (1, 2)]  # fmt: skip


@pytest.mark.parametrize(
    ("point", "nth", "rows"),
    [*((point, nth, True) for point, nth in _STEPS), *((point, 2, False) for point, nth in _STEPS if nth == 2)],
)
def test_a_run_that_dies(rig: Rig, monkeypatch: pytest.MonkeyPatch, point: FaultPoint, nth: int, rows: bool) -> None:
    """At each step of either: what it leaves goes on, and is never taken for the other's."""
    if rows:
        _change(rig, "a", "b", 1)
    swapped = rig.commit(*_SWAP)
    if rows:
        _change(rig, "b", "a", 2)
    _dies_at(rig, monkeypatch, point, nth)
    if rows:
        _change(rig, "b", "a", 3)
    rig.sync()
    _hold(rig, swapped=swapped)


def test_a_run_that_dies_with_both_on_their_way(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place has the other's rows by then, and nothing stored says that they go on there."""

    def dies(reshapes: Reshapes) -> Any:
        wait_for(lambda: all(one.done.done() for one in reshapes._under_way), what="both")
        assert len(reshapes._under_way) in (0, 2)
        if reshapes.any:
            raise KeyboardInterrupt
        return iter(())

    _change(rig, "a", "b", 1)
    swapped = rig.commit(*_SWAP)
    with monkeypatch.context() as broken:
        broken.setattr(Reshapes, "landed", dies)
        with pytest.raises(KeyboardInterrupt):
            rig.sync()
    _change(rig, "b", "a", 2)
    rig.sync()
    _hold(rig, swapped=swapped)


def test_back_again_before_the_next_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run noted of the names, and did not finish, is not so any more."""
    _change(rig, "a", "b", 1)
    rig.commit(*_SWAP)
    _dies_at(rig, monkeypatch, FaultPoint.RENAME_COMMITTED, 1)
    rig.commit(*_SWAP)
    _change(rig, "a", "b", 2)
    rig.sync()
    _change(rig, "a", "b", 3)
    rig.sync()
    _hold(rig)


def test_a_name_under_which_a_copy_was_begun(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy was another table's, whose run died."""

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    rig.commit("CREATE TABLE d (id int PRIMARY KEY, v text, n int)", "INSERT INTO d VALUES (1, 'four', 1)")
    with monkeypatch.context() as broken:
        broken.setattr(DeltaTarget, "copy", dies)
        with pytest.raises(KeyboardInterrupt):
            rig.sync()
    swapped = rig.commit(*_with_d())
    rig.sync()
    _hold(rig, "a", "b", "c", "d", copied=1, swapped=swapped)
    assert rig.observer.copies[0].table == A


def test_two_of_one_snapshot_and_a_run_that_dies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their mirrors stand at one position, so that nothing but the table tells whose rows a point lists."""
    rig.commit(*(f"DROP TABLE {name}" for name in TAGS))
    for name, tag in TAGS.items():
        rig.commit(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)", f"INSERT INTO {name} VALUES (1, '{tag}')")
    rig.sync()
    assert len(rig.observer.copies) == 3
    rig.observer.copies.clear()
    swapped = rig.commit(*_SWAP)
    _dies_at(rig, monkeypatch, FaultPoint.RENAME_RECORDED, 2)
    rig.sync()
    _hold(rig, swapped=swapped)


@pytest.mark.parametrize(
    "point", [FaultPoint.RENAMED_FILES_LINKED, FaultPoint.RENAME_COMMITTED, FaultPoint.RENAME_RECORDED]
)
def test_with_one_that_waits_for_a_copy(rig: Rig, monkeypatch: pytest.MonkeyPatch, point: FaultPoint) -> None:
    """It is copied to the place of the other, which may not have gone on yet as the run dies."""
    rig.commit("CREATE TABLE d (id int PRIMARY KEY, v text, n int)", "INSERT INTO d VALUES (1, 'four', 1)")
    swapped = rig.commit(*_with_d())
    _dies_at(rig, monkeypatch, point, 1)
    rig.sync()
    _hold(rig, "a", "b", "c", "d", copied=len(rig.observer.copies), swapped=swapped)
    assert {copy.table for copy in rig.observer.copies} <= {A}, "the run that died may have copied it"


def _with_d() -> list[str]:
    return [statement.replace("TABLE b", "TABLE d").replace("TO b", "TO d") for statement in _SWAP]


def _dies_at(rig: Rig, monkeypatch: pytest.MonkeyPatch, point: FaultPoint, nth: int) -> None:
    met: list[FaultPoint] = []

    def passes(passed: FaultPoint) -> None:
        met.extend([passed] * (passed is point))
        if met.count(point) == nth:
            raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(rename, "passed", passes)
        broken.setattr(progress, "passed", passes)
        with pytest.raises(KeyboardInterrupt):
            rig.sync()
