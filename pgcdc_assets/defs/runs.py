"""Finds runs whose process has died and runs that wait, and asks a run to end.

Dagster's run status does not say whether a run still writes: a run whose processes were all killed stays STARTED
forever and blocks the queue. So every run of ours names its process in a tag.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dagster as dg

from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.errors import PgcdcError
from pgcdc_assets.flow import lock
from pgcdc_assets.project import LOCATION
from pgcdc_assets.store.processname import ProcessName

PROCESS_TAG = "pgcdc/process"
SYNC_JOB = "sync"
MAINTAIN_JOB = "maintain"
JOBS = (SYNC_JOB, "repair", MAINTAIN_JOB)

OURS = {".dagster/repository": f"__repository__@{LOCATION}"}
"""The tag that Dagster gives to every run launched from our code location."""

WAITING = [dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING]
RUNNING = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]

_START_GRACE_SECONDS = 120
"""A run without the tag may still be importing its code. After this time it counts as dead. Dagster's run monitoring
waits longer."""
_ELSEWHERE_SECONDS = 180
"""A run on another host counts as dead if nobody has held the lake for this long. A live run holds the lake, except
while it waits for it (the lease of a writer that was killed ends after a minute) and while it ends. The value is
generous, because it compares the clocks of two hosts."""
_LOOK_SECONDS = 2.0
"""Seconds between two checks of a run whether another run waits."""


def mark_process(context: dg.OpExecutionContext) -> None:
    """Write this process into the run's tags."""
    context.instance.add_run_tags(context.run_id, {PROCESS_TAG: str(ProcessName.own())})


def report_dead_runs(instance: dg.DagsterInstance, layout: Layout, now: float | None = None) -> list[str]:
    """Mark runs of ours as failed if Dagster shows them as running, their process is gone, and nobody holds the lake.
    A process on another host cannot be checked. It counts as gone if nobody has held the lake for a long time. Returns
    the ids of the marked runs."""
    if lock.holder(layout) is not None:
        return []
    records = instance.get_run_records(dg.RunsFilter(tags=OURS, statuses=RUNNING), limit=50)
    silence = lock.silence(layout) if records else 0.0
    dead = [record.dagster_run for record in records if _died(record, now or time.time(), silence)]
    for run in dead:
        instance.report_run_failed(run, "its process is gone; the next run goes on from what is durable")
    return [run.run_id for run in dead]


def _died(record: dg.RunRecord, now: float, silence: float) -> bool:
    started = record.start_time or record.create_timestamp.timestamp()
    mark = record.dagster_run.tags.get(PROCESS_TAG)
    if mark is None:
        return record.dagster_run.job_name in JOBS and now - started > _START_GRACE_SECONDS
    lives = ProcessName.parse(mark).lives()
    if lives is None:  # The process is on another host or in another container.
        return min(silence, now - started) > _ELSEWHERE_SECONDS
    return not lives


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set ``stop``, so that the run ends at a boundary. A second signal interrupts the run. So does
    the end of a time limit of some seconds.

    Dagster also cancels a run by such a signal to its process.
    """
    with ENDING.at_boundary(stop):
        yield


@contextmanager
def stop_for_waiting_runs(context: dg.OpExecutionContext, stop: threading.Event) -> Iterator[None]:
    """During the block, set ``stop`` when another run is queued, so that a backfill gets its turn within seconds.

    Dagster starts the queued run only after this run has ended. So the queued run cannot wait for the lake as a command
    does (:mod:`pgcdc_assets.flow.lock`)."""
    done = threading.Event()
    thread = threading.Thread(
        target=_watch_queue, args=(context.instance, stop, done, context.log.info), name="queue", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch_queue(
    instance: dg.DagsterInstance, stop: threading.Event, done: threading.Event, say: Callable[[str], None]
) -> None:
    while not done.wait(_LOOK_SECONDS):
        if instance.get_runs_count(dg.RunsFilter(tags=OURS, statuses=[dg.DagsterRunStatus.QUEUED])):
            say("another run waits: this one ends at the next boundary")
            stop.set()
            return


@contextmanager
def as_failures() -> Iterator[None]:
    """Raise our own errors as failures of Dagster, in one line that names the thing and what to do."""
    try:
        yield
    except PgcdcError as error:
        found = {"what": error.what, "thing": error.thing, "lsn": str(error.lsn or "") or None, "do": error.do}
        raise dg.Failure(
            description=str(error),
            metadata={name: text for name, text in found.items() if text},
            allow_retries=False,
        ) from error
