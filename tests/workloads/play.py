"""Plays an application during a sync in follow mode: traffic, migrations and nightly jobs, with a comparison after
each."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import errors

from pgcdc_assets.checks.status import status
from pgcdc_assets.checks.verify import verify
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.flow import lock
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.requests import place_verify_request
from pgcdc_assets.points.points import ConsistentPoints, Point
from pgcdc_assets.project import load_catalog
from tests.fix_postgres import Database
from tests.flow.rig import Rig
from tests.projectfiles import CATALOG_FILE
from tests.waiting import wait_for
from tests.workloads.application import Application, Migration
from tests.workloads.look import BEAT, Look, beat, look, violations
from tests.workloads.traffic import Traffic

_log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""The setting ``range_seconds``. The catalog is checked at least this often."""
SETTLE_SECONDS = 120.0
LOCK_TRIES = 60
"""Number of tries to get the lock for a step of a migration, one second each, as in tools for migrations without
downtime."""


@dataclass
class Follower:
    rig: Rig

    @property
    def lake(self) -> Path:
        return self.rig.lake

    def setup(self) -> None:
        self.rig.setup()

    @contextmanager
    def following(self) -> Iterator[Callable[[], str | None]]:
        stop, ended = threading.Event(), list[str]()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                self.rig.engine("follow").sync(Bounds(follow=True, stop=stop))
            except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
                failures.append(error)
                ended.append(repr(error))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield lambda: ended[0] if ended else None
        finally:
            stop.set()
            thread.join(SETTLE_SECONDS)
            assert not thread.is_alive(), "follow did not end"
        if failures:
            raise failures[0]

    def snapshot(self, tables: Sequence[str]) -> None:
        names = [TableName(*table.split(".", 1)) for table in tables]
        self.rig.engine().sync(Bounds(), copy_anew=names)

    def status(self) -> dict[str, Any]:
        return dict[str, Any](status(self.rig.settings).to_json())

    def unequal(self) -> list[str]:
        catalog, points = load_catalog(CATALOG_FILE), ConsistentPoints(self.rig.settings.layout)
        assert catalog is not None
        with place_verify_request(self.rig.settings.layout) as request:

            def reach(lsn: Lsn) -> Point:
                request.at(lsn)
                if lock.holder(self.rig.settings.layout) is None:
                    self.rig.sync(until=lsn)
                wait_for(lambda: points.has(lsn), what="the point that verify asks for")
                point = points.at(lsn)
                assert point is not None
                return point

            reports = verify(self.rig.settings, catalog, None, reach).tables
        return [str(report.table) for report in reports if report.missing or report.extra or report.different]


@dataclass
class Play:
    """One application with its own database. ``told``: by migration, the reports about tables."""

    application: Application
    database: Database
    conn: psycopg.Connection[Any]
    follower: Follower
    traffic: Traffic
    told: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def begun(
        cls, application: Application, database: Database, follower: Follower, *, seed: int = 1, sessions: int = 3
    ) -> Iterator[Play]:
        with database.connect() as conn:
            for statements in (BEAT, application.model):
                conn.execute(statements.encode())
            traffic = Traffic(database, application, seed, sessions)
            with contextlib.closing(traffic):
                yield cls(application, database, conn, follower, traffic)

    def chapter(self, migrations: Sequence[Migration], requests: int, *, verified: bool = False) -> None:
        """Runs a sync in follow mode during traffic and migrations. Then repairs tables that were set aside, and
        compares all tables. ``verified``: also runs `verify` during traffic, which must find only differences that were
        reported."""
        with self.follower.following() as ended:
            with self.traffic.burst(requests):
                """The first chapter makes its copies during this traffic."""
            self.settle(ended, "traffic")
            for migration in migrations:
                with self.traffic.burst(requests):
                    self._migrate(migration)
                self.settle(ended, migration.name)
            self.traffic.one(self.application.nightly)
            self.settle(ended, "nightly")
            if verified:
                with self.traffic.burst(requests):
                    assert set(self.follower.unequal()) <= self.told["nightly"].keys()
        self.mend()

    def settle(self, ended: Callable[[], str | None], name: str) -> None:
        """Waits until every table equals the source at a consistent point, or is reported as different."""
        beat(self.conn)
        started = time.monotonic()
        deadline = started + SETTLE_SECONDS
        while True:
            found = self._look()
            if found.settled:
                seconds = time.monotonic() - started
                _log.info("%s, %s: settled in %.1f s, told %s", self.application.name, name, seconds, found.told)
                self.told[name] = found.told
                return
            assert ended() is None, f"following ended: {ended()}"
            assert time.monotonic() < deadline, f"after {name}: {found}"
            time.sleep(0.1)

    def mend(self) -> None:
        """Does what a user would do: runs `pgcdc setup` for new tables, and `pgcdc snapshot` for tables that were set
        aside. Then compares all tables."""
        self.follower.setup()
        beat(self.conn)
        aside = [entry["name"] for entry in self.follower.status()["tables"] if entry["state"] == "set_aside"]
        self.follower.snapshot(aside)
        found = self._look()
        assert found.settled, found
        inserts_only = {table for table, said in found.told.items() if "updates and deletes are not replicated" in said}
        assert found.told.keys() == inserts_only, found.told
        assert set(self.follower.unequal()) <= inserts_only
        asked, wrong = violations(self.follower.lake, self.application.invariants)
        assert asked > 0
        assert not wrong, wrong[:5]

    def _look(self) -> Look:
        return look(self.conn, self.follower.lake, self.follower.status())

    def _migrate(self, migration: Migration) -> None:
        with self.database.connect(options="-c lock_timeout=1s") as conn:
            for step in migration.steps:
                _patiently(conn, step)
        if migration.setup:
            self.follower.setup()


def _patiently(conn: psycopg.Connection[Any], step: str) -> None:
    for _ in range(LOCK_TRIES):
        try:
            conn.execute(step.encode())
            return
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            continue
    raise AssertionError(f"no lock within {LOCK_TRIES} tries of a second: {step}")
