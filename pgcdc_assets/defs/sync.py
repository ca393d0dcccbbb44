"""The jobs sync (which also makes new copies) and repair. Each has one op."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs import metadata
from pgcdc_assets.defs.observer import DagsterObserver, Watcher
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.defs.resources import Engines
from pgcdc_assets.defs.runs import stop_for_waiting_runs, writing_run
from pgcdc_assets.errors import UsageError

if TYPE_CHECKING:
    from pgcdc_assets.flow.engine import Engine
    from pgcdc_assets.flow.reports import SyncReport


SYNC_OP = "sync_changes"
"""The op's name. The name of the source is put before it."""
REPAIR_OP = "repair_range"


class SyncConfig(dg.Config):
    """What one run of the sync does. With the defaults, it applies changes up to the source's current position, and
    ends."""

    until: str | None = None
    """The LSN at which the run ends. None: the source's position at the start of the run."""
    follow: bool = False
    """Continue to receive and apply changes until no change arrives for some time, or the run is stopped."""
    max_seconds: float | None = None
    idle_seconds: float | None = None
    receive_only: bool = False
    """Only write changes to the log, so that the slot can release WAL. Apply no changes to the mirrors."""
    copy_anew: list[str] = []  # noqa: RUF012  (pydantic copies it)
    """Tables to copy again before the other work of the run."""
    heal: list[str] = []  # noqa: RUF012
    """Tables that were set aside. The run applies the changes that their mirrors lack, from the log."""
    command: str = "sync"
    """The name of the command in the lake's lock."""
    give_way: bool = False
    """End early, at a boundary, when another run is queued. The sensor then starts the next sync."""


class RepairConfig(dg.Config):
    table: str
    span: str
    """``X/Y..X/Y`` or a partition key. The repair covers all batches of the log that overlap this range."""


def sync_job(of: Replication) -> dg.JobDefinition:
    def sync(context: dg.OpExecutionContext, config: SyncConfig) -> None:
        report = run_sync(of, context, config)
        context.add_output_metadata(of_sync(report))
        watcher(of, context).finished(report)

    return job_of_one_op(
        of,
        of.names.sync_job,
        "Applies the changes of the source to the mirrors.",
        SYNC_OP,
        "Copies new tables, receives changes, applies them and publishes consistent points. Records an LSN range in "
        "Dagster when all its changes are applied.",
        sync,
    )


def repair_job(of: Replication) -> dg.JobDefinition:
    def repair(context: dg.OpExecutionContext, config: RepairConfig) -> None:
        with writing_run(of, context):
            table, asked = TableName.parse(config.table), LsnRange.parse(config.span)
            report = engine_at_rest(of, context, f"repair {table}").repair(table, asked)
        mark: metadata.Metadata = {"repaired": dg.MetadataValue.bool(True)}
        found, whole = metadata.of_mirror(report, report.tables.get(table), None), report.span
        context.add_output_metadata(found | mark)
        known = of.register(context.instance).known()
        covered = [span for span in known if whole.start <= span.start and span.end <= whole.end]
        for span, own in metadata.of_each(covered, whole, found):
            key = of.within(context).key("mirror", table)
            context.log_event(dg.AssetMaterialization(key, partition=span.key, metadata=own | mark))
        watcher(of, context).range_closed(report)

    return job_of_one_op(
        of,
        of.names.repair_job,
        "Repairs one mirror: rebuilds, from the change log, the rows that changed in one LSN range.",
        REPAIR_OP,
        "Rebuilds, from the change log, the rows of one mirror that changed in one LSN range.",
        repair,
    )


def job_of_one_op(
    of: Replication, name: str, description: str, op: str, about_op: str, work: Callable[..., None]
) -> dg.JobDefinition:
    """A job whose only op calls ``work`` with context and config. ``op``: the op's name without the source's name."""
    decorated = dg.op(
        name=of.names.of(op),
        out=dg.Out(dg.Nothing),
        required_resource_keys=of.resource_keys,
        pool=of.pool,
        description=about_op,
    )(work)

    @dg.job(name=name, tags=of.names.tags, description=description)
    def job() -> None:
        decorated()

    return job


def run_sync(of: Replication, context: dg.OpExecutionContext, config: SyncConfig) -> "SyncReport":
    """Runs a sync as ``config`` describes it, in this process."""
    from pgcdc_assets.flow.decide import Bounds

    stop = watcher(of, context).stop
    with writing_run(of, context, stop):
        bounds = Bounds(
            _until(config), config.follow, config.max_seconds, config.idle_seconds, config.receive_only, stop
        )
        copy_anew, heal = ([TableName.parse(table) for table in tables] for tables in (config.copy_anew, config.heal))
        engines: Engines = getattr(context.resources, of.names.engines)
        observer = DagsterObserver(context, of.within(context), watcher(of, context))
        engine = engines.engine(of.settings, observer, config.command)
        if not config.give_way:
            return engine.sync(bounds, copy_anew=copy_anew, heal=heal)
        with stop_for_waiting_runs(context, of.names, bounds.give_way):
            return engine.sync(bounds, copy_anew=copy_anew, heal=heal)


def of_sync(report: "SyncReport") -> metadata.Metadata:
    positions = metadata.lsns(start_lsn=report.start, replay_lsn=report.end, transform_lsn=report.transform_lsn)
    counts = {
        "tables_copied": len(report.copied),
        "turns": report.turns,
        "transactions": report.transactions,
        "rows": report.rows,
        "stream_aborts": report.stream_aborts,
        "seconds": report.seconds,
        "tables_set_aside": len(report.set_aside),
        "tables_changed_by_others": len(report.changed),
        "tables_left": len(report.left),
    }
    return positions | metadata.numbers(counts)


def watcher(of: Replication, context: dg.OpExecutionContext) -> Watcher:
    """The resource that receives the run's reports in addition to Dagster."""
    found: Watcher = getattr(context.resources, of.names.watcher)
    return found


def engine_at_rest(of: Replication, context: dg.OpExecutionContext, command: str) -> "Engine":
    """The engine of a run that works only on the lake. It does not connect to the source, and does not start it."""
    engines: Engines = getattr(context.resources, of.names.engines)
    observer = DagsterObserver(context, of.within(context), watcher(of, context))
    return engines.engine_at_rest(of.settings, observer, command)


def _until(config: SyncConfig) -> Lsn | None:
    if config.until is None:
        return None
    try:
        return Lsn.parse(config.until)
    except ValueError as error:
        raise UsageError(str(error)) from None
