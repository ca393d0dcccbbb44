"""Loads the fixture modules, selects the default or the long set of tests, and distributes the tests to workers."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import hypothesis
import pytest
from hypothesis import Phase
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

pytest_plugins = ["tests.fix_postgres", "tests.fix_spark", "tests.fix_objects"]

# Every JVM of a test session lives only for minutes, so the optimising compiler would cost more time than it saves.
# Without this compiler, the JVM's default code cache is too small: many Spark statements fill it, and the JVM then
# compiles nothing. The serial garbage collector leaves the cores to the workers and takes half the memory.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC")

# Tests start the package in hundreds of processes. Without bytecode files each process would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Hypothesis has no deadline, so no example fails because the machine is busy. The examples are the same in each run. So
# if a test fails that passed before, the cause is a change of the code.
hypothesis.settings.register_profile("pgcdc", deadline=None, derandomize=True)
# The long set uses this profile. Each run of it tries new examples.
hypothesis.settings.register_profile("new_examples", deadline=None)
# This profile reports a failing test sooner, because Hypothesis does not search for the smallest failing example.
hypothesis.settings.register_profile(
    "unshrunk", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
hypothesis.settings.load_profile("pgcdc")

SEED: Final = os.environ.get("PGCDC_TEST_SEED") or str(random.SystemRandom().randrange(1 << 32))
"""The seed of all random choices, in this process and in its pytest workers."""
os.environ["PGCDC_TEST_SEED"] = SEED

_OF_UP: Final = ("tests/end_to_end/test_browser.py", "tests/end_to_end/test_up.py")
_APART: Final = tuple(f"tests/{folder}/" for folder in ("crash", "migrations", "power", "property"))
"""Folders whose tests share only session fixtures, so that each test may run in any worker."""
_VERSION: Final = re.compile(r"\[(pg\d+)")


def pytest_report_header() -> str:
    return f"PGCDC_TEST_SEED={SEED}"


def pytest_configure() -> None:
    # Handles SIGINT again, because xdist's workers ignore SIGINT, and their child processes would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-long", action="store_true", help="run the tests marked `long` too")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    long = [] if config.getoption("--run-long") else [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    for item in items:
        # Tests with S3Proxy get a longer time limit, because the first of them on a machine has to download S3Proxy.
        if "s3" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(900))
    yield
    # Sort the tests here, because all other hooks have run, so that this order is final. Without pytest workers, the
    # tests keep their order.
    if hasattr(config, "workerinput"):
        _slowest_first(items)


def _slowest_first(items: list[pytest.Item]) -> None:
    """Sorts groups of tests by duration, longest first, so that no long group starts when the other workers have
    nothing left to do."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for item in items:
        seconds[group(item.nodeid)] += _seconds(item)
    items.sort(key=lambda item: -seconds[group(item.nodeid)])


def _seconds(item: pytest.Item) -> float:
    """A rough duration of the test in seconds. Only the order of the groups depends on it."""
    takes = item.get_closest_marker("takes")
    if takes is not None:
        return float(takes.args[0])
    if item.get_closest_marker("long"):
        return 60
    if item.get_closest_marker("process"):
        return 10
    return 2 if "spark" in getattr(item, "fixturenames", ()) else 0.3


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Distributes tests as ``--dist loadgroup`` does, but gets the group of a test from :func:`group`. Since pytest
    9.2, xdist's own scheduler uses only the test's name."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Called when a worker dies. The test that the worker was running fails, and is not run again, because the test
        would kill the next worker, too."""
        running = next(
            ((unit, nodeid) for unit in self.assigned_work[node].values() for nodeid, done in unit.items() if not done),
            None,
        )
        if running is not None:
            unit, nodeid = running
            unit[nodeid] = True
        super().remove_node(node)
        return None if running is None else running[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    return Groups(config, log) if config.getoption("dist") == "loadgroup" else None


def group(nodeid: str) -> str:
    """The name of the test's group. One worker runs all tests of a group. A group has the tests of one file, of one
    server version, or of the fixture ``up``. In the folders ``_APART``, each test is a separate group."""
    if nodeid.startswith(_APART):
        return nodeid
    file = nodeid.split("::")[0]
    version = _VERSION.search(nodeid)
    if file.startswith("tests/versions/") and version is not None:
        return version[1]
    return "up" if file in _OF_UP else file
