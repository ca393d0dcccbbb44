"""The log in an object store: the tests of its content, ends and restarts, over again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pgcdc_assets.core.location import Location
from tests.fix_postgres import Database
from tests.log.conftest import Source, source_in
from tests.log.test_content import *  # noqa: F403
from tests.log.test_endpos import *  # noqa: F403
from tests.log.test_two_phase import *  # noqa: F403


@pytest.fixture
def source(database: Database, tmp_path: Path, bucket: Location) -> Iterator[Source]:
    with source_in(database, tmp_path, bucket) as source:
        yield source
