"""What every operation on a lake works with, opened under the lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from pgcdc_assets.core.catalog import Catalog, Identity
from pgcdc_assets.core.layout import Layout
from pgcdc_assets.flow.observer import Observer
from pgcdc_assets.flow.progress import Progress
from pgcdc_assets.log.table import ChangeLog
from pgcdc_assets.settings import Settings


@dataclass
class Work:
    settings: Settings
    catalog: Catalog
    log: ChangeLog
    progress: Progress
    observer: Observer
    session: Callable[[], SparkSession]
    """Starts Spark at its first call, so that a run without changes never does."""

    @property
    def layout(self) -> Layout:
        return self.settings.layout

    @property
    def identity(self) -> Identity:
        return self.catalog.identity
