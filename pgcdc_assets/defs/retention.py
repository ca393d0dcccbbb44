"""Deletes our old runs from Dagster's storage, once the ranges that they wrote are deleted.

A run of half an hour records about ten thousand events if a hundred tables change all the time. Dagster itself deletes
no events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import dagster as dg
from dagster._core.instance import RUNLESS_RUN_ID
from dagster._core.storage.event_log import SqlEventLogStorage, SqliteEventLogStorage
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable

from pgcdc_assets.defs import keys
from pgcdc_assets.defs.partitions import RangeRegister
from pgcdc_assets.defs.runs import OURS

ENDED: Final = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_PAGE: Final = 500


def forget_runs(
    instance: dg.DagsterInstance, assets: Sequence[dg.AssetKey], oldest: datetime, runs_out: Callable[[], bool]
) -> int:
    """Delete runs of ours that ended before ``oldest``, with their events and logs. Returns how many.

    Never deletes a run that is under way, that closed a range whose key still exists, or that recorded an asset's
    newest materialisation. Once ``runs_out`` returns True, the remaining runs are left to the next maintenance.
    """
    needed = {*_closing(instance, oldest), *_newest(instance, assets)}
    gone = 0
    for record in list(_ended(instance, oldest)):
        run_id = record.dagster_run.run_id
        if run_id in needed or (record.end_time or 0.0) >= oldest.timestamp():
            continue
        if runs_out():
            break
        _delete(instance, run_id)
        gone += 1
    _forget_observations(instance, oldest)
    return gone


def _ended(instance: dg.DagsterInstance, oldest: datetime) -> Iterator[dg.RunRecord]:
    """Our runs that have ended and were created before ``oldest``, oldest first."""
    found = dg.RunsFilter(tags=OURS, statuses=ENDED, created_before=oldest)
    cursor = None
    while page := instance.get_run_records(found, limit=_PAGE, cursor=cursor, ascending=True):
        yield from page
        cursor = page[-1].dagster_run.run_id


def _closing(instance: dg.DagsterInstance, oldest: datetime) -> Iterator[str]:
    """Runs that recorded a range of the log that is still registered."""
    known = {span.key for span in RangeRegister(instance).known()}
    found = dg.AssetRecordsFilter(keys.CHANGE_LOG, before_timestamp=oldest.timestamp())
    cursor, more = None, True
    while more:
        page = instance.fetch_materializations(found, limit=_PAGE, cursor=cursor)
        yield from (record.run_id for record in page.records if record.partition_key in known)
        cursor, more = page.cursor, page.has_more


def _newest(instance: dg.DagsterInstance, assets: Sequence[dg.AssetKey]) -> Iterator[str]:
    """Runs that recorded the newest materialisation of an asset. For a table that never changes, this is the run that
    copied it."""
    for record in instance.get_asset_records(assets):
        entry = record.asset_entry.last_materialization_record
        if entry is not None:
            yield entry.run_id


def _delete(instance: dg.DagsterInstance, run_id: str) -> None:
    instance.delete_run(run_id)
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    storage = instance.event_log_storage
    if isinstance(storage, SqliteEventLogStorage):
        # Each run has a database file, which Dagster empties but does not delete.
        shard = Path(storage.path_for_shard(run_id))
        for path in (shard, *(shard.with_name(f"{shard.name}{end}") for end in ("-wal", "-shm"))):
            with suppress(FileNotFoundError):
                path.unlink()


def _forget_observations(instance: dg.DagsterInstance, oldest: datetime) -> None:
    """Delete old observations of the slot. The sensor records one every half minute, and they belong to no run."""
    storage = instance.event_log_storage
    if not isinstance(storage, SqlEventLogStorage):
        return
    table = SqlEventLogStorageTable
    old = table.delete().where(
        table.c.run_id == RUNLESS_RUN_ID,
        table.c.dagster_event_type == "ASSET_OBSERVATION",
        table.c.asset_key == keys.SLOT.to_string(),
        table.c.timestamp < oldest.astimezone(UTC).replace(tzinfo=None),
    )
    for connection in (storage.run_connection(RUNLESS_RUN_ID), storage.index_connection()):
        with connection as conn:
            conn.execute(old)
