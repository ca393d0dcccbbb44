"""The jobs that write: sync (which also makes new copies) and repair. Each has one op and runs in one process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import dagster as dg

from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.defs import keys, metadata
from pgcdc_assets.defs.observer import DagsterObserver, Watcher
from pgcdc_assets.defs.partitions import RangeRegister, claim
from pgcdc_assets.defs.resources import Engines
from pgcdc_assets.defs.runs import (
    SYNC_JOB,
    as_failures,
    mark_process,
    report_dead_runs,
    stop_for_waiting_runs,
    stop_on_signals,
)
from pgcdc_assets.errors import UsageError
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from pgcdc_assets.flow.engine import Engine
    from pgcdc_assets.flow.reports import SyncReport


SYNC_OP = "sync_changes"
REPAIR_OP = "repair_range"


class SyncConfig(dg.Config):
    """What one run has to do. With the defaults it catches up with the source's present position and ends."""

    until: str | None = None
    """The LSN to reach. Without it, the source's position at the start of the run."""
    follow: bool = False
    """Go on until the run is idle, stopped or out of time."""
    max_seconds: float | None = None
    idle_seconds: float | None = None
    receive_only: bool = False
    """Only write changes to the log, so that the slot can release WAL. Apply nothing to the mirrors."""
    copy_anew: list[str] = []  # noqa: RUF012  (pydantic copies it)
    """Tables to copy again, before anything else."""
    heal: list[str] = []  # noqa: RUF012
    """Tables that were set aside, and are to be followed again from the log."""
    command: str = SYNC_JOB
    """The name of the command in the lake's lock."""
    give_way: bool = False
    """End early, at a boundary, when another run is queued. The sensor then starts the next sync."""


class RepairConfig(dg.Config):
    table: str
    span: str
    """``X/Y..X/Y`` or a partition key. The range is widened to whole batches."""


@dg.op(
    name=SYNC_OP,
    out=dg.Out(dg.Nothing),
    description="Copies what is not yet copied, receives, applies and publishes; records every range as it closes.",
)
def sync_op(
    context: dg.OpExecutionContext, config: SyncConfig, engines: Engines, watcher: dg.ResourceParam[Watcher]
) -> None:
    report = run_sync(context, config, engines, watcher)
    context.add_output_metadata(of_sync(report))
    watcher.finished(report)


@dg.op(
    name=REPAIR_OP,
    out=dg.Out(dg.Nothing),
    description="Derives the keys that a range touched again from the log, and merges them into the mirror.",
)
def repair_op(
    context: dg.OpExecutionContext, config: RepairConfig, engines: Engines, watcher: dg.ResourceParam[Watcher]
) -> None:
    with writing_run(context):
        table, span = TableName.parse(config.table), LsnRange.parse(config.span)
        report = engine_at_rest(context, engines, watcher, f"repair {table}").repair(table, span)
    found = metadata.of_mirror(report, report.tables.get(table), None) | {"repaired": dg.MetadataValue.bool(True)}
    context.add_output_metadata(found)
    for known in RangeRegister(context.instance).known():
        if report.span.start <= known.start and known.end <= report.span.end:
            event = dg.AssetMaterialization(keys.mirror_key(table), partition=known.key, metadata=found)
            context.log_event(event)
    watcher.range_closed(report)


def run_sync(context: dg.OpExecutionContext, config: SyncConfig, engines: Engines, watcher: Watcher) -> "SyncReport":
    """One bounded run of the engine, in this process."""
    from pgcdc_assets.flow.decide import Bounds

    stop = watcher.stop
    with writing_run(context, stop):
        settings = Settings.load()
        observer = DagsterObserver(context, settings, watcher)
        bounds = Bounds(
            _until(config), config.follow, config.max_seconds, config.idle_seconds, config.receive_only, stop
        )
        copy_anew, heal = ([TableName.parse(table) for table in tables] for tables in (config.copy_anew, config.heal))
        engine = engines.engine(settings, observer, config.command)
        if not config.give_way:
            return engine.sync(bounds, copy_anew=copy_anew, heal=heal)
        with stop_for_waiting_runs(context, bounds.give_way):
            return engine.sync(bounds, copy_anew=copy_anew, heal=heal)


def engine_at_rest(context: dg.OpExecutionContext, engines: Engines, watcher: Watcher, command: str) -> "Engine":
    """The engine of a run that works on the lake alone. It does not connect to the source, and does not start it."""
    settings = Settings.load()
    return engines.engine_at_rest(settings, DagsterObserver(context, settings, watcher), command)


@contextmanager
def writing_run(context: dg.OpExecutionContext, stop: threading.Event | None = None) -> Iterator[None]:
    """Wraps the work of every run that writes: writes the process into the run's tags, checks that the instance belongs
    to this project, and marks dead runs as failed. With ``stop``, signals end the run at a boundary. Our errors become
    failures of Dagster, in one line."""
    mark_process(context)
    with as_failures():
        settings = Settings.load()
        if catalog := load_catalog(settings.catalog_file):
            claim(context.instance, catalog.identity)
        report_dead_runs(context.instance, settings.layout)
        if stop is None:
            yield
        else:
            with stop_on_signals(stop):
                yield


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


def _until(config: SyncConfig) -> Lsn | None:
    if config.until is None:
        return None
    try:
        return Lsn.parse(config.until)
    except ValueError as error:
        raise UsageError(str(error)) from None


@dg.job(name=SYNC_JOB, description="PostgreSQL's changes into the mirrors, for as long as the run is asked to.")
def sync_job() -> None:
    sync_op()


@dg.job(name="repair", description="Repair one mirror for one LSN range, from the change log.")
def repair_job() -> None:
    repair_op()
