"""The lake of :mod:`~tests.lake.lakes`, in a folder or in a bucket."""

from __future__ import annotations

import pytest

from pgcdc_assets import Lake
from pgcdc_assets.core.layout import Location
from tests.lake.lakes import made


@pytest.fixture(scope="session")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """All tests share this lake, because they only read it."""
    root = tmp_path_factory.mktemp("lake")
    made(Location.of(root))
    return Lake(root)


@pytest.fixture
def lake_in_bucket(bucket: Location) -> Lake:
    made(bucket)
    return Lake(bucket.text)
