"""Setup, copy, changes and verify with the oldest and newest server: each consistent point equals the source. All other
tests of whole syncs use the newest server."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.checks.report import VerifyReport
from pgcdc_assets.checks.verify import verify
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.flow.requests import place_verify_request
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings
from tests.fix_postgres import fresh_database
from tests.flow.rig import Rig
from tests.journal import Journal
from tests.projectfiles import CATALOG_FILE
from tests.versions.workload import ALTERED, TABLES, Workload, make

pytestmark = pytest.mark.spark


@pytest.mark.long
@pytest.mark.versions(14, long=[18])
def test_points_equal_the_source_after_copy_and_changes(
    version_server: EmbeddedServer, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _whole_path(version_server, spark)


def _whole_path(server: EmbeddedServer, spark: SparkSession) -> None:
    with fresh_database(server) as database, database.connect() as conn:
        settings = Settings(
            source=database.conninfo, slot=f"s_{database.name}", tables=("-journal.*",), messages=("*",)
        )
        rig = Rig(settings, conn, lambda: spark, Silent())
        work = Workload(database)
        make(conn, server.version)
        work.before()
        journal = Journal.keep(conn, *TABLES)
        rig.setup()
        rig.sync()
        work.rows()
        rig.sync()
        work.transactions()
        report = rig.sync()
        assert report.set_aside == []
        assert journal.assert_published(rig.lake) >= 3
        rig.assert_equal(*TABLES, ALTERED)
        assert _verified(rig).ok
        # The insert position is then after a page header, which is not the end of a record.
        conn.execute("SELECT pg_switch_wal()")
        assert _verified(rig).ok


def _verified(rig: Rig) -> VerifyReport:
    """Runs `verify`, in addition to the comparison with the journal."""
    catalog, points = load_catalog(CATALOG_FILE), ConsistentPoints(rig.settings.layout)
    assert catalog is not None
    with place_verify_request(rig.settings.layout) as request:

        def reach(lsn: Lsn) -> Point:
            request.at(lsn)
            rig.sync()
            point = points.newest()
            assert point is not None
            return point

        return verify(rig.settings, catalog, None, reach)
