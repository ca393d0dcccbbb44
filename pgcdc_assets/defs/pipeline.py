"""All Dagster definitions of one source, created from its settings and the saved catalog."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.defs.assets import pipeline_assets
from pgcdc_assets.defs.checks import slot_asset
from pgcdc_assets.defs.downstream import PgcdcLake
from pgcdc_assets.defs.maintenance import maintain_job, maintenance_schedule
from pgcdc_assets.defs.observer import Watcher
from pgcdc_assets.defs.replication import PgcdcTranslator, Replication
from pgcdc_assets.defs.resources import Engines, Source, lake_spark
from pgcdc_assets.defs.sensors import sync_sensor
from pgcdc_assets.defs.sync import repair_job, sync_job
from pgcdc_assets.defs.verification import asset_checks, verify_job
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Settings

logger = logging.getLogger(__name__)


def pipeline(of: Replication, catalog: Catalog | None) -> dg.Definitions:
    """The source's definitions. If there is no catalog yet, there are no assets, and the jobs report what to do."""
    followed = catalog if catalog is not None and catalog.tables else None
    sync, maintain = sync_job(of), maintain_job(of)
    pyspark = lake_spark(of.settings).configure_at_launch()
    with warnings.catch_warnings():
        # Backfill policies and observable assets are beta features of Dagster. Tests run with the oldest and the newest
        # allowed version of Dagster.
        warnings.simplefilter("ignore", category=dg.BetaWarning)
        slot = slot_asset(of)
        return dg.Definitions(
            assets=[slot, *pipeline_assets(of, followed)] if followed else [],
            asset_checks=[asset_checks(of, followed)] if followed else [],
            jobs=[sync, repair_job(of), maintain, *([verify_job(of, followed)] if followed else [])],
            schedules=[maintenance_schedule(of, maintain)],
            sensors=[sync_sensor(of, sync)],
            resources={
                of.names.pyspark: pyspark,
                of.names.engines: Engines(pyspark=pyspark, source=Source()),
                of.names.lake: PgcdcLake(root=str(of.settings.layout.root)),
                of.names.watcher: dg.ResourceDefinition(lambda _: Watcher()),
            },
        )


def build_pgcdc_defs(
    name: str,
    source: str | dg.EnvVar,
    lake: str | Path,
    state: str | Path,
    *,
    tables: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    translator: PgcdcTranslator | None = None,
    key_prefix: Sequence[str] = (),
    freshness: dg.FreshnessPolicy | None = None,
) -> dg.Definitions:
    """The Dagster definitions of one source. They can be merged with the definitions of other sources and of the
    project.

    Args:
        name: The source's name. Every name that Dagster sees of it begins with this name. It must be unique in a
            Dagster instance.
        source: A libpq conninfo or URL.
        lake: The whole path of a folder, or the URL of a folder in an object store.
        state: The whole path of a folder on this machine for what the project saves, such as the source's catalog. For
            commands of this project, set ``PGCDC_STATE`` to the same path.
        tables: Patterns ``schema.table``; all permanent tables if empty.
        settings: Other settings, by the names that docs/reference/settings.md lists.
        translator: Changes what Dagster shows of each table.
        key_prefix: Parts before the source's name in every asset key.
        freshness: The policy of the asset ``consistent_points``. While the sensor is on, this asset stays fresh even if
            the source does not change.

    Raises SettingsError. Environment variables ``PGCDC_...`` and ``pgcdc.yaml`` are not read, and the working directory
    does not matter.
    """
    given: dict[str, Any] = {
        "name": name,
        "source": _value_of(source, name),
        "tables": tuple(tables),
        "lake": lake,
        "state": state,
    }
    given |= settings or {}
    for setting in ("lake", "state"):
        place = given[setting]
        if "://" not in str(place) and not Path(place).is_absolute():
            raise SettingsError(f"{place} is not an absolute path", thing=f"setting `{setting}` of source {name}")
    of = Replication(Settings.of(**given), translator or PgcdcTranslator(), tuple(key_prefix), freshness=freshness)
    catalog = load_catalog(of.settings.catalog_file)
    if catalog is None:
        file = of.settings.catalog_file
        logger.warning(
            "source %s has no assets yet: %s is missing; run `pgcdc setup` with PGCDC_STATE=%s", name, file, state
        )
    return pipeline(of, catalog)


def _value_of(source: str | dg.EnvVar, name: str) -> str:
    value = source.get_value() if isinstance(source, dg.EnvVar) else source
    if not value:
        what = f"environment variable {source.env_var_name} is not set" if isinstance(source, dg.EnvVar) else "is empty"
        raise SettingsError(
            what, thing=f"source {name}", do="set it in the environment in which Dagster loads the code"
        )
    return value
