"""Tables whose structure changes while a run follows them, before it, and after they were set aside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.checks.status import status
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import NotRepairable, UnknownTable
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from tests.fix_postgres import Database
from tests.flow.rig import Rig, T, rig_of

pytestmark = pytest.mark.spark

SECONDS = 120.0


@pytest.fixture
def rig(database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.chdir(tmp_path)
    settings = Settings(source=database.conninfo, slot=f"s_{database.name}"[:60], batch_seconds=0.1, range_seconds=1)
    with rig_of(database, spark, settings) as rig:
        rig.setup()
        rig.sync()
        yield rig


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _listed(rig: Rig, column: str) -> bool:
    # Between two looks a point may come that leaves the table out.
    with suppress(UnknownTable):
        return column in Lake(rig.lake).at().arrow(T).column_names
    return False


def test_a_quiet_table_gets_its_structure_while_a_run_follows(rig: Rig) -> None:
    """No row comes after the change: the look at the catalog finds it, and the table is listed with it soon."""
    bounds = Bounds(follow=True)
    run = Thread(target=lambda: rig.engine().sync(bounds), daemon=True)
    run.start()
    try:
        rig.conn.execute("ALTER TABLE t ADD w int NOT NULL DEFAULT 5")
        _until(lambda: _listed(rig, "w"))
        rig.conn.execute("ALTER TABLE t RENAME v TO x")
        _until(lambda: _listed(rig, "x"))
        rig.conn.execute("UPDATE t SET w = 6 WHERE id < 5")
    finally:
        bounds.stop.set()
        run.join(SECONDS)
    assert not run.is_alive()
    rig.sync()
    rig.assert_equal()
    assert [(one.table, one.copied) for one in rig.observer.structures] == [(T, False)] * 2
    assert not rig.observer.copies[2:], "the source was not read again"


def test_before_the_change_the_lake_has_the_structure_of_before(rig: Rig) -> None:
    before = Lake(rig.lake).at().lsn
    rig.commit("ALTER TABLE t ADD w int DEFAULT 5", "UPDATE t SET w = id WHERE id < 3", "ALTER TABLE t DROP v")
    rig.sync()
    assert "v" in Lake(rig.lake).at(before).arrow(T).column_names
    now = Lake(rig.lake).at().arrow(T)
    assert "v" not in now.column_names
    assert sorted(now["w"].to_pylist()) == [1, 2, *[5] * 48]
    rig.assert_equal()


def test_a_table_that_was_set_aside_catches_up_from_the_log(rig: Rig) -> None:
    aside = Rig(rig.settings.model_copy(update={"schema_changes": "set_aside"}), rig.conn, rig.session, rig.observer)
    rig.commit(
        "UPDATE t SET v = 'before' WHERE id = 1", "ALTER TABLE t ADD w int DEFAULT 5", "DELETE FROM t WHERE id = 2"
    )
    assert [name for name, _ in aside.sync().set_aside] == [T]
    assert rig.settings.source is not None
    (told,) = [one for one in status(rig.settings, rig.settings.source).problems if one.thing == f"table {T}"]
    until = (datetime.now(UTC) + rig.settings.retention).strftime("%Y-%m-%d")
    assert f"`pgcdc heal {T.shell}` once the reason has gone: its changes stay in the log until {until}" in told.do
    rig.commit("ALTER TABLE t RENAME v TO x", "INSERT INTO t (id) VALUES (1000)")
    assert [name for name, _ in rig.sync().set_aside] == [T], "another setting alone brings nothing back"
    copies = len(rig.observer.copies)
    assert rig.engine("heal t").sync(Bounds(), heal=[T]).set_aside == []
    rig.assert_equal()
    assert len(rig.observer.copies) == copies


def test_a_repair_across_a_change_has_the_values_of_older_rows(rig: Rig) -> None:
    start = rig.flush()
    rig.commit("INSERT INTO t (id, v) VALUES (1000, 'before'), (1001, 'before')")
    rig.commit("ALTER TABLE t ADD w int DEFAULT 5", "UPDATE t SET w = 6 WHERE id = 1001", "ALTER TABLE t RENAME v TO x")
    rig.sync()
    rig.assert_equal()
    rig.conn.execute("VACUUM FULL t")
    rig.sync()
    assert len(rig.observer.copies) == 2, "VACUUM FULL is no rewrite that the stream does not carry"
    held = rig.engine().repair(T, LsnRange(start, rig.observer.known_ranges()[-1].end))
    assert held.tables[T].updated >= 2
    rig.assert_equal()


def test_a_range_by_hand_does_not_pass_over_another_structure(rig: Rig) -> None:
    rig.commit("UPDATE t SET v = 'x' WHERE id = 1")
    bounds = Bounds(receive_only=True)
    rig.commit("ALTER TABLE t ADD w int DEFAULT 5", "UPDATE t SET w = 6 WHERE id = 1")
    rig.engine().sync(bounds)
    log = ChangeLog(rig.settings.layout).open()
    with pytest.raises(NotRepairable, match="rows came under another structure"):
        rig.engine().apply_range([T], LsnRange(log.start, log.position()))
    row = TableStates(rig.settings.layout).get(T)
    assert row is not None
    assert row.state is TableState.CATCHING_UP
    rig.sync()
    rig.assert_equal()


_OTHER_KEY = (
    "ALTER TABLE t ALTER v SET NOT NULL", "ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD PRIMARY KEY (v)"
)  # fmt: skip


def test_another_key_has_the_table_copied(rig: Rig) -> None:
    """With changes under both keys, in one transaction and in several."""
    rig.commit("UPDATE t SET v = 'one' WHERE id = 1", "DELETE FROM t WHERE id = 2", *_OTHER_KEY)
    rig.commit("UPDATE t SET id = 7 WHERE v = 'one'", "DELETE FROM t WHERE v = 'v9'")
    rig.commit("INSERT INTO t VALUES (7, 'of the same number', NULL)", "UPDATE t SET id = id + 1 WHERE v = 'v30'")
    rig.sync()
    rig.commit("DELETE FROM t WHERE id = 7 AND v = 'one'", "UPDATE t SET v = 'y' WHERE v = 'v20'")
    rig.sync()
    rig.assert_equal()
    assert [copy.table for copy in rig.observer.copies[2:]] == [T]


def test_a_key_that_gets_another_type_has_the_table_copied(rig: Rig) -> None:
    """As one gets from int to bigint without a rewrite: another column, filled, takes name and key of the first."""
    rig.commit("ALTER TABLE t ADD id2 bigint", "UPDATE t SET id2 = id")
    rig.commit("INSERT INTO t VALUES (200, 'both', NULL, 200)", "UPDATE t SET v = 'z' WHERE id = 3")
    rig.commit("ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ALTER id DROP NOT NULL",
               "ALTER TABLE t RENAME id TO old", "ALTER TABLE t RENAME id2 TO id",
               "ALTER TABLE t ADD PRIMARY KEY (id)")  # fmt: skip
    rig.commit("UPDATE t SET id = 5000000000 WHERE old = 5", "DELETE FROM t WHERE id = 6", "UPDATE t SET old = NULL")
    rig.sync()
    rig.commit("ALTER TABLE t DROP old", "INSERT INTO t (id, v) VALUES (6, 'new')")
    rig.sync()
    rig.assert_equal()
    assert [copy.table for copy in rig.observer.copies[2:]] == [T]


def test_a_column_without_a_value_comes_with_the_look(rig: Rig) -> None:
    """No row comes under it; each point has the columns of its time."""
    before = Lake(rig.lake).at().lsn
    rig.conn.execute("ALTER TABLE t ADD w int")
    rig.commit("UPDATE u SET v = 1 WHERE a = 1")
    rig.sync()
    rig.assert_equal()
    assert "w" in Lake(rig.lake).at().arrow(T).column_names
    assert "w" not in Lake(rig.lake).at(before).arrow(T).column_names
    assert len(rig.observer.copies) == 2
    points = ConsistentPoints(rig.settings.layout).all()
    listed = [point.replay_lsn for point in points if point.replay_lsn > before and T in point.tables]
    assert all("w" in Lake(rig.lake).at(lsn).arrow(T).column_names for lsn in listed)
    rig.commit("UPDATE t SET w = 3 WHERE id = 3")
    rig.sync()
    rig.assert_equal()
