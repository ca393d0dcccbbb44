"""Dagster's events and runs are deleted together with their LSN ranges. With the project's ``dagster.yaml``, Dagster
also deletes old ticks."""

import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.instance import InstanceRef

from pgcdc_assets.defs.keys import Names
from pgcdc_assets.defs.maintenance import forget_runs
from pgcdc_assets.defs.partitions import RangeRegister
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.project import INSTANCE_YAML
from pgcdc_assets.settings import Settings
from tests.defs.catalogs import NAMES
from tests.defs.doubles import span

OF = Replication(Settings())
MIRROR, QUIET_MIRROR = NAMES.key("public", "orders"), NAMES.key("public", "quiet")
ASSETS = [NAMES.change_log, MIRROR, QUIET_MIRROR]
QUIETLY = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    (tmp_path / "dagster.yaml").write_text(INSTANCE_YAML)
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(tmp_path))) as instance:
        yield instance


def run(instance: dg.DagsterInstance, *keys_: str, assets: list[dg.AssetKey], of: Names | None = NAMES) -> str:
    """Creates a run of the sync that materialized these partitions of these assets. Returns its id."""

    @dg.op
    def record(context: dg.OpExecutionContext) -> None:
        for asset in assets:
            for key in keys_ or (None,):
                context.log_event(dg.AssetMaterialization(asset, partition=key))

    @dg.job(name=(of or NAMES).sync_job)
    def sync() -> None:
        record()

    return sync.execute_in_process(run_config=QUIETLY, instance=instance, tags=of.tags if of else {}).run_id


def rows(folder: Path) -> int:
    """The number of events in all of Dagster's SQLite databases."""
    count = 0
    for path in folder.rglob("history/runs/*.db"):
        with sqlite3.connect(path) as conn:
            count += int(conn.execute("SELECT count(*) FROM event_logs").fetchone()[0])
    return count


@pytest.mark.long
def test_only_runs_of_deleted_ranges_are_deleted(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    gone, kept = span(0x10, 0x20), span(0x20, 0x30)
    register = RangeRegister(instance, NAMES)
    for known in (gone, kept):
        register.add(known)
    copy = run(instance, assets=[QUIET_MIRROR])
    old = [run(instance, gone.key, assets=[NAMES.change_log, MIRROR]) for _ in range(5)]
    idle = run(instance, assets=[])
    foreign = run(instance, gone.key, assets=[], of=None)
    other = run(instance, gone.key, assets=[], of=Names("other"))
    closing = run(instance, kept.key, assets=[NAMES.change_log, MIRROR])
    repair = run(instance, kept.key, assets=[MIRROR])
    instance.report_runless_asset_event(dg.AssetObservation(NAMES.slot))
    under_way = instance.create_run_for_job(_waiting, status=dg.DagsterRunStatus.STARTED, tags=NAMES.tags).run_id
    register.prune(kept.start, kept.end)
    before = rows(tmp_path), len(list(tmp_path.rglob("history/runs/*.db")))

    assert forget_runs(instance, OF, ASSETS, datetime.now(UTC) - timedelta(hours=1), lambda: False) == 0
    assert rows(tmp_path) == before[0]
    later = datetime.fromtimestamp(time.time() + 1, UTC)
    assert forget_runs(instance, OF, ASSETS, later, lambda: True) == 0
    assert forget_runs(instance, OF, ASSETS, later, lambda: False) == len(old) + 1

    left = {record.run_id for record in instance.get_runs()}
    assert left == {copy, foreign, other, closing, repair, under_way}
    assert not left & {*old, idle}
    after = rows(tmp_path), len(list(tmp_path.rglob("history/runs/*.db")))
    assert after[1] == before[1] - len(old) - 1
    assert after[0] < before[0] / 2
    assert instance.fetch_observations(NAMES.slot, limit=5).records == []
    assert instance.get_materialized_partitions(MIRROR) == {kept.key}
    assert instance.get_dynamic_partitions(str(NAMES.lsn_ranges.name)) == [kept.key]
    assert instance.get_latest_materialization_event(QUIET_MIRROR) is not None
    # The run of the copy, the run that ended the range, and the run of the repair are deleted only after the range is
    # deleted and a newer run has materialized the same assets.
    register.prune(kept.end, kept.end)
    newest = run(instance, span(0x30, 0x40).key, assets=ASSETS)
    assert forget_runs(instance, OF, ASSETS, datetime.fromtimestamp(time.time() + 1, UTC), lambda: False) == 3
    assert {record.run_id for record in instance.get_runs()} == {foreign, other, under_way, newest}


def test_a_run_of_a_users_job_is_deleted_only_if_it_selected_only_assets_of_the_source(
    instance: dg.DagsterInstance,
) -> None:
    @dg.asset(key=MIRROR)
    def mirror() -> None: ...

    @dg.asset
    def mine() -> None: ...

    nightly = dg.define_asset_job("nightly", [mirror, mine])
    job = dg.Definitions(assets=[mirror, mine], jobs=[nightly]).resolve_job_def("nightly")

    def nightly_run(selected: list[dg.AssetKey] | None) -> str:
        ran = job.execute_in_process(QUIETLY, instance, asset_selection=selected, tags=NAMES.tags)
        return ran.run_id

    # A schedule or a sensor starts an asset job without a selection. The run then materializes all assets of the job.
    runs = [nightly_run(selected) for selected in (None, [mine.key, MIRROR], [MIRROR], [MIRROR])]
    whole = instance.get_run_by_id(runs[0])
    assert whole is not None
    assert not whole.asset_selection
    assert forget_runs(instance, OF, ASSETS, datetime.fromtimestamp(time.time() + 1, UTC), lambda: False) == 1
    assert {record.run_id for record in instance.get_runs()} == {*runs} - {runs[2]}


def test_the_dagster_instance_of_a_project_deletes_old_ticks(instance: dg.DagsterInstance) -> None:
    assert set(yaml.safe_load(INSTANCE_YAML)["retention"]) == {"schedule", "sensor"}
    for kind in (InstigatorType.SENSOR, InstigatorType.SCHEDULE):
        kept = instance.get_tick_retention_settings(kind)
        assert all(0 < days <= 30 for days in kept.values())


@dg.job
def _waiting() -> None: ...
