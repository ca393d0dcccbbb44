"""``verify`` as an asset check, with a real source, lake and Dagster instance."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pytest

from pgcdc_assets.core.lsn import LsnRange
from pgcdc_assets.defs.keys import Names
from pgcdc_assets.defs.observer import Watcher
from pgcdc_assets.defs.pipeline import pipeline
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.defs.resources import Source
from pgcdc_assets.defs.verification import VERIFY_CHECK
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Observer
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.points.points import ConsistentPoints
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings
from tests.flow.rig import Rig, T, U, rig

__all__ = ["rig"]

NAMES = Names("pgcdc")
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@dataclass
class Engines:
    """Replaces the resource ``<source>_engines``: engines with the Spark session of the test session."""

    rig: Rig
    source: Source

    def engine(self, settings: Settings, observer: Observer, command: str) -> Engine:
        return Engine(settings, str(settings.source), observer, self.rig.session, command)

    engine_at_rest = engine


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with warnings.catch_warnings(), dg.DagsterInstance.ephemeral() as instance:
        warnings.simplefilter("ignore", dg.BetaWarning)
        yield instance


def verified(instance: dg.DagsterInstance, rig: Rig) -> dict[str, dg.AssetCheckEvaluation]:
    """Runs the verify job. Returns its check evaluations by table name."""
    of = Replication(rig.settings)
    defs = pipeline(of, load_catalog(of.settings.catalog_file))
    given: dict[str, Any] = {NAMES.engines: Engines(rig, Source()), NAMES.watcher: Watcher()}
    result = defs.resolve_job_def(NAMES.verify_job).execute_in_process(
        instance=instance, resources=given, run_config=QUIET
    )
    assert result.success
    return {found.asset_key.path[-1]: found for found in result.get_asset_check_evaluations()}


def materialized(instance: dg.DagsterInstance, rig: Rig) -> dict[str, dg.AssetCheckEvaluation]:
    """Materializes the mirrors for the newest range. Returns the evaluations of the check ``equal_to_source`` in this
    run."""
    of = Replication(rig.settings)
    given: dict[str, Any] = {NAMES.engines: Engines(rig, Source()), NAMES.watcher: Watcher()}
    point = ConsistentPoints(rig.settings.layout).newest()
    assert point is not None
    known = of.register(instance)
    last = known.add(LsnRange(ChangeLog(rig.settings.layout).start, point.replay_lsn)).key
    ours = pipeline(of, load_catalog(of.settings.catalog_file))
    defs = dg.Definitions(
        assets=ours.assets, asset_checks=ours.asset_checks, resources=given, executor=dg.in_process_executor
    )
    result = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance, run_config=QUIET,
        asset_selection=[NAMES.of_stage("mirror", table) for table in (T, U)],
        tags={f"dagster/asset_partition_range_{end}": last for end in ("start", "end")},
    )  # fmt: skip
    assert result.success
    found = [check for check in result.get_asset_check_evaluations() if check.check_name == VERIFY_CHECK]
    return {check.asset_key.path[-1]: check for check in found}


@pytest.mark.long
def test_the_verify_job_compares_all_tables_at_the_same_lsn(rig: Rig, instance: dg.DagsterInstance) -> None:
    rig.started()
    rig.commit("UPDATE t SET v = 'new' WHERE id < 5", "DELETE FROM u WHERE a = 7")
    found = verified(instance, rig)
    assert {name: (check.passed, check.description) for name, check in found.items()} == {
        "t": (True, "equal"), "u": (True, "equal"),
    }  # fmt: skip
    assert found["u"].metadata["mirror_rows"].value == 49
    assert found["u"].metadata["verified_lsn"] == found["t"].metadata["verified_lsn"]
    # A backfill of the mirrors does not compare again. Its check results repeat the result of the last comparison.
    rig.commit("UPDATE t SET v = 'newer' WHERE id < 5")
    kept = materialized(instance, rig)
    assert kept["t"].passed
    assert kept["t"].metadata["verified_lsn"] == found["t"].metadata["verified_lsn"]
    assert str(kept["t"].description).startswith("equal (the result of the last comparison")


@pytest.mark.long
def test_a_table_that_differs_fails_only_its_own_check(rig: Rig, instance: dg.DagsterInstance) -> None:
    rig.started()
    # The publication now excludes updates, so the mirror does not get the update of t below.
    rig.conn.execute("ALTER PUBLICATION pgcdc SET (publish = 'insert')")
    rig.sync()
    rig.commit("UPDATE t SET v = 'unseen' WHERE id = 3", "INSERT INTO u VALUES (99, 0, 1)")
    found = verified(instance, rig)
    assert found["u"].passed
    assert not found["t"].passed
    assert found["t"].metadata["missing"].value == 1
