"""Makes a project directory that is ready to run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from pgcdc_assets.flow.engine import Engine
from pgcdc_assets.flow.reports import Observer, Silent
from pgcdc_assets.project import save_catalog
from pgcdc_assets.settings import Settings
from pgcdc_assets.source.setup.setup import setup


@contextmanager
def project(folder: Path, conninfo: str, slot: str, **given: Any) -> Iterator[Settings]:
    """A project in ``folder``, which is the working directory during the block. The folder is removed after the block.
    ``given``: more settings."""
    before = Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        settings = Settings(source=conninfo, slot=slot, **given)
        save_catalog(setup(settings, conninfo).catalog, settings.catalog_file)
        yield settings
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def engine(settings: Settings, spark: SparkSession, observer: Observer | None = None) -> Engine:
    assert settings.source is not None
    return Engine(settings, settings.source, observer or Silent(), lambda: spark, "bench")
