"""The whole path in a storm of DDL: nobody waits for it, and when the storm is over every table is equal."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow.sync import Bounds
from pgcdc_assets.lake.states import TableStates
from tests.fix_postgres import Database
from tests.source.storm import GIVEN_UP_SECONDS, TABLES, Storm, make_tables
from tests.traps.scenario import empty_rig

pytestmark = [pytest.mark.spark, pytest.mark.long]

SECONDS = 45


def test_a_run_follows_through_a_storm(server: EmbeddedServer, spark: SparkSession, tmp_path: Path) -> None:
    with empty_rig(server, spark, tmp_path / "project", range_seconds=5) as rig:
        make_tables(rig.conn)
        rig.setup()
        stop = threading.Event()
        failures: list[Exception] = []

        def follow() -> None:
            try:
                rig.engine().sync(Bounds(follow=True, stop=stop))
            except (PgcdcError, psycopg.Error) as error:
                failures.append(error)

        database = Database(server, rig.conn.info.dbname)
        without, beside = Storm(database), Storm(database)
        with without.blowing():
            time.sleep(SECONDS / 3)
        with beside.blowing():
            run = threading.Thread(target=follow)
            run.start()
            time.sleep(SECONDS)
        stop.set()
        run.join()
        print(f"longest of {beside.queries} queries {beside.longest:.2f} s beside us and {beside.altered} changes, "
              f"of {without.queries} without us {without.longest:.2f} s; "
              f"copied {[copy.table.name for copy in rig.observer.copies]}; {failures}")  # fmt: skip
        assert beside.held == []
        assert beside.longest < min(GIVEN_UP_SECONDS, without.longest + 2), "this machine is busier than any server"
        rig.setup()
        rig.sync()
        rows = TableStates(rig.settings.layout).all()
        aside = [name for name, row in rows.items() if row.state is TableState.SET_ASIDE]
        rig.engine().sync(Bounds(), copy_anew=[name for name in aside if name in _names()])
        rig.assert_equal(*(str(name) for name in _names()))
        assert failures == []


def _names() -> list[TableName]:
    return [TableName("public", table) for table in TABLES]
