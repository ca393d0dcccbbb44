"""One Dagster instance belongs to one project. A second project is refused before it changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pgcdc_assets.core.catalog import Identity
from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.defs.maintenance import MAINTAIN_OP, maintain_job
from pgcdc_assets.defs.observer import Nobody
from pgcdc_assets.defs.partitions import RangeRegister, claim, register_snapshot, release
from pgcdc_assets.defs.resources import Source
from pgcdc_assets.defs.sensors import tick
from pgcdc_assets.defs.sync import REPAIR_OP, SYNC_OP, repair_job, sync_job
from pgcdc_assets.errors import WrongInstance
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from tests.defs.catalogs import catalog_of
from tests.defs.doubles import RecordingEngines, Script, span
from tests.projectfiles import CATALOG_FILE

FIRST, SECOND = catalog_of(("public", "orders"), slot="first"), catalog_of(("public", "orders"), slot="second")
QUIET = {"console": {"config": {"log_level": "CRITICAL"}}}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """The instance as the first project leaves it after its first sync."""
    with dg.DagsterInstance.ephemeral() as instance:
        claim(instance, FIRST.identity)
        RangeRegister(instance).add(span(0x10, 0x20))
        yield instance


def test_a_project_keeps_its_instance_after_a_rename_of_its_database(instance: dg.DagsterInstance) -> None:
    claim(instance, FIRST.identity)
    renamed = Identity(FIRST.identity.system_identifier, "another_name", FIRST.identity.slot)
    claim(instance, renamed)
    with pytest.raises(WrongInstance, match="belongs to another project, which reads slot first of system 7"):
        claim(instance, SECOND.identity)


@pytest.mark.parametrize("identity", [
    SECOND.identity, Identity("7000000000000000002", FIRST.identity.database, FIRST.identity.slot),
])  # fmt: skip
def test_another_slot_or_system_is_another_project(instance: dg.DagsterInstance, identity: Identity) -> None:
    with pytest.raises(WrongInstance):
        claim(instance, identity)
    claim(instance, FIRST.identity)


def test_an_instance_can_be_used_by_another_project_after_a_teardown(instance: dg.DagsterInstance) -> None:
    release(instance, SECOND.identity)
    with pytest.raises(WrongInstance):
        claim(instance, SECOND.identity)
    release(instance, FIRST.identity)
    claim(instance, SECOND.identity)
    with pytest.raises(WrongInstance):
        claim(instance, FIRST.identity)


def test_an_instance_without_partitions_can_be_used_by_another_project(instance: dg.DagsterInstance) -> None:
    """The error advises this if the other project no longer exists."""
    copied = register_snapshot(instance, Lsn(0x10))
    instance.delete_dynamic_partition("lsn_ranges", span(0x10, 0x20).key)
    with pytest.raises(WrongInstance, match="delete all partitions of the assets `change_log`"):
        claim(instance, SECOND.identity)
    instance.delete_dynamic_partition("snapshot_ranges", copied)
    claim(instance, SECOND.identity)


@pytest.mark.parametrize(
    ("job", "ops"),
    [
        (sync_job, {SYNC_OP: {}}), (maintain_job, {MAINTAIN_OP: {}}),
        (repair_job, {REPAIR_OP: {"config": {"table": "orders", "span": "0/10..0/30"}}}),
    ],
    ids=["sync", "maintain", "repair"],
)  # fmt: skip
def test_a_run_of_a_second_project_changes_nothing(
    instance: dg.DagsterInstance, job: dg.JobDefinition, ops: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_catalog(SECOND, CATALOG_FILE)
    ChangeLog(Settings().layout).create(SECOND.identity, Lsn(0x1000), 1)
    script = Script()
    result = job.execute_in_process(
        run_config={"ops": ops, "loggers": QUIET}, instance=instance, raise_on_error=False,
        resources={"engines": RecordingEngines(script), "watcher": Nobody()},
    )  # fmt: skip
    assert not result.success
    assert script.asked == []
    assert RangeRegister(instance).known() == [span(0x10, 0x20)]


def test_the_sensor_of_a_second_project_only_reports_the_reason(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_catalog(SECOND, CATALOG_FILE)
    found = tick(dg.build_sensor_context(instance=instance), Settings(source="host=/nowhere"), Source())
    assert isinstance(found, dg.SkipReason)
    assert "belongs to another project" in str(found.skip_message)
