"""Dagster runs whose process has died are reported as failed, and active runs are not. A signal ends a sync at a commit
boundary."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from pgcdc_assets.core.ending import ENDING
from pgcdc_assets.core.layout import LOCAL, Layout
from pgcdc_assets.defs import runs
from pgcdc_assets.defs.keys import Names
from pgcdc_assets.flow.lock import lake_lock
from pgcdc_assets.store import chainlease, storage
from pgcdc_assets.store.lease import ProcessName
from tests.defs.catalogs import NAMES
from tests.defs.doubles import dead_mark

OTHER = Names("other")


@dg.op
def nothing() -> None:
    """The op of a job that is never executed."""


@dg.job(name=NAMES.sync_job)
def sync() -> None:
    nothing()


@dg.job
def foreign() -> None:
    nothing()


def run_of(
    instance: dg.DagsterInstance, job: dg.JobDefinition = sync, mark: str | None = None, *, of: Names | None = NAMES
) -> str:  # fmt: skip
    tags = of.tags if of else {}
    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=tags)
    if mark is not None:
        instance.add_run_tags(run.run_id, {runs.PROCESS_TAG: mark})
    return run.run_id


def elsewhere() -> str:
    """The process name of a process in a container that has this host's name, but its own process numbers."""
    return str(replace(ProcessName.own(), space="anotherboot-4026531836"))


@pytest.fixture(params=["local", "s3"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    if request.param == "s3":
        return Layout(request.getfixturevalue("bucket"))
    return Layout.of(tmp_path / "lake")


def forget(lake: Layout) -> None:
    """Deletes all traces of the last holder of the lake's lock, as if that process had held the lock days ago."""
    chainlease._chain.cache_clear()
    if lake.root.scheme == LOCAL:
        storage.delete([lake.lock])
    else:
        storage.delete_folder(lake.lock)


def status(instance: dg.DagsterInstance, run_id: str) -> dg.DagsterRunStatus:
    run = instance.get_run_by_id(run_id)
    assert run is not None
    return run.status


def test_a_run_whose_process_ended_is_reported_as_failed(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    dead, alive = run_of(instance, mark=dead_mark()), run_of(instance, mark=str(ProcessName.own()))
    assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path)) == [dead]
    assert status(instance, dead) is dg.DagsterRunStatus.FAILURE
    assert status(instance, alive) is dg.DagsterRunStatus.STARTED


def test_run_is_reported_dead_if_a_newer_process_has_its_pid(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    own = ProcessName.own()
    dead = run_of(instance, mark=str(replace(own, started=own.started - 100)))
    assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path)) == [dead]


def test_no_run_is_reported_dead_while_another_process_holds_the_lock_of_the_lake(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    dead = run_of(instance, mark=dead_mark())
    code = (
        "import sys, pathlib\n"
        "from pgcdc_assets.core.layout import Layout; from pgcdc_assets.flow.lock import lake_lock\n"
        "with lake_lock(Layout.of(pathlib.Path(sys.argv[1])), 'follow'): print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path)) == []
    holder.communicate("\n")
    assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path)) == [dead]


def test_run_without_a_process_tag_is_reported_dead_only_after_two_minutes(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    young = run_of(instance)
    other = run_of(instance, foreign)
    assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path)) == []
    later = time.time() + 121
    assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path), now=later) == [young]
    assert status(instance, other) is dg.DagsterRunStatus.STARTED


def test_run_of_another_code_location_is_not_reported_dead(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    """The other code location, in the same Dagster instance, has a job with the name of our job."""
    others = run_of(instance, of=None)
    assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path), now=time.time() + 121) == []
    assert status(instance, others) is dg.DagsterRunStatus.STARTED


def test_run_of_another_source_is_not_reported_dead(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    """Only the sensor of that source can check whether its lake is locked."""
    others = run_of(instance, mark=dead_mark(), of=OTHER)
    assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path), now=time.time() + 121) == []
    assert status(instance, others) is dg.DagsterRunStatus.STARTED
    assert runs.report_dead_runs(instance, OTHER, Layout.of(tmp_path)) == [others]


def test_run_in_another_container_is_reported_dead_if_its_lake_has_been_unlocked_for_long(
    instance: dg.DagsterInstance, lake: Layout
) -> None:
    run = run_of(instance, mark=elsewhere())
    assert runs.report_dead_runs(instance, NAMES, lake) == [], "it has just begun, and may be on its way to the lake"
    later = time.time() + runs._ELSEWHERE_SECONDS + 1
    with lake_lock(lake, "sync"):
        assert runs.report_dead_runs(instance, NAMES, lake, now=later) == [], "it may be the holder"
    assert runs.report_dead_runs(instance, NAMES, lake, now=later) == [], "it may have held the lake a moment ago"
    forget(lake)
    assert runs.report_dead_runs(instance, NAMES, lake, now=time.time()) == []
    assert runs.report_dead_runs(instance, NAMES, lake, now=later) == [run]
    assert status(instance, run) is dg.DagsterRunStatus.FAILURE


def test_no_run_is_reported_dead_while_this_process_holds_the_lock_of_the_lake(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    """A sync must therefore report dead runs before it takes the lock."""
    dead = run_of(instance, mark=dead_mark())
    with lake_lock(Layout.of(tmp_path), "sync"):
        assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path)) == []
    assert runs.report_dead_runs(instance, NAMES, Layout.of(tmp_path)) == [dead]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_the_run_to_stop_and_a_second_signal_interrupts_it(number: signal.Signals) -> None:
    stop = threading.Event()
    before = signal.getsignal(number)
    with ENDING.at_boundary(stop):
        os.kill(os.getpid(), number)
        assert stop.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.fixture
def with_pools() -> Iterator[dg.DagsterInstance]:
    """An instance with a database on disk, because an instance in memory has no pools."""
    with dg.instance_for_test() as instance:
        yield instance


def test_the_pool_slot_of_a_run_that_has_ended_is_released(with_pools: dg.DagsterInstance) -> None:
    """If a run ended while it waited for a slot of the pool, its place in the pool's queue is released, too."""
    instance, storage = with_pools, with_pools.event_log_storage
    runs.limit_pool(instance, NAMES)
    holder, waiter = run_of(instance), run_of(instance)
    assert storage.claim_concurrency_slot(NAMES.pool, holder, "step").is_claimed
    assert not storage.claim_concurrency_slot(NAMES.pool, waiter, "step").is_claimed
    assert runs.waiting_for_pool(instance, NAMES) == {waiter}
    for run_id in (holder, waiter):
        found = instance.get_run_by_id(run_id)
        assert found is not None
        instance.report_run_canceled(found)
    runs.limit_pool(instance, NAMES)
    assert runs.waiting_for_pool(instance, NAMES) == set()
    assert storage.claim_concurrency_slot(NAMES.pool, run_of(instance), "step").is_claimed


def test_a_pool_gets_one_slot_unless_a_user_has_set_its_limit(with_pools: dg.DagsterInstance) -> None:
    instance, storage = with_pools, with_pools.event_log_storage
    runs.limit_pool(instance, NAMES)
    assert storage.get_concurrency_info(NAMES.pool).slot_count == 1
    storage.set_concurrency_slots(NAMES.pool, 0)
    runs.limit_pool(instance, NAMES)
    assert storage.get_concurrency_info(NAMES.pool).slot_count == 0, "a limit that a user has set"
