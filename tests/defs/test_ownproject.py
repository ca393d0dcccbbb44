"""In a Dagster instance, a source name belongs to one project. A second project with the same name is refused before it
changes anything. Projects with different names do not affect each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.defs.keys import Names
from pgcdc_assets.defs.maintenance import MAINTAIN_OP, maintain_job
from pgcdc_assets.defs.partitions import RangeRegister, claim, register_snapshot, release
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.defs.resources import Source
from pgcdc_assets.defs.sensors import tick
from pgcdc_assets.defs.sync import REPAIR_OP, SYNC_OP, repair_job, sync_job
from pgcdc_assets.errors import WrongInstance
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from tests.defs.catalogs import NAMES, catalog_of
from tests.defs.doubles import QUIET, Script, report_of, resources, span
from tests.projectfiles import CATALOG_FILE

FIRST, SECOND = catalog_of(("public", "orders"), slot="first"), catalog_of(("public", "orders"), slot="second")
OTHER = Names("other")
"""The Dagster names of the second project, if it has a different source name."""

Job = Callable[[Replication], dg.JobDefinition]


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """The instance after the first project's first sync."""
    with dg.DagsterInstance.ephemeral() as instance:
        claim(instance, NAMES, FIRST.identity)
        RangeRegister(instance, NAMES).add(span(0x10, 0x20))
        yield instance


def run(
    instance: dg.DagsterInstance, of: Replication, script: Script, job: Job, op: str, config: dict[str, Any]
) -> dg.ExecuteInProcessResult:
    return job(of).execute_in_process(
        run_config={"ops": {of.names.of(op): {"config": config}}, "loggers": QUIET},
        instance=instance, raise_on_error=False, resources=resources(script, of.names),
    )  # fmt: skip


def test_projects_with_different_names_can_share_a_dagster_instance(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each project has its own ranges and runs, even with equal tables and overlapping ranges. A teardown of one
    project does not affect the other project."""
    monkeypatch.chdir(tmp_path)
    save_catalog(SECOND, CATALOG_FILE)
    ChangeLog(Settings().layout).create(SECOND.identity, Lsn(0x18), 1)
    other, orders = Replication(Settings(name="other")), SECOND.tables[0].name
    script = Script(ranges=[report_of(span(0x18, 0x28), orders)])
    result = run(instance, other, script, sync_job, SYNC_OP, {})
    assert result.success
    assert script.asked[0][-1] == [], "it sees no range of the first project"
    assert RangeRegister(instance, OTHER).known() == [span(0x18, 0x28)]
    assert RangeRegister(instance, NAMES).known() == [span(0x10, 0x20)]
    done = {key.path[0] for event in result.get_asset_materialization_events() if (key := event.asset_key)}
    assert done == {"other"}
    found = instance.get_run_by_id(result.run_id)
    assert found is not None
    assert found.tags.items() >= OTHER.tags.items()
    repair = {"table": "orders", "span": "0/10..0/30"}
    assert run(instance, other, script, repair_job, REPAIR_OP, repair).success
    assert instance.get_materialized_partitions(NAMES.of_stage("mirror", orders)) == set()
    assert instance.get_materialized_partitions(OTHER.of_stage("mirror", orders)) == {span(0x18, 0x28).key}
    assert run(instance, other, script, maintain_job, MAINTAIN_OP, {}).success
    release(instance, OTHER, SECOND.identity)
    claim(instance, NAMES, FIRST.identity)
    with pytest.raises(WrongInstance):
        claim(instance, NAMES, SECOND.identity)


def test_the_sensor_of_a_project_with_another_name_is_not_refused(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_catalog(SECOND, CATALOG_FILE)
    settings = Settings(name="other", source="host=/nowhere")
    found = tick(Replication(settings), dg.build_sensor_context(instance=instance), Source())
    assert isinstance(found, dg.SensorResult)
    assert "/nowhere" in str(found.skip_reason)
    assert {event.asset_key.path[0] for event in found.asset_events} == {"other"}
    assert instance.get_dynamic_partitions(NAMES.owner) != instance.get_dynamic_partitions(OTHER.owner)


def test_a_project_is_still_accepted_after_its_database_was_renamed(instance: dg.DagsterInstance) -> None:
    claim(instance, NAMES, FIRST.identity)
    renamed = Identity(FIRST.identity.system_identifier, "another_name", FIRST.identity.slot)
    claim(instance, NAMES, renamed)
    with pytest.raises(WrongInstance, match="name pgcdc for another project, which reads slot first of system 7"):
        claim(instance, NAMES, SECOND.identity)


@pytest.mark.parametrize("identity", [
    SECOND.identity, Identity("7000000000000000002", FIRST.identity.database, FIRST.identity.slot),
])  # fmt: skip
def test_a_project_of_the_same_name_with_another_slot_or_system_is_refused(
    instance: dg.DagsterInstance, identity: Identity
) -> None:
    with pytest.raises(WrongInstance):
        claim(instance, NAMES, identity)
    claim(instance, NAMES, FIRST.identity)


def test_another_project_can_use_the_name_after_a_teardown_of_the_first_project(instance: dg.DagsterInstance) -> None:
    release(instance, NAMES, SECOND.identity)
    with pytest.raises(WrongInstance):
        claim(instance, NAMES, SECOND.identity)
    release(instance, NAMES, FIRST.identity)
    claim(instance, NAMES, SECOND.identity)
    with pytest.raises(WrongInstance):
        claim(instance, NAMES, FIRST.identity)


def test_another_project_can_use_the_name_after_all_partitions_were_deleted(instance: dg.DagsterInstance) -> None:
    """As long as the instance has partitions of the first project, the second project is refused, with the advice to
    delete these partitions."""
    copied = register_snapshot(instance, NAMES, Lsn(0x10))
    instance.delete_dynamic_partition(str(NAMES.lsn_ranges.name), span(0x10, 0x20).key)
    with pytest.raises(WrongInstance, match="delete all partitions of the assets `change_log`"):
        claim(instance, NAMES, SECOND.identity)
    instance.delete_dynamic_partition(str(NAMES.snapshot_ranges.name), copied)
    claim(instance, NAMES, SECOND.identity)


@pytest.mark.parametrize(
    ("job", "op", "config"),
    [
        (sync_job, SYNC_OP, {}), (maintain_job, MAINTAIN_OP, {}),
        (repair_job, REPAIR_OP, {"table": "orders", "span": "0/10..0/30"}),
    ],
    ids=["sync", "maintain", "repair"],
)  # fmt: skip
def test_a_run_of_a_second_project_of_the_same_name_changes_nothing(
    instance: dg.DagsterInstance, job: Job, op: str, config: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_catalog(SECOND, CATALOG_FILE)
    ChangeLog(Settings().layout).create(SECOND.identity, Lsn(0x1000), 1)
    script = Script()
    result = run(instance, Replication(Settings()), script, job, op, config)
    assert not result.success
    assert script.asked == []
    assert RangeRegister(instance, NAMES).known() == [span(0x10, 0x20)]


def test_the_sensor_of_a_second_project_of_the_same_name_only_reports_the_reason(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_catalog(SECOND, CATALOG_FILE)
    found = tick(Replication(Settings(source="host=/nowhere")), dg.build_sensor_context(instance=instance), Source())
    assert isinstance(found, dg.SkipReason)
    assert "uses the name pgcdc for another project" in str(found.skip_message)
