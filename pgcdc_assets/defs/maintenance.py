"""The job that keeps the lake and Dagster's storage small, and its schedule.

From Dagster's storage, the job deletes old runs of pgcdc, as soon as the ranges that the runs wrote are deleted. This
is necessary because Dagster itself deletes no events. A run of half an hour records about ten thousand events if a
hundred tables change all the time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import dagster as dg

from pgcdc_assets.core import retention
from pgcdc_assets.defs import metadata
from pgcdc_assets.defs.dagsterinternals import delete_observations, delete_run
from pgcdc_assets.defs.keys import Names
from pgcdc_assets.defs.replication import STAGES, Replication
from pgcdc_assets.defs.runs import stop_for_waiting_runs, writing_run
from pgcdc_assets.defs.sync import engine_at_rest, job_of_one_op, watcher
from pgcdc_assets.errors import LakeError, LockHeld
from pgcdc_assets.project import load_catalog

if TYPE_CHECKING:
    from pgcdc_assets.flow.maintenance import Allowance, MaintenanceReport

MAINTAIN_OP = "maintain_lake"
QUIET_HOUR = "40 3 * * *"
"""Cron schedule: every night, but not at the full hour, when many other jobs start."""
SCHEDULED_SECONDS = 600.0
"""After this time, the scheduled maintenance starts no further table, because the sync waits while it runs. The
remaining tables are maintained in the next night."""
_ENDED: Final = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_PAGE: Final = 500


class MaintainConfig(dg.Config):
    command: str = "maintain"
    """The name of the command in the lake's lock."""
    max_seconds: float | None = None
    """After this time, no further table is started."""
    give_way: bool = False
    """If another process writes and does not pause for this run, succeed without doing anything, and leave the work to
    the next run. End early if another run is queued."""


def maintain_job(of: Replication) -> dg.JobDefinition:
    def maintain(context: dg.OpExecutionContext, config: MaintainConfig) -> None:
        from pgcdc_assets.flow.maintenance import Allowance

        watching = watcher(of, context)
        with writing_run(of, context, watching.stop):
            engine = engine_at_rest(of, context, config.command)
            allowance = Allowance(config.max_seconds, watching.stop)
            if not config.give_way:
                report = engine.maintain(allowance)
            else:
                try:
                    with stop_for_waiting_runs(context, of.names, watching.stop):
                        report = engine.maintain(allowance)
                except LockHeld as held:
                    context.log.info(f"nothing was done: {held}")
                    return
            report.runs = _forget_runs(of.within(context), context.instance, allowance)
            context.add_output_metadata(of_maintenance(report))
            watching.maintained(report)
            if report.failed:
                raise LakeError("; ".join(error for _, error in report.failed))

    return job_of_one_op(
        of,
        of.names.maintain_job,
        "Deletes old data from log, feeds, points and mirrors, and old runs from Dagster. Merges small files.",
        MAINTAIN_OP,
        "Deletes data older than `retention`, and merges small files.",
        maintain,
    )


def _forget_runs(of: Replication, instance: dg.DagsterInstance, allowance: "Allowance") -> int:
    """Delete old runs of the source from Dagster (see :func:`forget_runs`). Returns how many runs were deleted."""
    catalog, names = load_catalog(of.settings.catalog_file), of.names
    tables = [table.name for table in catalog.tables] if catalog else []
    of_tables = (of.key(stage, name) for name in tables for stage in STAGES)
    assets = [*map(of.placed, (names.change_log, names.messages, names.consistent_points)), *of_tables]
    started = time.monotonic()
    oldest = retention.oldest_kept(datetime.now(UTC), of.settings.retention)
    return forget_runs(instance, of, assets, oldest, lambda: allowance.runs_out(started))


def forget_runs(
    instance: dg.DagsterInstance,
    of: Replication,
    assets: Sequence[dg.AssetKey],
    oldest: datetime,
    runs_out: Callable[[], bool],
) -> int:
    """Delete runs that worked only on this source and ended before ``oldest``, with their events and logs. Returns the
    number of deleted runs.

    Never deletes a run in progress, a run that recorded a range whose key still exists, or a run that recorded an
    asset's newest materialisation. Once ``runs_out`` returns True, the remaining runs are left to the next maintenance.
    """
    names = of.names
    needed = {*_closing(instance, of, oldest), *_newest(instance, assets)}
    gone = 0
    for record in list(_ended(instance, names, oldest)):
        run_id = record.dagster_run.run_id
        if (
            not _is_ours(record.dagster_run, names, assets)
            or run_id in needed
            or (record.end_time or 0.0) >= oldest.timestamp()
        ):
            continue
        if runs_out():
            break
        delete_run(instance, run_id)
        gone += 1
    # The sensor records an observation of the slot every half minute. These observations belong to no run.
    delete_observations(instance, of.placed(names.slot), oldest)
    return gone


def _is_ours(run: dg.DagsterRun, names: Names, assets: Sequence[dg.AssetKey]) -> bool:
    """Whether the run worked only on this source. A run of the user's own job may have no selection. It then
    materializes all assets of the job, which may include the user's assets."""
    selected = {*(run.asset_selection or ())}
    return run.job_name in (*names.jobs, names.verify_job) or (bool(selected) and selected <= {*assets})


def _ended(instance: dg.DagsterInstance, names: Names, oldest: datetime) -> Iterator[dg.RunRecord]:
    """Runs of the source that have ended and were created before ``oldest``, oldest first."""
    found = dg.RunsFilter(tags=names.tags, statuses=_ENDED, created_before=oldest)
    cursor = None
    while page := instance.get_run_records(found, limit=_PAGE, cursor=cursor, ascending=True):
        yield from page
        cursor = page[-1].dagster_run.run_id


def _closing(instance: dg.DagsterInstance, of: Replication, oldest: datetime) -> Iterator[str]:
    """Ids of the runs that recorded a range of the change log whose key still exists."""
    known = {span.key for span in of.register(instance).known()}
    found = dg.AssetRecordsFilter(of.placed(of.names.change_log), before_timestamp=oldest.timestamp())
    cursor, more = None, True
    while more:
        page = instance.fetch_materializations(found, limit=_PAGE, cursor=cursor)
        yield from (record.run_id for record in page.records if record.partition_key in known)
        cursor, more = page.cursor, page.has_more


def _newest(instance: dg.DagsterInstance, assets: Sequence[dg.AssetKey]) -> Iterator[str]:
    """Ids of the runs that recorded the newest materialisation of an asset. For a table that never changed, this is the
    run that copied the table."""
    for record in instance.get_asset_records(assets):
        entry = record.asset_entry.last_materialization_record
        if entry is not None:
            yield entry.run_id


def of_maintenance(report: "MaintenanceReport") -> metadata.Metadata:
    positions = metadata.lsns(log_start_lsn=report.log_start)
    if report.oldest_point is not None:
        positions |= metadata.lsns(oldest_point_lsn=report.oldest_point)
    counts = {
        "log_files": report.log_files,
        "feed_files": report.feed_files,
        "points": report.points,
        "tables_optimized": len(report.optimized),
        "tables_vacuumed": len(report.vacuumed),
        "tables_left": len(report.left),
        "deleted_files": report.deleted_files,
        "deleted_bytes": report.deleted_bytes,
        "runs_forgotten": report.runs,
        "seconds": report.seconds,
    }
    return positions | metadata.numbers(counts)


def maintenance_schedule(of: Replication, job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """The schedule of the job. ``pgcdc up`` turns it on, like the sensor. A running sync ends early for this run."""
    config = {"max_seconds": SCHEDULED_SECONDS, "give_way": True}
    return dg.ScheduleDefinition(
        name=of.names.of("maintenance_schedule"),
        job=job,
        cron_schedule=QUIET_HOUR,
        run_config={"ops": {of.names.of(MAINTAIN_OP): {"config": config}}},
        default_status=dg.DefaultScheduleStatus.RUNNING if of.running else dg.DefaultScheduleStatus.STOPPED,
        description="Every night: deletes data older than `retention`, and merges small files.",
    )
