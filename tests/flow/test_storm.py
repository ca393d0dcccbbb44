"""The whole path in a storm of DDL: the application hardly waits for us, and when the storm is over all is equal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.checks.verdict import Verdict
from pgcdc_assets.checks.verify import ComparisonPoint, verify
from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.core.states import TableState
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.errors import LakeError, PgcdcError
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.points.states import TableStates
from pgcdc_assets.savedcatalog import load_catalog
from pgcdc_assets.settings import CATALOG_FILE
from tests.fix_postgres import Database
from tests.flow.rig import Rig
from tests.source.storm import BEARABLE_SECONDS, GIVEN_UP_SECONDS, STORMS, TABLES, Storm, make_tables
from tests.traps.scenario import empty_rig

pytestmark = [pytest.mark.spark, pytest.mark.long]

SECONDS, WITHOUT_SECONDS = 60, 15
REST_SECONDS = 1.0
"""A copy that is never left alone never lands."""
NAMES = [TableName("public", table) for table in TABLES]


@dataclass
class Ours:
    """What a project does to its source, over and over: copies, verifies, setups, all of them whole."""

    rig: Rig
    done: Counter[str] = field(default_factory=Counter)

    def until(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            for act in (self._copies, self._verifies, self.rig.setup):
                try:
                    act()
                except PgcdcError as error:
                    self.done[f"{act.__name__}: {type(error).__name__}"] += 1
                else:
                    self.done[act.__name__] += 1

    def _copies(self) -> None:
        before = len(self.rig.observer.copies)
        try:
            # One table: any of them may be away under another name just now, and then is none of the project's.
            self.rig.engine().sync(Bounds(), copy_anew=[NAMES[before % len(NAMES)]])
        finally:
            self.done["copied"] += len(self.rig.observer.copies) - before

    def _verifies(self) -> None:
        report = verify(self.rig.settings, self._catalog(), None, self._reached)
        self.done["compared"] += sum(table.compared for table in report.tables)
        wrong = [table for table in report.tables if table.verdict is Verdict.DIFFERS]
        assert not wrong, f"beside the storm, and not told: {wrong}"

    def _reached(self, lsn: Lsn) -> ComparisonPoint:
        self.rig.engine().sync(Bounds(until=lsn))
        point = ConsistentPoints(self.rig.settings.layout).at(lsn)
        if point is None:
            raise LakeError("was not reached", thing="the boundary", lsn=lsn)
        return point

    def _catalog(self) -> Catalog:
        catalog = load_catalog(CATALOG_FILE)
        assert catalog is not None
        return catalog


@pytest.mark.timeout(1800)
def test_the_whole_path_in_a_storm(server: EmbeddedServer, spark: SparkSession, tmp_path: Path) -> None:
    with empty_rig(server, spark, tmp_path / "project", range_seconds=5) as rig:
        make_tables(rig.conn)
        # What is dropped and made again stays published.
        rig.conn.execute(f"CREATE PUBLICATION {rig.settings.publication} FOR ALL TABLES".encode())
        rig.setup()
        database, ours, told = Database(server, rig.conn.info.dbname), Ours(rig), list[str]()
        for _ in range(STORMS):
            without, beside = Storm(database, REST_SECONDS), Storm(database, REST_SECONDS)
            _blow(without, lambda: time.sleep(WITHOUT_SECONDS))
            _blow(beside, lambda: ours.until(time.monotonic() + SECONDS))
            told.append(
                f"longest of {beside.queries} queries {beside.longest:.2f} s beside us and {beside.altered} changes, "
                f"of these behind us {beside.behind_us:.2f} s; of {without.queries} without us {without.longest:.2f} s;"
                f" {dict(ours.done)}"
            )
            print(told[-1])
            assert beside.held == [], "a lock was waited for with another one in hand"
            assert beside.longest < GIVEN_UP_SECONDS
            assert beside.behind_us < BEARABLE_SECONDS, told
            if beside.longest < without.longest + BEARABLE_SECONDS:
                break
        else:
            raise AssertionError(told)
        assert ours.done["copied"], told
        assert ours.done["setup"], told
        _assert_all_equal(rig)


def _blow(storm: Storm, meanwhile: Callable[[], None]) -> None:
    with storm.blowing():
        meanwhile()


def _assert_all_equal(rig: Rig) -> None:
    """What was set aside says so, and comes back; nothing is left out, and nothing differs."""
    for table in TABLES:
        # Where the storm ended between a table's two names.
        rig.conn.execute(f"ALTER TABLE IF EXISTS {table}_away RENAME TO {table}".encode())
    rig.setup()
    rig.sync()
    rows = TableStates(rig.settings.layout).all()
    aside = [name for name in NAMES if rows[name].state is TableState.SET_ASIDE]
    rig.engine().sync(Bounds(), copy_anew=aside)
    rig.assert_equal(*(str(name) for name in NAMES))
