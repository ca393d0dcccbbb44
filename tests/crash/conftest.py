"""Fixtures of the crash tests: a separate server, fault points, one seed, and one table of results.

``PGCDC_TEST_CRASH_CYCLES`` is the number of crashes of the receiver. A quarter as many crashes are made in syncs that
run in the test's process. Only the long set kills a whole command: at some of its durable steps, or at each step if
``PGCDC_TEST_CRASH_CYCLES`` is at least ``EVERY``. ``PGCDC_TEST_SEED`` decides all random choices, and is printed at the
start. The timing still depends on the machine.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgcdc_assets.core import faultpoints
from pgcdc_assets.demo.server import EmbeddedServer
from tests.conftest import SEED
from tests.crash.faults import Faults, Tally
from tests.fix_postgres import TEST_SETTINGS

CYCLES, EVERY = 24, 100
TABLE = Path("build/crash.md").absolute()
_SEED = int(SEED)
_TALLY = Tally(_SEED)


@pytest.fixture(scope="session")
def cycles() -> int:
    return int(os.environ.get("PGCDC_TEST_CRASH_CYCLES") or CYCLES)


@pytest.fixture(scope="session")
def every(cycles: int) -> bool:
    """Whether tests kill a command at each of its durable steps. If False, they kill it only at some steps."""
    return cycles >= EVERY


@pytest.fixture(scope="session")
def tally() -> Tally:
    return _TALLY


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """A separate random generator for each test, so that a single test can be repeated with the same choices."""
    return random.Random(f"{_SEED} {request.node.name}")


@pytest.fixture(scope="session")
def crash_server(pg_version: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A separate server, because crashes must not disturb the session's shared server. It runs without fsync: only
    processes crash here, not the machine, so no written data is lost."""
    folder = tmp_path_factory.mktemp("crash") / "server"
    settings = {**TEST_SETTINGS, "deadlock_timeout": "100ms", "log_min_messages": "panic"}
    with EmbeddedServer(folder, version=pg_version, fsync=False, settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def fault_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of armed fault points. It is the same during the whole session, because Spark's workers keep the
    environment with which they were started."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture
def faults(fault_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Fault points for this process and for the processes that it starts."""
    monkeypatch.setenv(faultpoints.VARIABLE, str(fault_folder))
    monkeypatch.setattr(faultpoints, "_FOLDER", fault_folder)
    faults = Faults(fault_folder)
    yield faults
    faults.clear()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _TALLY.survived:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(_TALLY.markdown())
        terminalreporter.section("crashes survived")
        terminalreporter.write(_TALLY.markdown())
