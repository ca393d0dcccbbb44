"""Whole syncs with a lake in an object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets import Lake
from pgcdc_assets.core.layout import Location
from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.metrics.readings import LakeReader
from pgcdc_assets.settings import Settings
from pgcdc_assets.store import chainlease, objects
from tests.fix_postgres import Database
from tests.flow.rig import Rig, T, U, following, newest, rig_of
from tests.store.faultproxy import Faults, spoiling
from tests.waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.fixture
def rig(
    database: Database, spark: SparkSession, bucket: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    monkeypatch.chdir(tmp_path)
    settings = Settings(source=database.conninfo, slot=f"s_{database.name}"[:60], lake=str(bucket), range_seconds=600)
    with rig_of(database, spark, settings) as rig:
        yield rig


@pytest.mark.long
def test_sync_repair_snapshot_and_maintain_work_with_a_lake_in_an_object_store(rig: Rig) -> None:
    """Covers a copy, changes of each kind, a new column, a new copy with different columns, a repair, maintenance, and
    readers."""
    rig.setup()
    rig.sync()
    rig.assert_equal()
    rig.conn.execute("UPDATE t SET v = 'changed' WHERE id <= 10")
    # A repair needs all values of rows whose key has changed. PostgreSQL sends large values only if they have changed.
    rig.conn.execute("UPDATE t SET id = -id, big = big || '.' WHERE id > 45")
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


@pytest.fixture
def counted(bucket: Location, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Records each request that this process, the receiver or a Spark worker sends to the object store."""
    faults, behind = Faults(), urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert behind is not None
    with spoiling(behind, faults) as port, monkeypatch.context() as patch:
        url = f"http://127.0.0.1:{port}"
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setitem(spark.sparkContext.environment, "AWS_ENDPOINT_URL", url)
        objects._bucket.cache_clear()
        yield faults
    objects._bucket.cache_clear()


@pytest.mark.long
def test_number_of_requests_to_the_object_store_is_bounded_for_a_turn_and_for_idle_time(
    counted: Faults, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts only requests that cost as much as a PUT. In a turn that changes one table, the table's feed, the table's
    mirror and the table of consistent points each get one Delta commit."""
    monkeypatch.setattr(chainlease, "RENEWED", 1.0)
    rig.setup()
    rig.sync()
    with following(rig):
        wait_for(rig.streaming, what="the stream")
        for number in range(4):
            before = newest(rig).replay_lsn
            counted.asked.clear()
            with rig.conn.transaction():
                rig.conn.execute("UPDATE t SET v = v || '.' WHERE id <= 10")
            wait_for(lambda: any("PUT" in one and "consistent_points/_delta_log" in one for one in counted.asked),
                     what=f"turn {number}")  # fmt: skip
        turn = _costing_as_much_as_a_put(counted)
        assert len(turn) == 2 + 6, turn
        assert not any(one.startswith("LIST") for one in turn), turn
        counted.asked.clear()
        wait_for(
            lambda: sum("PUT" in one and "/lock/" in one for one in counted.asked) == 5, what="renewals of the lock"
        )
        assert not _costing_as_much_as_a_put(counted), "an idle sync sends only requests for its lock"
        reader = LakeReader(rig.settings)
        reader()
        counted.asked.clear()
        reader()
        scrape = _costing_as_much_as_a_put(counted)
        assert all(one.startswith("LIST") for one in scrape), "metrics write nothing"
        assert len(scrape) <= 20, scrape
    assert newest(rig).replay_lsn > before


def _costing_as_much_as_a_put(counted: Faults) -> list[str]:
    """The recorded requests that cost as much as a PUT. Deletions are left out. Requests that are sent at intervals,
    whether or not there is a turn, are left out too: for the lock, for the counts of `pgcdc metrics` (``counts.json``),
    and for the LSN up to which the log is complete (``extent``)."""
    return [one for one in counted.asked if one.startswith(("PUT", "LIST", "POST")) and "/lock/" not in one
            and not one.endswith(("/counts.json", "/extent")) and "?delete" not in one]  # fmt: skip
