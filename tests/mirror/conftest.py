from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.core.layout import Layout
from tests.fix_postgres import Database
from tests.mirror.pipeline import Pipeline


@pytest.fixture
def pipe(database: Database, spark: SparkSession, tmp_path: Path) -> Iterator[Pipeline]:
    with database.connect() as conn:
        yield Pipeline(database, conn, spark, Layout.of(tmp_path / "lake"))
