"""The sensor that keeps the mirrors up to date. It checks source and lake, and requests a run of ``sync`` when one is
needed."""

import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import dagster as dg
import psycopg

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.defs import keys
from pgcdc_assets.defs.backlog import look
from pgcdc_assets.defs.checks import current_health, evaluations, health_digest, news, of_slot
from pgcdc_assets.defs.demand import Cursor, Decision, Runs, busy, decide
from pgcdc_assets.defs.ownproject import claim
from pgcdc_assets.defs.resources import Source
from pgcdc_assets.defs.runs import OURS, RUNNING, SYNC_JOB, WAITING, report_dead_runs
from pgcdc_assets.defs.sync import SYNC_OP, sync_job
from pgcdc_assets.errors import LakeError, PgcdcError, WrongInstance
from pgcdc_assets.flow import lock, outcomes
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.failures import of_exception

SENSOR_ON = "PGCDC_ASSETS_SENSOR"
"""``pgcdc up`` sets this variable to ``on``. Without it the sensor is off until a user starts it in the UI."""

_TELL_SECONDS = 30.0
"""Seconds between two checks of the project's health. Each check is recorded as one observation of the slot. So a fault
is in the asset checks within a minute, even if a tick is late and the connection to the source takes some seconds to
fail."""


def sync_sensor(settings: Settings) -> dg.SensorDefinition:
    running = os.environ.get(SENSOR_ON) == "on"

    @dg.sensor(
        name="sync_sensor",
        job=sync_job,
        minimum_interval_seconds=settings.sensor_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED,
        description="Looks at slot and log by plain SQL; requests one sync run when the mirrors are behind.",
    )
    def sensor(context: dg.SensorEvaluationContext, source: Source) -> dg.SensorResult | dg.SkipReason:
        return tick(context, Settings.load(), source)

    return sensor


def tick(context: dg.SensorEvaluationContext, settings: Settings, source: Source) -> dg.SensorResult | dg.SkipReason:
    """One evaluation of the sensor. Takes the cursor, and returns at most one run request. Health is recorded even if
    no run is needed or the source does not answer."""
    catalog = load_catalog(settings.catalog_file)
    if catalog is None:
        return dg.SkipReason("nothing is set up yet: run `pgcdc setup`")
    try:
        claim(context.instance, catalog.identity)
    except WrongInstance as error:
        # Nothing is recorded, because the asset checks in this instance belong to the other project.
        return dg.SkipReason(str(error))
    cursor = Cursor.parse(context.cursor)
    try:
        decision, cursor = _decided(context, settings, source, catalog, cursor)
    except PgcdcError as error:
        decision = Decision(False, str(error))
    except psycopg.Error as error:
        decision = Decision(False, str(of_exception(error).typed()))
    events, cursor = _told(settings, cursor, context.instance)
    requests = [dg.RunRequest(run_config=run_config(settings))] if decision.wanted else []
    skip = None if decision.wanted else dg.SkipReason(decision.why)
    return dg.SensorResult(run_requests=requests, skip_reason=skip, cursor=str(cursor), asset_events=events)


def _decided(
    context: dg.SensorEvaluationContext, settings: Settings, source: Source, catalog: Catalog, cursor: Cursor
) -> tuple[Decision, Cursor]:
    from pgcdc_assets.flow.ownlake import refuse_other_lake

    refuse_other_lake(settings)
    for run_id in report_dead_runs(context.instance, settings.layout):
        context.log.warning(f"run {run_id[:8]} died: reported as failed")
    reason = busy(_runs(context.instance, settings), time.time())
    if reason:
        return Decision(False, reason), cursor
    with source.connection(settings) as conn:
        seen = look(conn, catalog, settings.layout, cursor, messages=bool(settings.messages), origin=settings.origin)
    cursor = cursor.seen(seen)
    return decide(seen, cursor, settings.range_seconds), cursor


def run_config(settings: Settings) -> dict[str, Any]:
    """The configuration of a run that follows until it is idle or out of time. It ends early if another run waits."""
    config = {
        "follow": True,
        "max_seconds": settings.run_seconds,
        "idle_seconds": settings.idle_seconds,
        "give_way": True,
    }
    return {"ops": {SYNC_OP: {"config": config}}}


def _told(settings: Settings, cursor: Cursor, instance: dg.DagsterInstance) -> tuple[list[Any], Cursor]:
    """The events to record in this tick: an observation of the slot every _TELL_SECONDS, and with it the asset checks
    if their results have changed."""
    now = time.time()
    if now - cursor.told < _TELL_SECONDS:
        return [], cursor
    health = current_health(settings, instance)
    digest = health_digest(health)
    events: list[Any] = [dg.AssetObservation(keys.SLOT, metadata=of_slot(health))]
    if digest != cursor.health:
        events += news(instance, evaluations(settings, health))
    return events, replace(cursor, told=now, health=digest)


def _why(settings: Settings) -> dict[str, str]:
    """The reason of the last failed sync, if the lake has recorded it. A run may have failed before it reached the
    lake."""
    with suppress(LakeError):
        failed = outcomes.read(settings.layout).get(outcomes.OperationKind.SYNC, outcomes.Outcome()).failed
        if failed is not None:
            return {"why": f"{failed.thing}: {failed.what}" if failed.thing else failed.what}
    return {}


def _runs(instance: dg.DagsterInstance, settings: Settings) -> Runs:
    holder = lock.holder(settings.layout)
    alive = instance.get_runs(dg.RunsFilter(job_name=SYNC_JOB, tags=OURS, statuses=WAITING + RUNNING), limit=5)
    queued = instance.get_runs(dg.RunsFilter(tags=OURS, statuses=WAITING), limit=5)
    ended = instance.get_run_records(dg.RunsFilter(job_name=SYNC_JOB, tags=OURS), limit=20)
    failures = 0
    for record in ended:
        if record.dagster_run.status is not dg.DagsterRunStatus.FAILURE:
            break
        failures += 1
    return Runs(
        holder=holder.command if holder else None,
        under_way=[run.run_id for run in (*alive, *queued)],
        failures=failures,
        **_why(settings),
        last_ended=(ended[0].end_time or 0.0) if ended else 0.0,
    )
