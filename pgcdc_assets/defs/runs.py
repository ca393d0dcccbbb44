"""Finds Dagster runs whose process has died, and runs that wait. Asks a run to end if another run waits.

Dagster's run status does not say whether a run still works: a run whose processes were all killed stays STARTED forever
and blocks the queue. So every run of pgcdc names its process in a tag.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import parent_process

import dagster as dg

from pgcdc_assets import logs
from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.defs.keys import SOURCE_TAG, Names
from pgcdc_assets.defs.partitions import claim
from pgcdc_assets.defs.replication import Replication
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow import lock
from pgcdc_assets.project import load_catalog
from pgcdc_assets.store.lease import ProcessName

PROCESS_TAG = "pgcdc/process"
WAITING = [dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING]
RUNNING = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]

_START_GRACE_SECONDS = 120
"""A run without the process tag may still be importing its code. If it has no tag after this time, it is treated as
dead. Dagster's own run monitoring waits longer."""
_ELSEWHERE_SECONDS = 180
"""A run on another host is treated as dead if no process has held the lake's lock for this long. A live run holds the
lock, except at its end and while it waits for the lock. It waits for a minute at most, until the lease of a killed
writer ends. The value is larger than that, because the clocks of two hosts are compared."""
_MOST_RUNS = 500
"""Only this number of an instance's newest runs is searched. If more runs of other projects are queued, a waiting run
of pgcdc may be missed. It then waits until the running sync ends by itself."""
_LOOK_SECONDS = 2.0
"""A run checks at this interval, in seconds, whether another run waits."""


def runs_of(instance: dg.DagsterInstance, names: Names, statuses: Sequence[dg.DagsterRunStatus]) -> list[dg.RunRecord]:
    """The runs with these statuses that write to the source's lake. A run that was started in the UI gets the source's
    tag only when it begins. Until then, it is found by the pools of its ops, which Dagster stores."""
    found = instance.get_run_records(dg.RunsFilter(statuses=[*statuses]), limit=_MOST_RUNS)
    return [record for record in found if _is_of(record.dagster_run, names)]


def _is_of(run: dg.DagsterRun, names: Names) -> bool:
    if run.job_name == names.verify_job:
        # While a sync runs, verify only reads, so it does not count as a writer.
        return False
    pools = run.run_op_concurrency.all_pools if run.run_op_concurrency else None
    return run.tags.get(SOURCE_TAG) == names.source or names.pool in (pools or ())


def report_dead_runs(instance: dg.DagsterInstance, names: Names, layout: Layout, now: float | None = None) -> list[str]:
    """Mark runs of the source as failed if Dagster shows them as running, their process has ended, and no process holds
    the lake's lock. A process on another host cannot be checked. It is treated as ended if no process has held the lock
    for a long time. Returns the ids of the marked runs."""
    if lock.holder(layout) is not None:
        return []
    records = runs_of(instance, names, RUNNING)
    silence = lock.silence(layout) if records else 0.0
    dead = [record.dagster_run for record in records if _died(record, names, now or time.time(), silence)]
    for run in dead:
        instance.report_run_failed(run, "the process of this run died; the next run continues where this run stopped")
    return [run.run_id for run in dead]


def _died(record: dg.RunRecord, names: Names, now: float, silence: float) -> bool:
    started = record.start_time or record.create_timestamp.timestamp()
    mark = record.dagster_run.tags.get(PROCESS_TAG)
    if mark is None:
        return record.dagster_run.job_name in names.jobs and now - started > _START_GRACE_SECONDS
    lives = ProcessName.parse(mark).lives()
    if lives is None:  # The process is on another host or in another container.
        # Only runs of pgcdc's own jobs are treated as dead. A run of assets may still work on steps of other assets on
        # that host, and such steps do not hold the lake's lock.
        return record.dagster_run.job_name in names.jobs and min(silence, now - started) > _ELSEWHERE_SECONDS
    return not lives


@contextmanager
def stop_for_waiting_runs(context: dg.OpExecutionContext, names: Names, stop: threading.Event) -> Iterator[None]:
    """Sets ``stop`` when another run of the source waits, so that, for example, a backfill need not wait for the end of
    a long sync. The other run waits in Dagster's queue, or has started and waits for the source's pool."""
    done = threading.Event()
    thread = threading.Thread(target=_watch_queue, args=(context, names, stop, done), name="queue", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch_queue(context: dg.OpExecutionContext, names: Names, stop: threading.Event, done: threading.Event) -> None:
    while not done.wait(_LOOK_SECONDS):
        if runs_of(context.instance, names, [dg.DagsterRunStatus.QUEUED]) or waiting_for_pool(context.instance, names):
            context.log.info("another run of this source waits for this run, which therefore ends as soon as it can")
            stop.set()
            return


def waiting_for_pool(instance: dg.DagsterInstance, names: Names) -> set[str]:
    """Ids of runs that have started and wait for the one slot of the source's pool. Runs that Dagster shows as finished
    are left out."""
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return set()
    return {run_id for run_id in storage.get_concurrency_info(names.pool).pending_run_ids if _lives(instance, run_id)}


def _lives(instance: dg.DagsterInstance, run_id: str) -> bool:
    run = instance.get_run_by_id(run_id)
    return run is not None and not run.is_finished


def limit_pool(instance: dg.DagsterInstance, names: Names) -> None:
    """Limit the source's pool to one slot, unless a limit is already set, and free the slots of runs that have ended.
    Dagster frees such slots itself only if its run monitoring is configured to do so."""
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return
    if not any(pool.name == names.pool and not pool.from_default for pool in storage.get_pool_limits()):
        storage.set_concurrency_slots(names.pool, 1)
    info = storage.get_concurrency_info(names.pool)
    for run_id in info.active_run_ids | info.pending_run_ids | info.assigned_run_ids:
        if not _lives(instance, run_id):
            storage.free_concurrency_slots_for_run(run_id)


def reserve(of: Replication, instance: dg.DagsterInstance) -> None:
    """Claim the source's partition sets and pool in the instance. Raises WrongInstance if another project owns them."""
    if catalog := load_catalog(of.settings.catalog_file):
        claim(instance, of.names, catalog.identity)
    limit_pool(instance, of.names)


@contextmanager
def writing_run(of: Replication, context: dg.OpExecutionContext, stop: threading.Event | None = None) -> Iterator[None]:
    """Wraps the work of every run that writes. Tags the run with its source and process, claims the source's names in
    Dagster (:func:`reserve`), and marks dead runs as failed. With ``stop``, a signal ends the run at the next boundary.
    Errors of pgcdc are raised as Dagster failures whose text is one line."""
    # Dagster's default executor runs each step in a process of its own. The run ends with the parent of that process.
    parent = parent_process()
    mark = ProcessName.own(parent.pid if parent else None)
    context.instance.add_run_tags(context.run_id, {**of.names.tags, PROCESS_TAG: str(mark)})
    if of.settings.log_format == logs.JSON and not logs.as_json():
        # Dagster started this process. If a command had started it, the command would have called begin() already.
        logs.begin(as_json=True)
    with as_failures():
        reserve(of, context.instance)
        report_dead_runs(context.instance, of.names, of.settings.layout)
        if stop is None:
            yield
        else:
            # Dagster also cancels a run by a signal to its process.
            with ENDING.at_boundary(stop):
                yield


class NamedFailure(dg.Failure):
    """An error of pgcdc as a Dagster failure. The text is one line that names the thing and what to do. The failure has
    the error as an attribute and not as its cause, because Dagster would show a second stack trace for a cause."""

    def __init__(self, error: PgcdcError) -> None:
        found = {"what": error.what, "thing": error.thing, "lsn": str(error.lsn or ""), "do": error.do}
        metadata = {name: text for name, text in found.items() if text}
        super().__init__(description=str(error), metadata=metadata, allow_retries=False)
        self.error = error


@contextmanager
def as_failures() -> Iterator[None]:
    """Raise Dagster failures in place of errors of pgcdc."""
    try:
        yield
    except PgcdcError as error:
        raise NamedFailure(error) from None
