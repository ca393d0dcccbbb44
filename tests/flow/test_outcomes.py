"""The outcome of each operation (sync, repair, maintenance ...) is stored in the lake, and `status` reports it. No test
needs Spark."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from stat import S_IMODE
from typing import Any

import pytest

from pgcdc_assets.checks.health import Problem
from pgcdc_assets.checks.status import Status, status
from pgcdc_assets.core.layout import Layout, Location
from pgcdc_assets.core.lsn import Lsn, LsnRange
from pgcdc_assets.core.names import TableName
from pgcdc_assets.errors import (
    LakeError,
    LockHeld,
    MachineError,
    NotRepairable,
    PgcdcError,
    SourceUnavailable,
    UnknownTable,
)
from pgcdc_assets.flow import outcomes
from pgcdc_assets.flow import requests as requests_module
from pgcdc_assets.flow.decide import Bounds
from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.lock import LockHolder, free_again, holder, lake_in_turn, lake_lock, nameless, waiting
from pgcdc_assets.flow.maintenance import Allowance
from pgcdc_assets.flow.outcomes import Operation, OperationKind, recorded
from pgcdc_assets.flow.reports import Silent
from pgcdc_assets.flow.requests import VerifyRequest, VerifyRequests, place_verify_request, verify_request
from pgcdc_assets.log.reader import ChangeLog
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.store.local import path_of
from tests.defs.catalogs import catalog_of
from tests.projectfiles import CATALOG_FILE
from tests.waiting import wait_for

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
    """Records the outcome of an operation, as the engine does. The code in the ``with`` block is the operation's
    work."""
    with lake_lock(settings.layout, command), recorded(settings.layout, kind, command, print) as operation:
        yield operation


def _no_spark() -> Any:
    raise AssertionError("nothing here needs Spark")


def reported(settings: Settings, kind: str) -> tuple[Status, list[Problem]]:
    found = status(settings)
    return found, [problem for problem in found.problems if problem.thing == f"last {kind}"]


def test_failed_sync_is_reported_until_a_sync_succeeds(settings: Settings) -> None:
    assert reported(settings, "sync")[1] == []
    with pytest.raises(SourceUnavailable):
        engine(settings, "follow").sync(Bounds())
    found, (problem,) = reported(settings, "sync")
    assert problem.severity == "error"
    assert "(`pgcdc follow`, 20" in problem.what
    assert "failed: u@/nowhere" in problem.what
    last = json.loads(json.dumps(found.to_json()))["last"]["sync"]
    assert (last["succeeded_at"], last["under_way"], last["failed"]["command"]) == (None, None, "follow")
    assert "hunter2" not in path_of(settings.layout.outcomes).read_text()
    # The sync's failure is still reported after an operation of another kind, here maintenance, has succeeded.
    engine(settings).maintain(Allowance())
    assert len(reported(settings, "sync")[1]) == 1
    with operation(settings):
        pass
    found, problems = reported(settings, "sync")
    assert problems == []
    assert found.to_json()["last"]["sync"]["succeeded_at"] is not None


def test_sync_in_follow_mode_can_report_success_before_it_ends(settings: Settings) -> None:
    with pytest.raises(SourceUnavailable):
        engine(settings).sync(Bounds())
    with operation(settings, OperationKind.SYNC, "follow") as done:
        found, problems = reported(settings, "sync")
        assert len(problems) == 1
        assert found.last["sync"].under_way is not None
        done.succeed()
        assert reported(settings, "sync")[1] == []


def test_success_of_a_long_operation_is_recorded_at_most_once_a_minute(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = datetime(2026, 11, 27, 12, tzinfo=UTC)
    with operation(settings, OperationKind.SYNC, "follow") as done:
        for seconds, recorded_at in ((0, 0), (30, 0), (60, 60), (3600, 3600)):
            monkeypatch.setattr(outcomes, "_now", partial(datetime.__add__, begin, timedelta(seconds=seconds)))
            done.succeed()
            assert outcomes.read(settings.layout)["sync"].succeeded == begin + timedelta(seconds=recorded_at)


def test_killed_sync_is_still_reported_after_maintenance_has_succeeded(settings: Settings) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_IT, str(settings.layout.root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert reported(settings, "sync")[1] == []
        process.send_signal(signal.SIGKILL)
    (problem,) = reported(settings, "sync")[1]
    assert "(`pgcdc follow`, 20" in problem.what
    assert "was killed" in problem.what
    engine(settings, "maintain").maintain(Allowance())
    assert len(reported(settings, "sync")[1]) == 1


def test_operation_that_was_refused_or_stopped_is_not_recorded_as_failed(settings: Settings) -> None:
    """An operation is refused if another process holds the lake's lock, or if its arguments are wrong."""
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


def test_maintenance_errors_of_mirrors_are_reported_as_one_warning(settings: Settings) -> None:
    with operation(settings, OperationKind.MAINTENANCE, "maintain") as done:
        done.failures += [LakeError("cannot be read", thing="public.t", do="restore it"), LakeError("b")]
    found, (problem,) = reported(settings, "maintenance")
    assert (problem.severity, problem.do) == ("warning", "restore it")
    assert "public.t: cannot be read (and 1 more)" in problem.what
    assert all(problem.severity == "warning" for problem in found.problems if problem.thing.startswith("last"))


def test_failed_repair_is_no_longer_reported_after_its_table_was_copied_again(settings: Settings) -> None:
    with pytest.raises(NotRepairable), operation(settings, OperationKind.REPAIR, "repair public.t"):
        raise NotRepairable("lies before the log", thing="public.t", lsn=Lsn(0x20), do="copy it anew")
    assert "at LSN 0/20" in reported(settings, "repair")[1][0].what
    for copied, left in (("public.u", 1), ("public.t", 0)):
        with operation(settings, OperationKind.SYNC, "snapshot") as done:
            done.renewed.append(copied)
        assert len(reported(settings, "repair")[1]) == left


def test_only_the_class_of_an_unexpected_error_is_reported(settings: Settings) -> None:
    """The message of an unexpected error may contain a password, so it is not stored."""
    with pytest.raises(ZeroDivisionError), operation(settings, OperationKind.SYNC, "sync"):
        raise ZeroDivisionError("hunter2")
    (problem,) = reported(settings, "sync")[1]
    assert problem.what.endswith("failed: unexpected ZeroDivisionError")
    assert "hunter2" not in path_of(settings.layout.outcomes).read_text()


def test_unreadable_outcomes_file_is_reported_and_rewritten(settings: Settings) -> None:
    path_of(settings.layout.outcomes).write_text("[]")
    (problem,) = [p for p in status(settings).problems if p.thing == str(settings.layout.outcomes)]
    assert problem.severity == "warning"
    engine(settings, "maintain").maintain(Allowance())
    assert set(outcomes.read(settings.layout)) == {"maintenance"}


def test_operation_succeeds_even_if_its_outcome_cannot_be_written(settings: Settings, tmp_path: Path) -> None:
    path_of(settings.layout.outcomes).mkdir()
    said: list[str] = []
    with lake_lock(settings.layout, "s"), recorded(settings.layout, OperationKind.SYNC, "sync", said.append):
        pass
    assert any("cannot be written" in line for line in said)
    assert not list(path_of(settings.layout.own).glob(f".outcomes.json.{os.getpid()}"))


HOLD_LOCK = """
import sys
from pathlib import Path
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow.lock import lake_lock
with lake_lock(Layout.of(Path(sys.argv[1])), "follow"):
    print("held", flush=True)
    sys.stdin.read()
"""
WAIT_FOR_IT = """
import sys, threading
from pathlib import Path
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow.lock import lake_in_turn
with lake_in_turn(Layout.of(Path(sys.argv[1])), "repair", print, threading.Event()):
    pass
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.of(tmp_path / "lake")


def test_lakes_lock_names_the_process_and_command_that_hold_it(layout: Layout) -> None:
    assert holder(layout) is None
    with lake_lock(layout, "sync"):
        assert holder(layout) == LockHolder(os.getpid(), "sync")
        with pytest.raises(LockHeld, match=rf"`pgcdc sync` \(pid {os.getpid()}\)"), lake_lock(layout, "snapshot"):
            pass
    assert holder(layout) is None


def test_lakes_lock_is_free_after_the_process_that_held_it_was_killed(layout: Layout) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(layout.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        found = holder(layout)
        assert found == LockHolder(process.pid, "follow")
        process.kill()
    assert holder(layout) is None
    with lake_lock(layout, "sync"):
        pass


def test_locking_a_lake_that_cannot_be_written_raises_a_machine_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"), lake_lock(Layout.of(tmp_path / "file"), "sync"):
        pass


def test_verify_request_can_be_placed_before_its_lsn_is_known(layout: Layout) -> None:
    assert verify_request(layout) is None
    with place_verify_request(layout) as request:
        assert verify_request(layout) == VerifyRequest(None)
        request.at(Lsn.parse("16/B374D848"))
        assert verify_request(layout) == VerifyRequest(Lsn.parse("16/B374D848"))
        with pytest.raises(LockHeld), place_verify_request(layout):
            pass
    assert verify_request(layout) is None


def test_verify_request_without_an_lsn_is_valid_for_a_limited_time(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "UNNAMED_SECONDS", 0.2)
    requests = VerifyRequests(layout)
    with place_verify_request(layout) as request:
        assert requests.current() == VerifyRequest(None)
        assert not request.is_late
        wait_for(lambda: requests.current() is None, what="the end of the time")
        monkeypatch.setattr(requests_module, "NAMING_SECONDS", 0.1)
        assert request.is_late
        request.at(Lsn(16))
        assert requests.current() is None, "the sync may already be above the LSN"
    with place_verify_request(layout) as request:
        request.at(Lsn(32))
        assert requests.current() == VerifyRequest(Lsn(32)), "the time limit of a new request starts again"


@contextmanager
def _locked_by_a_stranger(place: Location, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Locks the lock file ``place`` and writes nothing into it, as a backup program may do."""
    path = path_of(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield


@pytest.mark.parametrize("text", ["", "a b c\n", "host.space.1.2 3.0 nowhere\n", "{}\n", "host.space.1.2 3.0 0/10"])
def test_verify_request_with_unreadable_text_counts_as_a_request_without_an_lsn(layout: Layout, text: str) -> None:
    with _locked_by_a_stranger(layout.hold):
        path_of(layout.hold).write_text(text)
        assert verify_request(layout) == VerifyRequest(None)


def test_lock_file_locked_by_a_backup_program_is_reported_and_delays_turns_only_briefly(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests_module, "UNNAMED_SECONDS", 0.2)
    requests = VerifyRequests(layout)
    with _locked_by_a_stranger(layout.hold):
        assert requests.current() == VerifyRequest(None)
        wait_for(lambda: requests.current() is None, what="the end of the time")
        assert nameless(layout) == [layout.hold]
    assert requests.current() is None
    with _locked_by_a_stranger(layout.hold):
        assert requests.current() == VerifyRequest(None), "the time limit of a new lock starts again"
    with _locked_by_a_stranger(layout.waiting):
        assert waiting(layout) is None, "a sync in follow mode would give way for ever"
        assert nameless(layout) == [layout.waiting]
    with _locked_by_a_stranger(layout.lock), pytest.raises(LockHeld), lake_lock(layout, "sync"):
        pass
    with _locked_by_a_stranger(layout.lock, fcntl.LOCK_SH):
        assert nameless(layout) == [layout.lock], "a shared lock also prevents writing"
    with lake_lock(layout, "sync"), place_verify_request(layout):
        assert nameless(layout) == []


def test_lock_files_can_be_opened_only_by_the_operating_system_user_that_owns_them(layout: Layout) -> None:
    with lake_lock(layout, "sync"):
        path_of(layout.lock).chmod(0o644)
    with lake_lock(layout, "sync"), place_verify_request(layout):
        modes = {S_IMODE(path_of(place).stat().st_mode) for place in (layout.lock, layout.hold)}
    assert modes == {0o600}


class Waiting:
    """A command that waits in a thread until it gets the lake's lock or ``stop`` is set. ``reported`` has the lines
    that the command reports."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.stop, self.reported = layout, threading.Event(), list[str]()

    def _run(self) -> None:
        try:
            with lake_in_turn(self.layout, "repair", self.reported.append, self.stop):
                self.reported.append("has it")
        except LockHeld as held:
            self.reported.append(str(held))

    @contextmanager
    def waits(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        wait_for(lambda: bool(waiting(self.layout)), 10, "the command")
        try:
            yield
        finally:
            thread.join(10)
            assert not thread.is_alive()
            assert waiting(self.layout) is None


def test_waiting_command_gets_the_lakes_lock_when_the_sync_releases_it(layout: Layout) -> None:
    command, me, follow = Waiting(layout), f"(pid {os.getpid()})", ExitStack()
    follow.enter_context(lake_lock(layout, "follow", gives_way=True))
    with command.waits(), follow:
        assert waiting(layout) == f"`pgcdc repair` {me}"
        refused = pytest.raises(LockHeld, match=r"`pgcdc repair` \(pid \d+\) already waits for this lake")
        with refused, lake_in_turn(layout, "maintain", print, threading.Event()):
            pass
    assert [line.split(",")[0] for line in command.reported] == [f"waits for `pgcdc follow` {me}", "has it"]


def test_stopped_command_no_longer_waits_for_the_lakes_lock(layout: Layout) -> None:
    command = Waiting(layout)
    with lake_lock(layout, "follow", gives_way=True), command.waits():
        command.stop.set()
    assert "`pgcdc follow`" in command.reported[-1]
    assert "is writing to this lake" in command.reported[-1]


def test_killed_command_no_longer_waits_for_the_lakes_lock(layout: Layout) -> None:
    with lake_lock(layout, "follow", gives_way=True), subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_IT, str(layout.root)]
    ) as process:  # fmt: skip
        wait_for(lambda: waiting(layout) == f"`pgcdc repair` (pid {process.pid})", 30, "the command")
        process.kill()
        process.wait()
        assert waiting(layout) is None


def test_command_is_refused_at_once_while_another_command_holds_the_lakes_lock(layout: Layout) -> None:
    refused = pytest.raises(LockHeld, match="`pgcdc maintain`")
    with lake_lock(layout, "maintain"), refused, lake_in_turn(layout, "repair", print, threading.Event()):
        pass


def test_sync_that_gave_way_to_a_command_continues_when_the_lakes_lock_is_free_again(layout: Layout) -> None:
    stop = threading.Event()
    assert free_again(layout, stop)
    with lake_lock(layout, "maintain"):
        done = threading.Timer(0.2, stop.set)
        done.start()
        assert not free_again(layout, stop)
    with pytest.raises(LockHeld, match="`pgcdc follow`"), lake_lock(layout, "follow", gives_way=True):
        free_again(layout, threading.Event())
