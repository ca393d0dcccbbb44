"""All uses of Dagster's private API by the definitions. A new version of Dagster may require changes here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._check import CheckError
from dagster._core.events import DagsterEvent, DagsterEventType, EngineEventData
from dagster._core.instance import RUNLESS_RUN_ID
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from dagster._core.storage.event_log import SqlEventLogStorage, SqliteEventLogStorage
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable


def record_check(context: dg.OpExecutionContext, evaluation: dg.AssetCheckEvaluation) -> None:
    """Record the result of a check that is not an output of the op."""
    DagsterEvent.asset_check_evaluation(context.get_step_execution_context(), evaluation)


def passed_checks(instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey]) -> set[dg.AssetCheckKey]:
    """The checks whose newest result is a success."""
    newest = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    return {key for key, record in newest.items() if record.status == AssetCheckExecutionRecordStatus.SUCCEEDED}


def last_evaluation(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> dg.AssetCheckEvaluation | None:
    """The newest result of a check. Runs that planned the check but did not evaluate it are skipped."""
    ended = {AssetCheckExecutionRecordStatus.SUCCEEDED, AssetCheckExecutionRecordStatus.FAILED}
    for record in instance.event_log_storage.get_asset_check_execution_history(key, limit=1, status=ended):
        if record.event is not None and record.event.dagster_event is not None:
            return record.event.dagster_event.asset_check_evaluation_data
    return None


def location_of(context: Any) -> dg.RepositoryDefinition | None:
    """The code location of a run or a sensor. None if the run was started without a code location."""
    with suppress(CheckError):
        repository: dg.RepositoryDefinition | None = context.repository_def
        return repository
    return None


_READ_LAKE, _READ_LSN = "pgcdc/read_lake", "pgcdc/read_lsn"
"""Keys in the metadata of the event of :func:`record_read_lsn`."""


def record_read_lsn(instance: dg.DagsterInstance, run: dg.DagsterRun, lake: str, lsn: str) -> None:
    """Record in the run's events that the run reads the mirrors of ``lake`` at ``lsn``. A tag is not used for this,
    because a new run that is made from this run would get the same tags."""
    found = EngineEventData({_READ_LAKE: dg.MetadataValue.text(lake), _READ_LSN: dg.MetadataValue.text(lsn)})
    instance.report_engine_event(f"This run reads the mirrors of {lake} at {lsn}.", run, found)


def read_lsn(instance: dg.DagsterInstance, run_id: str, lake: str) -> str | None:
    """The LSN that was recorded first for the run and ``lake`` (:func:`record_read_lsn`); None if there is none."""
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.ENGINE_EVENT):
        metadata = entry.get_dagster_event().engine_event_data.metadata
        if _READ_LSN in metadata and metadata[_READ_LAKE].value == lake:
            return str(metadata[_READ_LSN].value)
    return None


def delete_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run with its events and logs."""
    instance.delete_run(run_id)
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    storage = instance.event_log_storage
    if isinstance(storage, SqliteEventLogStorage):
        # Each run has a database file, which Dagster empties but does not delete.
        shard = Path(storage.path_for_shard(run_id))
        for path in (shard, *(shard.with_name(f"{shard.name}{end}") for end in ("-wal", "-shm"))):
            with suppress(FileNotFoundError):
                path.unlink()


def delete_observations(instance: dg.DagsterInstance, asset: dg.AssetKey, oldest: datetime) -> None:
    """Delete the asset's observations before ``oldest`` that belong to no run."""
    storage = instance.event_log_storage
    if not isinstance(storage, SqlEventLogStorage):
        return
    table = SqlEventLogStorageTable
    old = table.delete().where(
        table.c.run_id == RUNLESS_RUN_ID,
        table.c.dagster_event_type == "ASSET_OBSERVATION",
        table.c.asset_key == asset.to_string(),
        table.c.timestamp < oldest.astimezone(UTC).replace(tzinfo=None),
    )
    for connection in (storage.run_connection(RUNLESS_RUN_ID), storage.index_connection()):
        with connection as conn:
            conn.execute(old)
