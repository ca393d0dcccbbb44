"""All Dagster definitions, created from the saved catalog and the settings."""

from __future__ import annotations

import warnings

import dagster as dg

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.defs.assets import pipeline_assets
from pgcdc_assets.defs.checks import health_checks, slot_asset
from pgcdc_assets.defs.maintenance import maintain_job, maintenance_schedule
from pgcdc_assets.defs.observer import Nobody
from pgcdc_assets.defs.resources import Engines, LakeSpark, Source
from pgcdc_assets.defs.sensors import sync_sensor
from pgcdc_assets.defs.sync import repair_job, sync_job
from pgcdc_assets.settings import Settings


def pipeline(settings: Settings, catalog: Catalog | None) -> dg.Definitions:
    """The whole code location. Without a catalog there are no assets, and the jobs report what to do."""
    followed = catalog if catalog is not None and catalog.tables else None
    # We need backfill policies and observable assets although they are beta; the versions are pinned.
    warnings.filterwarnings("ignore", category=dg.BetaWarning)
    source, pyspark = Source(), LakeSpark.configure_at_launch()
    return dg.Definitions(
        assets=[slot_asset(), *pipeline_assets(followed, messages=bool(settings.messages))] if followed else [],
        asset_checks=[health_checks(followed)] if followed else [],
        jobs=[sync_job, repair_job, maintain_job],
        schedules=[maintenance_schedule()],
        sensors=[sync_sensor(settings)],
        resources={
            "source": source,
            "pyspark": pyspark,
            "engines": Engines(pyspark=pyspark, source=source),
            "watcher": dg.ResourceDefinition(lambda _: Nobody()),
        },
        executor=dg.in_process_executor,
    )
