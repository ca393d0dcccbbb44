"""A new copy of one table during a sync in follow mode. When the copy is complete, the change log is far ahead of
it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.decide import LATE_SHARE, Bounds
from pgcdc_assets.flow.turn import take_turn
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.mirror.delta import deltatarget
from pgcdc_assets.mirror.delta.copy import copy_tables
from pgcdc_assets.mirror.target import Failures
from pgcdc_assets.points.points import ConsistentPoints
from tests.traps.scenario import empty_rig
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

T, U = TableName("public", "t"), TableName("public", "u")
ROUNDS = 4


@pytest.mark.long
def test_late_copy_catches_up_and_delays_no_other_table(
    server: EmbeddedServer, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes are inserts, which need no MERGE. Ranges are so small that each turn applies only one batch."""
    turns: list[tuple[set[str], Lsn]] = []
    gate = threading.Event()

    def late(*args: Any) -> Failures:
        assert gate.wait(200)
        return copy_tables(*args)

    def told(work: Any, log: Any, upto: Lsn, tables: Any) -> Any:
        turns.append(({entry.table.name.name for entry in tables}, upto))
        return take_turn(work, log, upto, tables)

    with empty_rig(server, spark, tmp_path / "project", range_bytes=1) as rig:
        rig.conn.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
        rig.setup()
        rig.sync()
        monkeypatch.setattr(deltatarget, "copy_tables", late)
        monkeypatch.setattr("pgcdc_assets.flow.turns.take_turn", told)
        points, log = ConsistentPoints(rig.settings.layout), ChangeLog(rig.settings.layout).open()
        stop = threading.Event()
        run = threading.Thread(target=lambda: rig.engine().sync(Bounds(follow=True, stop=stop), copy_anew=[U]))
        run.start()
        try:
            wait_for(lambda: rig.conn.execute(_SNAPSHOTS).fetchone() is not None, what="the snapshot")
            for number in range(ROUNDS):
                at = rig.flush()
                rig.conn.execute(f"INSERT INTO t VALUES ({number}); INSERT INTO u VALUES ({number})")
                wait_for(lambda: log.position() > at, what="the batch")  # noqa: B023
            wait_for(lambda: _newest(points, {T}) > at, what="t alone")
            before = len(turns)
            gate.set()
            goal = rig.commit("INSERT INTO t VALUES (1000)")
            wait_for(lambda: _newest(points, {T, U}) >= goal, what="both together")
        finally:
            gate.set()
            stop.set()
            run.join(120)
        rig.assert_equal()
    assert len([upto for tables, upto in turns[before:] if tables == {"u"}]) >= ROUNDS // LATE_SHARE
    lows = [upto for tables, upto in turns if "t" in tables]
    assert lows == sorted(lows), "what had been applied to t was asked for again"


_SNAPSHOTS = (
    "SELECT 1 FROM pg_stat_activity WHERE application_name = 'pgcdc_assets/snapshot' AND backend_xmin IS NOT NULL"
)


def _newest(points: ConsistentPoints, tables: set[TableName]) -> Lsn:
    newest = points.newest()
    return newest.replay_lsn if newest is not None and set(newest.tables) == tables else Lsn(0)
