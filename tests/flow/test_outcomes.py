"""The outcome of each operation (sync, repair, maintenance ...) is stored in the lake, and `status` reports it. No test
needs Spark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pgcdc_assets.checks.health import Problem
from pgcdc_assets.checks.status import Status, status
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import LakeError, LockHeld, NotRepairable, PgcdcError, SourceUnavailable, UnknownTable
from pgcdc_assets.flow import outcomes
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.lock import lake_lock
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.outcomes import Operation, OperationKind, recorded
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.local import path_of
from tests.defs.catalogs import catalog_of
from tests.projectfiles import CATALOG_FILE

NOWHERE = "host=/nowhere user=u password=hunter2"
HOLD_IT = """
import sys
from pathlib import Path
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow.lock import lake_lock
from pgcdc_assets.flow.outcomes import OperationKind, recorded
layout = Layout.of(Path(sys.argv[1]))
with lake_lock(layout, "follow"), recorded(layout, OperationKind.SYNC, "follow", print):
    print("begun", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a project with a catalog and a log, whose source cannot be reached."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(source=NOWHERE, lake=tmp_path / "lake", slot="s", publication="p")
    catalog = catalog_of(("public", "orders"))
    save_catalog(catalog, CATALOG_FILE)
    ChangeLog(settings.layout).create(catalog.identity, Lsn(0x10), 1)
    return settings


def engine(settings: Settings, command: str = "sync") -> Engine:
    return Engine(settings, NOWHERE, Silent(), _no_spark, command)


@contextmanager
def operation(
    settings: Settings, kind: OperationKind = OperationKind.SYNC, command: str = "sync"
) -> Iterator[Operation]:
    """Record an operation as the engine does. The block is the operation's work."""
    with lake_lock(settings.layout, command), recorded(settings.layout, kind, command, print) as operation:
        yield operation


def _no_spark() -> Any:
    raise AssertionError("nothing here needs Spark")


def told(settings: Settings, kind: str) -> tuple[Status, list[Problem]]:
    found = status(settings)
    return found, [problem for problem in found.problems if problem.thing == f"last {kind}"]


def test_failed_sync_is_reported_until_a_sync_succeeds(settings: Settings) -> None:
    assert told(settings, "sync")[1] == []
    with pytest.raises(SourceUnavailable):
        engine(settings, "follow").sync(Bounds())
    found, (problem,) = told(settings, "sync")
    assert problem.severity == "error"
    assert "(`pgcdc follow`, 20" in problem.what
    assert "failed: u@/nowhere" in problem.what
    last = json.loads(json.dumps(found.to_json()))["last"]["sync"]
    assert (last["succeeded_at"], last["under_way"], last["failed"]["command"]) == (None, None, "follow")
    assert "hunter2" not in path_of(settings.layout.outcomes).read_text()
    # The success of a different kind of operation does not end the report.
    engine(settings).maintain(Allowance())
    assert len(told(settings, "sync")[1]) == 1
    with operation(settings):
        pass
    found, problems = told(settings, "sync")
    assert problems == []
    assert found.to_json()["last"]["sync"]["succeeded_at"] is not None


def test_sync_in_follow_mode_can_succeed_before_it_ends(settings: Settings) -> None:
    with pytest.raises(SourceUnavailable):
        engine(settings).sync(Bounds())
    with operation(settings, OperationKind.SYNC, "follow") as done:
        found, problems = told(settings, "sync")
        assert len(problems) == 1
        assert found.last["sync"].under_way is not None
        done.succeed()
        assert told(settings, "sync")[1] == []


def test_operation_that_lasts_records_its_newest_success(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = datetime(2026, 11, 27, 12, tzinfo=UTC)
    with operation(settings, OperationKind.SYNC, "follow") as done:
        for seconds, recorded_at in ((0, 0), (30, 0), (60, 60), (3600, 3600)):
            monkeypatch.setattr(outcomes, "_now", partial(datetime.__add__, begin, timedelta(seconds=seconds)))
            done.succeed()
            assert outcomes.read(settings.layout)["sync"].succeeded == begin + timedelta(seconds=recorded_at)


def test_killed_operation_is_reported_even_after_another_kind_of_operation(settings: Settings) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_IT, str(settings.layout.root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert told(settings, "sync")[1] == []
        process.send_signal(signal.SIGKILL)
    (problem,) = told(settings, "sync")[1]
    assert "(`pgcdc follow`, 20" in problem.what
    assert "was killed" in problem.what
    engine(settings, "maintain").maintain(Allowance())
    assert len(told(settings, "sync")[1]) == 1


def test_held_lock_usage_error_and_stop_are_not_failures(settings: Settings) -> None:
    with lake_lock(settings.layout, "follow"), pytest.raises(LockHeld):
        engine(settings).sync(Bounds())
    with pytest.raises(PgcdcError):
        engine(settings, "repair").repair(TableName("public", "ordrs"), LsnRange(Lsn(0x10), Lsn(0x10)))
    for raised in (KeyboardInterrupt(), UnknownTable("is not known")):
        with pytest.raises(type(raised)), operation(settings):
            raise raised
    with operation(settings) as done:
        done.given_up = lambda: True
    last = outcomes.read(settings.layout)
    assert [(outcome.succeeded, outcome.failed, outcome.under_way) for outcome in last.values()] == [(None,) * 3] * 2


def test_maintenance_error_of_a_mirror_is_reported(settings: Settings) -> None:
    with operation(settings, OperationKind.MAINTENANCE, "maintain") as done:
        done.failures += [LakeError("cannot be read", thing="public.t", do="restore it"), LakeError("b")]
    found, (problem,) = told(settings, "maintenance")
    assert (problem.severity, problem.do) == ("warning", "restore it")
    assert "public.t: cannot be read (and 1 more)" in problem.what
    assert all(problem.severity == "warning" for problem in found.problems if problem.thing.startswith("last"))


def test_failed_repair_is_no_longer_reported_after_a_new_copy(settings: Settings) -> None:
    with pytest.raises(NotRepairable), operation(settings, OperationKind.REPAIR, "repair public.t"):
        raise NotRepairable("lies before the log", thing="public.t", lsn=Lsn(0x20), do="copy it anew")
    assert "at LSN 0/20" in told(settings, "repair")[1][0].what
    for copied, left in (("public.u", 1), ("public.t", 0)):
        with operation(settings, OperationKind.SYNC, "snapshot") as done:
            done.renewed.append(copied)
        assert len(told(settings, "repair")[1]) == left


def test_unexpected_error_is_reported_only_by_its_class(settings: Settings) -> None:
    with pytest.raises(ZeroDivisionError), operation(settings, OperationKind.SYNC, "sync"):
        raise ZeroDivisionError("hunter2")
    (problem,) = told(settings, "sync")[1]
    assert problem.what.endswith("failed: unexpected ZeroDivisionError")
    assert "hunter2" not in path_of(settings.layout.outcomes).read_text()


def test_unreadable_outcomes_file_is_reported_and_rewritten(settings: Settings) -> None:
    path_of(settings.layout.outcomes).write_text("[]")
    (problem,) = [p for p in status(settings).problems if p.thing == str(settings.layout.outcomes)]
    assert problem.severity == "warning"
    engine(settings, "maintain").maintain(Allowance())
    assert set(outcomes.read(settings.layout)) == {"maintenance"}


def test_outcome_that_cannot_be_written_fails_no_operation(settings: Settings, tmp_path: Path) -> None:
    path_of(settings.layout.outcomes).mkdir()
    said: list[str] = []
    with lake_lock(settings.layout, "s"), recorded(settings.layout, OperationKind.SYNC, "sync", said.append):
        pass
    assert any("cannot be written" in line for line in said)
    assert not list(path_of(settings.layout.own).glob(f".outcomes.json.{os.getpid()}"))
