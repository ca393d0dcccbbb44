"""Whole runs over a lake in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.location import Location
from pgcdc_assets.core.ranges import LsnRange
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.settings import Settings
from tests.fix_postgres import Database
from tests.flow.test_sync import Rig, T, U, rig_of

pytestmark = pytest.mark.spark


@pytest.fixture
def rig(
    database: Database, spark: SparkSession, bucket: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    monkeypatch.chdir(tmp_path)
    settings = Settings(source=database.conninfo, slot=f"s_{database.name}"[:60], lake=str(bucket))
    with rig_of(database, spark, settings) as rig:
        yield rig


def test_the_whole_path(rig: Rig) -> None:
    """Copy, changes of each kind, a new column, a new copy with other columns, a repair, upkeep, readers."""
    rig.setup()
    rig.sync()
    rig.assert_equal()
    rig.conn.execute("UPDATE t SET v = 'changed' WHERE id <= 10")
    rig.conn.execute("UPDATE t SET id = -id WHERE id > 45")
    rig.conn.execute("DELETE FROM u WHERE a < 5")
    rig.conn.execute("ALTER TABLE u ADD COLUMN w timestamp; INSERT INTO u VALUES (1000, 1, NULL, now())")
    rig.sync()
    rig.assert_equal()
    (closed,) = rig.observer.ranges
    repaired = rig.engine("repair").repair(T, LsnRange(closed.span.start, closed.span.end))
    assert repaired is not None
    rig.conn.execute('ALTER TABLE t RENAME v TO "odd name"')
    rig.sync()
    rig.engine("snapshot").sync(Bounds(), copy_anew=[T])
    rig.assert_equal()
    rig.engine("maintain").maintain(Allowance())
    lake = Lake(rig.settings.layout.root.text)
    assert lake.at().arrow("public.u").num_rows == 47
    assert lake.at().arrow("public.t").num_rows == 50
    assert set(lake.tables) == {T, U}
