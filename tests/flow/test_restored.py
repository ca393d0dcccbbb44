"""A sync refuses a source that was restored to an earlier time, even if the source has since written WAL above every
LSN in the lake."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import LogAhead
from pgcdc_assets.flow.requests import place_verify_request
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints
from tests.fix_postgres import TEST_SETTINGS, Database, fresh_database
from tests.flow.rig import Rig
from tests.servers import copied, new_server

pytestmark = pytest.mark.spark


@pytest.fixture
def server(pg_version: int, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may stop. It replaces the shared fixture, so that the rig's database is created on it."""
    with new_server(tmp_path / "server", pg_version, settings=TEST_SETTINGS) as server:
        yield server


def foreign(server: EmbeddedServer, *, beyond: Lsn | None = None) -> None:
    """Writes WAL in a database that no project follows, at least up to ``beyond``."""
    with fresh_database(server) as other, other.connect() as conn:
        conn.execute("CREATE TABLE foreign_table (v text)")
        while True:
            conn.execute("INSERT INTO foreign_table SELECT repeat('x', 100) FROM generate_series(1, 5000)")
            row = conn.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
            assert row is not None
            if beyond is None or Lsn.parse(row[0]) > beyond:
                return


@pytest.mark.long
def test_source_restored_to_below_the_newest_point_is_refused(
    rig: Rig, server: EmbeddedServer, database: Database, tmp_path: Path
) -> None:
    """After the backup and before the restore, the followed tables do not change, and ``verify`` requests a point. So
    only the LSN of this point shows that the source was restored to an earlier time."""
    rig.setup()
    rig.sync()
    rig.conn.execute("UPDATE t SET v = 'before' WHERE id < 10")
    rig.sync()
    foreign(server)
    rig.conn.close()
    server.stop()
    backup = tmp_path / "backup"
    copied(server.data, backup)
    server.start(survive=False)
    points, log = ConsistentPoints(rig.settings.layout), ChangeLog(rig.settings.layout)
    with place_verify_request(rig.settings.layout) as request, database.connect() as conn:
        rig.conn = conn
        foreign(server)
        at = rig.flush()
        request.at(at)
        foreign(server)
        rig.sync(until=at)
    assert points.has(at)
    assert log.position() >= at
    server.stop()
    shutil.rmtree(server.data)
    copied(backup, server.data)
    server.start(survive=False)
    with database.connect() as conn:
        rig.conn = conn
        assert rig.flush() < at
        for number in range(3):
            conn.execute("INSERT INTO t VALUES (%s, 'other than those that were lost', NULL)", [1000 + number])
        foreign(server, beyond=at)
        conn.execute("INSERT INTO t VALUES (2000, 'past the point', NULL)")
        for _ in range(2):
            with pytest.raises(LogAhead, match=f"up to {at} differ.*restored.*at LSN.*teardown --lake"):
                rig.sync()
