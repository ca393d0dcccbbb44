"""The sensor that keeps the mirrors up to date. It checks source and lake, and requests a run of ``sync`` when a run is
needed.

The check is cheap: plain SQL, and reads of small tables. It opens no replication connection, does not start Spark, and
changes no position.
"""

import hashlib
import time
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import dagster as dg
import psycopg

from pgcdc_assets.core.catalog import Catalog, relations_of
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.core.lsn import ZERO, Lsn
from pgcdc_assets.defs.checks import current_health, evaluations, health_digest, news, of_slot
from pgcdc_assets.defs.demand import FOREIGN_WAL_BYTES, Cursor, Decision, Runs, SourceState, busy, decide
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.defs.resources import Engines, Source
from pgcdc_assets.defs.runs import RUNNING, WAITING, report_dead_runs, reserve, runs_of, waiting_for_pool
from pgcdc_assets.defs.sync import SYNC_OP
from pgcdc_assets.errors import LakeError, PgcdcError, SlotMissing, WrongInstance
from pgcdc_assets.flow import lock, outcomes
from pgcdc_assets.flow.outcomes import OperationKind, Outcome
from pgcdc_assets.project import load_catalog
from pgcdc_assets.protocol.layouts import CHANGES, MessageKind
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.connect.failures import of_exception
from pgcdc_assets.source.connect.pluginoptions import Origins, PluginOptions
from pgcdc_assets.source.slot.slot import FLUSH_LSN
from pgcdc_assets.structure.record import TableState

if TYPE_CHECKING:
    from pgcdc_assets.log.reader import ChangeLog
    from pgcdc_assets.source.connect.connection import SourceConnection

_TELL_SECONDS = 30.0
"""Seconds between two checks of the project's health. Each check is recorded as one observation of the slot. The
interval is short enough that asset checks show a fault within a minute, even if a tick is late and connecting to the
source fails slowly."""

_CURRENT_SECONDS = 60.0
"""Interval in seconds. If there is a freshness policy and the source does not change, the newest consistent point is
recorded as current this often."""

_PEEK_WAL_BYTES = 4 * FOREIGN_WAL_BYTES
"""The largest distance between restart_lsn and the end of the WAL at which the sensor looks for published changes. The
query decodes this WAL from restart_lsn on, so it would be too expensive while a long transaction is open."""
_PEEK_MILLISECONDS = 10_000

_POSITIONS = f"""
SELECT active, coalesce(confirmed_flush_lsn, '0/0')::text, coalesce(restart_lsn, '0/0')::text,
       {FLUSH_LSN}::text
FROM pg_replication_slots WHERE slot_name = %s
"""  # noqa: S608  (put together of our own constants)

# Whether the slot holds a committed transaction that changes a published table. If the setting `messages` is not empty,
# logical messages count, too. For a prepared transaction that was received before, a slot with two_phase contains only
# COMMIT PREPARED. The query consumes nothing.
_PEEK = f"""
SELECT EXISTS (
  SELECT FROM pg_logical_slot_peek_binary_changes(%s, %s::text::pg_lsn, NULL, VARIADIC %s::text[])
  WHERE get_byte(data, 0) IN ({", ".join(str(int(kind)) for kind in (*CHANGES, MessageKind.COMMIT_PREPARED))}))
"""  # noqa: S608  (put together of our own constants)


def sync_sensor(of: Replication, job: dg.JobDefinition) -> dg.SensorDefinition:
    @dg.sensor(
        name=of.names.of("sync_sensor"),
        job_name=job.name,
        required_resource_keys={of.names.engines},
        minimum_interval_seconds=of.settings.sensor_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING if of.running else dg.DefaultSensorStatus.STOPPED,
        description="Reads the positions of slot and change log, and requests a sync run if the mirrors are behind.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        engines: Engines = getattr(context.resources, of.names.engines)
        return tick(of, context, engines.source)

    return sensor


def tick(of: Replication, context: dg.SensorEvaluationContext, source: Source) -> dg.SensorResult | dg.SkipReason:
    """One evaluation of the sensor, which requests at most one run. Health is recorded even if no run is needed or the
    source does not answer."""
    of = of.within(context)
    catalog = load_catalog(of.settings.catalog_file)
    if catalog is None:
        return dg.SkipReason("nothing is set up yet: run `pgcdc setup`")
    try:
        reserve(of, context.instance)
    except WrongInstance as error:
        # The health is not recorded, because the asset checks in this instance belong to the other project.
        return dg.SkipReason(str(error))
    cursor = Cursor.parse(context.cursor)
    try:
        decision, cursor = _decided(of, context, source, catalog, cursor)
    except PgcdcError as error:
        decision = Decision(False, str(error))
    except psycopg.Error as error:
        decision = Decision(False, str(of_exception(error).typed()))
    events, cursor = _told(of, cursor, context.instance)
    if decision.current and (point := _still_current(of, cursor, context.instance)):
        events.append(point)
        cursor = replace(cursor, fresh=time.time())
    requests = [dg.RunRequest(run_config=run_config(of))] if decision.wanted else []
    skip = None if decision.wanted else dg.SkipReason(decision.why)
    return dg.SensorResult(run_requests=requests, skip_reason=skip, cursor=str(cursor), asset_events=events)


def _decided(
    of: Replication, context: dg.SensorEvaluationContext, source: Source, catalog: Catalog, cursor: Cursor
) -> tuple[Decision, Cursor]:
    from pgcdc_assets.flow.ownlake import refuse_other_lake
    from pgcdc_assets.log.extent import Extent

    settings = of.settings
    refuse_other_lake(settings)
    for run_id in report_dead_runs(context.instance, of.names, settings.layout):
        context.log.warning(f"the process of run {run_id[:8]} died, so the run is now marked as failed")
    runs = _runs(of, context.instance)
    if reason := busy(runs, time.time()):
        return Decision(False, reason), cursor
    if not runs.succeeded:
        # The run may have been requested for a change of the catalog, so the catalog is compared again.
        cursor = replace(cursor, empty_to=ZERO, catalog="")
    with source.connection(settings) as conn:
        seen = _source_state(conn, catalog, settings, cursor)
    known, cursor = cursor.empty_to, cursor.seen(seen)
    decision = decide(seen, cursor, settings.range_seconds)
    if decision.current and known != seen.flush_lsn:
        # Record in the lake that the log is complete to this LSN. A reader may wait for the LSN (`Lake.wait`), and no
        # run will move the log's position there, because there is nothing to receive.
        Extent(settings.layout).note(seen.position, seen.flush_lsn)
    return decision, cursor


def _source_state(conn: "SourceConnection", catalog: Catalog, settings: Settings, cursor: Cursor) -> SourceState:
    """What this tick reads of source and lake to decide whether a run is needed. Raises SlotMissing, or an error of the
    connection to the source."""
    from pgcdc_assets.flow.requests import operator_requests
    from pgcdc_assets.log.reader import ChangeLog

    slot, layout = catalog.identity.slot, settings.layout
    found = conn.execute(_POSITIONS, [slot]).fetchone()
    if found is None:
        raise SlotMissing("does not exist", thing=f"slot {slot}", do="see `pgcdc status`")
    active, (confirmed, restart, flushed) = found[0], (Lsn.parse(text) for text in found[1:])
    log = ChangeLog(layout)
    position = log.position() if log.exists else confirmed
    told = operator_requests(layout)
    seen = SourceState(
        now=time.time(),
        flush_lsn=flushed,
        position=position,
        to_copy=_to_copy(catalog, layout),
        unapplied=unapplied(log, settings),
        paused=told.paused,
        endpos=told.endpos,
    )
    to_apply = (seen.to_copy or seen.unapplied) and not seen.paused
    if to_apply or told.reached(position) or not ZERO < flushed - position < FOREIGN_WAL_BYTES:
        return seen
    if cursor.empty_to == flushed:
        return replace(seen, published=False)
    if active or flushed - restart > _PEEK_WAL_BYTES:
        return seen
    if published := _published(conn, catalog, flushed, settings):
        return replace(seen, published=published)
    digest = _catalog_digest(conn, catalog, settings)
    return replace(seen, published=published, catalog=digest, catalog_changed=cursor.catalog != digest)


def _catalog_digest(conn: "SourceConnection", catalog: Catalog, settings: Settings) -> str:
    """A digest of the existing tables that the settings select, and of the catalog's fingerprint of the published
    tables."""
    from pgcdc_assets.source.catalog.tables import fingerprint
    from pgcdc_assets.source.setup.selection import meant_tables

    found = sorted(meant_tables(conn, settings.tables).items()), fingerprint(conn, sorted(relations_of(catalog.tables)))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _to_copy(catalog: Catalog, layout: Layout) -> int:
    """The number of published tables without a finished copy, except tables that no mirror can contain."""
    from pgcdc_assets.mirror.delta.mirrorschema import refusal
    from pgcdc_assets.points.states import TableStates

    states = {name: row.state for name, row in TableStates(layout).all().items()}
    waiting = [table for table in catalog.tables if states.get(table.name) in (None, TableState.COPYING)]
    return sum(refusal(table) is None for table in waiting)


def unapplied(log: "ChangeLog", settings: Settings) -> int:
    """The number of batches above the newest consistent point that contain transactions which the last sync has not
    applied, or messages if the setting ``messages`` is not empty. The last sync may have applied batches above the
    newest point: no point is made for them if they change no followed table."""
    from pgcdc_assets.points.points import ConsistentPoints

    if not log.exists:
        return 0
    point, applied_to = ConsistentPoints(settings.layout).newest(), ZERO
    with suppress(LakeError):
        applied_to = outcomes.read(settings.layout).get(OperationKind.SYNC, Outcome()).applied_to or ZERO
    return sum(
        (batch.transactions > 0 and batch.end > applied_to) or (bool(settings.messages) and "M" in batch.others)
        for batch in log.batches(point.replay_lsn if point else log.start)
    )


def _published(conn: "SourceConnection", catalog: Catalog, upto: Lsn, settings: Settings) -> bool | None:
    """The result of ``_PEEK``. None if PostgreSQL could not run the query, because another session began to read the
    slot, or because the time limit was reached."""
    conn.execute("SELECT set_config('statement_timeout', %s, false)", [str(_PEEK_MILLISECONDS)])
    try:
        version, origins = conn.info.server_version // 10000, Origins(settings.origin)
        options = PluginOptions.of(version, messages=bool(settings.messages), origins=origins)
        pairs = [part for option in options.given(catalog.publications).items() for part in option]
        found = conn.execute(_PEEK, [catalog.identity.slot, str(upto), pairs]).fetchone()
    except psycopg.Error:
        return None
    return bool(found and found[0])


def run_config(of: Replication) -> dict[str, Any]:
    """The configuration of the runs that the sensor requests. Such a run follows the source until no change arrives for
    ``idle_seconds``, for at most ``run_seconds``. It ends early if another run waits."""
    config = {
        "follow": True,
        "max_seconds": of.settings.run_seconds,
        "idle_seconds": of.settings.idle_seconds,
        "give_way": True,
    }
    return {"ops": {of.names.of(SYNC_OP): {"config": config}}}


def _told(of: Replication, cursor: Cursor, instance: dg.DagsterInstance) -> tuple[list[Any], Cursor]:
    """The events to record in this tick, and the new cursor. Every _TELL_SECONDS, the events are an observation of the
    slot and, if the results of the asset checks have changed, these results. In other ticks, there are no events."""
    now = time.time()
    if now - cursor.told < _TELL_SECONDS:
        return [], cursor
    health = current_health(of, instance)
    digest = health_digest(health)
    events: list[Any] = [dg.AssetObservation(of.placed(of.names.slot), metadata=of_slot(health))]
    if digest != cursor.health:
        events += news(instance, evaluations(of, health))
    return events, replace(cursor, told=now, health=digest)


def _still_current(of: Replication, cursor: Cursor, instance: dg.DagsterInstance) -> dg.AssetMaterialization | None:
    """A materialisation which says that the newest consistent point contains all that the source has published; None if
    not due. The freshness policy sees only materialisations. Without this one, it would fail if the source does not
    change."""
    if of.freshness is None or time.time() - cursor.fresh < _CURRENT_SECONDS:
        return None
    known = of.register(instance).known()
    what = "the source has no newer change to a published table, so the newest consistent point is still current"
    return dg.AssetMaterialization(
        of.placed(of.names.consistent_points), partition=known[-1].key, description=what
    ) if known else None  # fmt: skip


def _why(settings: Settings) -> dict[str, str]:
    """Why the last sync failed, if the lake has recorded the reason. A run may fail before it can write to the lake."""
    with suppress(LakeError):
        failed = outcomes.read(settings.layout).get(OperationKind.SYNC, Outcome()).failed
        if failed is not None:
            return {"why": f"{failed.thing}: {failed.what}" if failed.thing else failed.what}
    return {}


def _runs(of: Replication, instance: dg.DagsterInstance) -> Runs:
    settings, names = of.settings, of.names
    holder = lock.holder(settings.layout)
    alive = instance.get_runs(
        dg.RunsFilter(job_name=names.sync_job, tags=names.tags, statuses=WAITING + RUNNING), limit=5
    )
    queued = [record.dagster_run for record in runs_of(instance, names, WAITING)]
    ended = instance.get_run_records(dg.RunsFilter(job_name=names.sync_job, tags=names.tags), limit=20)
    failures = takewhile(lambda record: record.dagster_run.status is dg.DagsterRunStatus.FAILURE, ended)
    return Runs(
        holder=holder.command if holder else None,
        under_way=[*(run.run_id for run in (*alive, *queued)), *waiting_for_pool(instance, names)],
        failures=len(list(failures)),
        succeeded=not ended or ended[0].dagster_run.status is dg.DagsterRunStatus.SUCCESS,
        **_why(settings),
        last_ended=(ended[0].end_time or 0.0) if ended else 0.0,
    )
