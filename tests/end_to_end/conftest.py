"""The fixture ``up``: one running `pgcdc up` that several tests share. These tests run last, because `pgcdc up` uses
CPU as long as it runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgcdc_assets.demo.server import EmbeddedServer
from tests.end_to_end.served import Served, serve
from tests.fix_postgres import fresh_database

LAST = "test_sigterm"
"""The beginning of the name of the test that ends `pgcdc up`, and must therefore be the last test."""


@pytest.fixture(scope="session")
def up(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A project in which `pgcdc up` runs the syncs. No other command runs in this project."""
    with fresh_database(server) as database, serve(database, tmp_path_factory.mktemp("up")) as served:
        yield served


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ("up" in getattr(item, "fixturenames", ()), item.name.startswith(LAST)))
