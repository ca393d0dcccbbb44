"""The command killed between what it derived before a commit and the feeds that take it."""

from __future__ import annotations

import os
import random
import signal
from contextlib import closing
from pathlib import Path

import pytest

from pgcdc_assets.core.faultpoints import FaultPoint
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.location import Location
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.store.local import path_of
from tests.crash.faults import Faults, Kind, wait_until
from tests.crash.proxy import Proxy
from tests.crash.tally import Tally
from tests.crash.test_process import LEVEL, SECONDS, ByProcess, Case
from tests.fix_postgres import fresh_database

MANY = "INSERT INTO entry (note) SELECT repeat('x', 1000) FROM generate_series(1, 54000)"
"""Three segments of the receiver's memory."""


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(3600)
@pytest.mark.takes(80)
def test_killed_where_early_files_have_landed(
    crash_server: EmbeddedServer, faults: Faults, chance: random.Random, tally: Tally, tmp_path: Path
) -> None:
    """Their files lie in the feed's folder, in no commit. The next run takes the transaction from the log."""
    point = FaultPoint.EARLY_LANDED
    with fresh_database(crash_server) as database, Proxy(crash_server.socket_folder) as proxy, closing(
        ByProcess(crash_server, faults, proxy, chance, tally, database, Location.of(tmp_path / "lake"),
                  folder=tmp_path)
    ) as rig, database.connect() as other:  # fmt: skip
        staging = path_of(Layout.of(rig.lake).staging)
        rig.project.run("setup")
        rig.project.run("sync")
        faults.arm(point)
        with rig._running(Case("follow", point)) as process:
            slot = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
            assert wait_until(lambda: rig.conn.execute(slot, [rig.slot]).fetchone() == (True,), SECONDS)
            other.execute("BEGIN")
            other.execute(MANY)
            rig.conn.execute("INSERT INTO wide VALUES (100)")
            assert wait_until(lambda: bool(list(staging.glob("*/*/*.parquet"))), SECONDS), "nothing was derived early"
            # What is still being written is waited for.
            other.execute("COMMIT")
            assert wait_until(lambda: faults.reached(point) is not None, SECONDS), "no early file landed"
            os.killpg(process.pid, signal.SIGKILL)
        faults.clear()
        tally.add(LEVEL, point, Kind.RUN)
        rig.look()
        rig.project.run("sync")
        rig.assert_all_there()
