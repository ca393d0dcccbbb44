"""The job that keeps the lake small, and its schedule."""

import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets.core import retention
from pgcdc_assets.defs import keys, metadata
from pgcdc_assets.defs.observer import Watcher
from pgcdc_assets.defs.resources import Engines
from pgcdc_assets.defs.retention import forget_runs
from pgcdc_assets.defs.runs import MAINTAIN_JOB, stop_for_waiting_runs
from pgcdc_assets.defs.sensors import SENSOR_ON
from pgcdc_assets.defs.sync import engine_at_rest, writing_run
from pgcdc_assets.errors import LakeError, LockHeld
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from pgcdc_assets.flow.maintenance import Allowance, MaintenanceReport

MAINTAIN_OP = "maintain_lake"
QUIET_HOUR = "40 3 * * *"
"""Every night, but not at the full hour, when many other jobs start."""
SCHEDULED_SECONDS = 600.0
"""After this time no further table is started, because the sync waits during the maintenance. The next night does the
remaining tables."""


class MaintainConfig(dg.Config):
    command: str = MAINTAIN_JOB
    """The name of the command in the lake's lock."""
    max_seconds: float | None = None
    """Start no further table after this time."""
    give_way: bool = False
    """If another process writes and does not give way, succeed without doing anything, and leave the work to the next
    run. End early if another run is queued."""


@dg.op(
    name=MAINTAIN_OP,
    out=dg.Out(dg.Nothing),
    description="Forgets what nobody needs of log, feeds, points and mirrors; merges what is in pieces.",
)
def maintain_op(
    context: dg.OpExecutionContext, config: MaintainConfig, engines: Engines, watcher: dg.ResourceParam[Watcher]
) -> None:
    from pgcdc_assets.flow.maintenance import Allowance

    stop = watcher.stop
    with writing_run(context, stop):
        engine = engine_at_rest(context, engines, watcher, config.command)
        allowance = Allowance(config.max_seconds, stop)
        if not config.give_way:
            report = engine.maintain(allowance)
        else:
            try:
                with stop_for_waiting_runs(context, stop):
                    report = engine.maintain(allowance)
            except LockHeld as held:
                context.log.info(f"nothing was done: {held}")
                return
        report.runs = _forget_runs(context.instance, Settings.load(), allowance)
        context.add_output_metadata(of_maintenance(report))
        watcher.maintained(report)
        if report.failed:
            raise LakeError("; ".join(error for _, error in report.failed))


def _forget_runs(instance: dg.DagsterInstance, settings: Settings, allowance: "Allowance") -> int:
    """Delete the runs of ranges whose keys were dropped. Call this after the keys were dropped. Returns how many runs
    were deleted."""
    catalog = load_catalog(settings.catalog_file)
    names = [table.name for table in catalog.tables] if catalog else []
    kinds = (keys.snapshot_key, keys.changes_key, keys.mirror_key)
    assets = [keys.CHANGE_LOG, keys.MESSAGES, keys.CONSISTENT_POINTS, *(key(name) for name in names for key in kinds)]
    started = time.monotonic()
    oldest = retention.oldest_kept(datetime.now(UTC), settings.retention)
    return forget_runs(instance, assets, oldest, lambda: allowance.runs_out(started))


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


@dg.job(name=MAINTAIN_JOB, description="Retention of log, feeds and points; OPTIMIZE and VACUUM of the mirrors.")
def maintain_job() -> None:
    maintain_op()


def maintenance_schedule() -> dg.ScheduleDefinition:
    """The schedule. It is on under ``pgcdc up``, like the sensor. A running sync gives way to the queued run."""
    running = os.environ.get(SENSOR_ON) == "on"
    config = {"max_seconds": SCHEDULED_SECONDS, "give_way": True}
    return dg.ScheduleDefinition(
        name="maintenance_schedule",
        job=maintain_job,
        cron_schedule=QUIET_HOUR,
        run_config={"ops": {MAINTAIN_OP: {"config": config}}},
        default_status=dg.DefaultScheduleStatus.RUNNING if running else dg.DefaultScheduleStatus.STOPPED,
        description="Every night: forgets what nobody needs, and merges what is in pieces.",
    )
