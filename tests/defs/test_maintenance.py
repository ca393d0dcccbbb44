"""The maintenance job and its schedule: the job skips a lake that is being written, and reports what it could not
do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pgcdc_assets.core.lsn import Lsn
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs.maintenance import MAINTAIN_OP, maintain_job, maintenance_schedule
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.defs.sensors import sync_sensor
from pgcdc_assets.defs.sync import sync_job
from pgcdc_assets.errors import LockHeld
from pgcdc_assets.flow.maintenance import MaintenanceReport
from pgcdc_assets.settings import Settings
from tests.defs.doubles import QUIET, Script, resources

OF = Replication(Settings(source="dbname=nowhere"))
OP = OF.names.of(MAINTAIN_OP)


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(instance: dg.DagsterInstance, script: Script, config: dict[str, Any]) -> dg.ExecuteInProcessResult:
    return maintain_job(OF).execute_in_process(
        run_config={"ops": {OP: {"config": config}}, "loggers": QUIET},
        instance=instance,
        resources=resources(script),
        raise_on_error=False,
    )


def scheduled() -> dict[str, Any]:
    """Returns the configuration of the run that the schedule requests."""
    with dg.build_schedule_context() as context:
        data = maintenance_schedule(OF, maintain_job(OF)).evaluate_tick(context)
    assert data.run_requests
    config: dict[str, Any] = data.run_requests[0].run_config["ops"][OP]["config"]
    return config


def test_a_scheduled_run_has_a_time_limit_and_reports_its_work(instance: dg.DagsterInstance) -> None:
    script = Script(maintenance=MaintenanceReport(Lsn(16), Lsn(32), log_files=7, deleted_bytes=9))
    result = run(instance, script, scheduled())
    assert result.success
    assert script.asked == [("maintain", "maintain", 600.0)]
    (output,) = [event for event in result.all_events if event.is_successful_output]
    shown = {name: value.value for name, value in output.step_output_data.metadata.items()}
    assert (shown["log_start_lsn"], shown["log_files"], shown["deleted_bytes"]) == ("0/10", 7, 9)


def test_a_scheduled_run_skips_a_lake_that_is_being_written(instance: dg.DagsterInstance) -> None:
    held = Script(error=LockHeld("`pgcdc follow` (pid 7) is writing to this lake"))
    assert run(instance, held, scheduled()).success
    assert held.asked
    assert not run(instance, held, {"command": "maintain"}).success


def test_the_maintenance_run_fails_if_the_maintenance_of_a_mirror_failed(instance: dg.DagsterInstance) -> None:
    script = Script(maintenance=MaintenanceReport(Lsn(16), failed=[(TableName("public", "t"), "t: cannot be read")]))
    result = run(instance, script, {})
    assert not result.success
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    assert "t: cannot be read" in str(failure.step_failure_data.user_failure_data)


@pytest.mark.parametrize(("running", "status"), [(True, "RUNNING"), (False, "STOPPED")])
def test_the_schedule_and_the_sensor_have_the_same_default_status(running: bool, status: str) -> None:
    of = replace(OF, running=running)
    assert maintenance_schedule(of, maintain_job(of)).default_status.name == status
    assert sync_sensor(of, sync_job(of)).default_status.name == status
