"""Two sample applications, each with traffic, migrations and nightly jobs during a sync in follow mode.

At each comparison, every mirror equals its table, or `status` reports the difference. At every consistent point, the
lake satisfies the application's invariants.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.settings import Settings
from tests.conftest import SEED
from tests.fix_postgres import Database
from tests.flow.rig import Rig
from tests.workloads.application import Application
from tests.workloads.forum import FORUM
from tests.workloads.hub import HUB
from tests.workloads.play import LOOK_SECONDS, Follower, Play

APPLICATIONS = [pytest.param(application, id=application.name) for application in (FORUM, HUB)]


@pytest.fixture
def follower(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Follower]:
    monkeypatch.chdir(tmp_path)
    settings = Settings(
        source=database.conninfo, slot=f"s_{database.name}"[:60], batch_seconds=0.2, range_seconds=LOOK_SECONDS
    )
    with database.connect() as conn:
        yield Follower(Rig(settings, conn, lambda: spark, Silent()))


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.takes(120)
@pytest.mark.parametrize("application", APPLICATIONS)
def test_mirrors_follow_the_tables_of_an_application(
    application: Application, database: Database, follower: Follower
) -> None:
    """Runs all migrations, a few at a time. Every kind of request must be executed at least once."""
    with Play.begun(application, database, follower, seed=int(SEED), sessions=4) as play:
        follower.setup()
        for first in range(0, len(application.migrations), 4):
            play.chapter(application.migrations[first : first + 4], requests=60, verified=True)
        served = {request.__name__ for request in application.requests if request is not application.rejected}
        assert play.traffic.done.keys() >= served
