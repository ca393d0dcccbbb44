"""Tables whose structure changes while a run follows them, before it, and after they were set aside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.core.states import TableState
from pgcdc_assets.errors import NotRepairable
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.settings import Settings
from tests.fix_postgres import Database
from tests.flow.test_sync import Rig, T, rig_of

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
    newest = ConsistentPoints(rig.settings.layout).newest()
    return newest is not None and T in newest.tables and column in Lake(rig.lake).at().arrow(T).column_names


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
