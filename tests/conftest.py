"""Fixtures by theme, and the switch for the long set."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["tests.fix_postgres", "tests.fix_spark"]

# Every JVM of a test run lives for minutes: the optimising compiler would take more than it gives.
# Without it the code cache is small, and once the code of many statements fills it nothing is compiled any more.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-long", action="store_true", help="run the tests marked `long` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
