"""What the crash tests stand on: a server of their own, fault points, one seed, one table.

``PGCDC_TEST_CRASH_CYCLES``: the number of cycles at receiver level. A quarter as many run over the whole path in one
process. The command itself is killed in the long set alone: at some of its steps, or at each of them from ``EVERY``
cycles on. ``PGCDC_TEST_SEED`` decides everything that is drawn, and is printed at the beginning. The timing is the
machine's own.
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
from tests.crash.faults import Faults
from tests.crash.tally import Tally
from tests.fix_postgres import TEST_SETTINGS

DEFAULT_CYCLES, LONG_CYCLES, EVERY = 4, 24, 100
TABLE = Path("build/crash.md").absolute()
_SEED = int(SEED)
_TALLY = Tally(_SEED)


@pytest.fixture(scope="session")
def cycles(pytestconfig: pytest.Config) -> int:
    default = LONG_CYCLES if pytestconfig.getoption("--run-long") else DEFAULT_CYCLES
    return int(os.environ.get("PGCDC_TEST_CRASH_CYCLES") or default)


@pytest.fixture(scope="session")
def every(cycles: int) -> bool:
    """Whether the command is killed at each of its steps, or at some of them."""
    return cycles >= EVERY


@pytest.fixture(scope="session")
def tally() -> Tally:
    return _TALLY


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Each test's own, so that one test is replayed without the others."""
    return random.Random(f"{_SEED} {request.node.name}")


@pytest.fixture(scope="session")
def crash_server(pg_version: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """It is stopped as by a crash, which must not disturb the session's shared one.

    Without fsync: the machine does not crash, so what was written is there afterwards.
    """
    folder = tmp_path_factory.mktemp("crash") / "server"
    settings = {**TEST_SETTINGS, "deadlock_timeout": "100ms", "log_min_messages": "panic"}
    with EmbeddedServer(folder, version=pg_version, fsync=False, settings=settings) as server:
        yield server


@pytest.fixture(scope="session")
def fault_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the session: Spark's workers keep the environment that they were started with."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture
def faults(fault_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Seen by this process and by those that it starts."""
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
