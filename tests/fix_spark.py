"""One small JVM per test session for all tests that need Spark. The first of these tests starts the JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pgcdc_assets.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_SETTINGS = {
    "master": "local[2]",
    "spark.driver.memory": "1500m",
    "spark.sql.shuffle.partitions": "2",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from pgcdc_assets.spark.session import spark_session, stop_session

    folder: Path = tmp_path_factory.mktemp("spark")
    settings = Settings(
        lake=folder / "lake", spark={**SPARK_SETTINGS, "spark.sql.warehouse.dir": str(folder / "warehouse")}
    )
    session = spark_session(settings)
    yield session
    stop_session(session)
