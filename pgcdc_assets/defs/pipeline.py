"""All Dagster definitions of one source, created from its settings and the saved catalog: as a function, and as the
component for ``dg``, which a ``defs.yaml`` describes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import Field, TypeAdapter, ValidationError

from pgcdc_assets.core.catalog import Catalog
from pgcdc_assets.defs.assets import pipeline_assets
from pgcdc_assets.defs.checks import slot_asset
from pgcdc_assets.defs.maintenance import maintain_job, maintenance_schedule
from pgcdc_assets.defs.observer import Watcher
from pgcdc_assets.defs.replication import PgcdcTable, PgcdcTranslator, Replication
from pgcdc_assets.defs.resources import Engines, PgcdcLake, Source, lake_spark
from pgcdc_assets.defs.sensors import sync_sensor
from pgcdc_assets.defs.sync import repair_job, sync_job
from pgcdc_assets.defs.verification import asset_checks, verify_job
from pgcdc_assets.errors import SettingsError
from pgcdc_assets.project import load_catalog
from pgcdc_assets.settings import Retention, Settings

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


# The component -------------------------------------------------------------------------------------------


class PgcdcScaffold(dg.Model):
    """The options of ``dg scaffold defs pgcdc_assets.PgcdcComponent``."""

    source: str = Field(
        default="{{ env.PGCDC_SOURCE }}", description="The source: a libpq conninfo or URL, or {{ env.NAME }}."
    )
    lake: str = Field(
        default="",
        description="The lake: a folder of the project, or a URL of an object store. Default: lake/<name>.",
    )


class PgcdcFreshness(dg.Model, dg.Resolvable):
    """The freshness policy of ``consistent_points``, in texts like ``15 minutes``."""

    fail: Annotated[
        str, Field(description="The policy fails if consistent_points was not updated for this time, like 15 minutes.")
    ]
    warn: Annotated[
        str | None,
        Field(description="The policy warns if consistent_points was not updated for this time, like 5 minutes."),
    ] = None

    def policy(self) -> dg.FreshnessPolicy:
        """Raises SettingsError for a text that is not a duration."""
        return dg.FreshnessPolicy.time_window(_duration(self.fail), _duration(self.warn) if self.warn else None)


def _duration(text: str) -> timedelta:
    try:
        return TypeAdapter(Retention).validate_python(text)
    except ValidationError as error:
        raise SettingsError(error.errors()[0]["msg"], thing="attribute `freshness`") from None


class PgcdcScaffolder(dg.Scaffolder[PgcdcScaffold]):
    @classmethod
    def get_scaffold_params(cls) -> type[PgcdcScaffold]:
        return PgcdcScaffold

    def scaffold(self, request: dg.ScaffoldRequest[PgcdcScaffold]) -> None:
        name = request.target_path.name.lower().replace("-", "_")
        attributes = {"name": name, "source": request.params.source, "lake": request.params.lake or f"lake/{name}"}
        dg.scaffold_component(request=request, yaml_attributes=attributes)


@dg.scaffold_with(PgcdcScaffolder)
class PgcdcComponent(dg.Component, dg.Model, dg.Resolvable):
    """Delta Lake tables kept exactly equal to one PostgreSQL database."""

    name: Annotated[
        str, Field(description="The source's name. The names of its assets and jobs in Dagster begin with it.")
    ]
    source: Annotated[str, Field(description="A libpq conninfo or URL, or a variable like {{ env.SHOP_DSN }}.")]
    lake: Annotated[str, Field(description="A folder of the project, or the URL of a folder in an object store.")]
    state: Annotated[
        str | None,
        Field(
            description="The folder on this machine for saved state and logs. Default: .pgcdc/<name> in the project."
        ),
    ] = None
    tables: Annotated[
        Sequence[str],
        Field(description="Patterns like schema.table; a leading - excludes. Default: all permanent tables."),
    ] = ()
    settings: Annotated[Mapping[str, Any], Field(description="Other settings; see docs/reference/settings.md.")] = {}
    freshness: Annotated[
        PgcdcFreshness | None,
        Field(description="How old the newest consistent point may be. Default: no freshness policy."),
    ] = None
    translation: Annotated[
        TranslationFn[PgcdcTable] | None,
        TranslationFnResolver[PgcdcTable](lambda data: {"table": data.table, "stage": data.stage}),
        Field(description="Attributes of each table's assets: key_prefix, group_name, owners, tags, ..."),
    ] = None

    def get_asset_spec(self, data: PgcdcTable) -> dg.AssetSpec:
        """The spec of one asset of a table. Override it in a subclass to change what Dagster shows."""
        spec = PgcdcTranslator().get_asset_spec(data)
        return self.translation(spec, data) if self.translation else spec

    def lake_of(self, root: Path) -> Path | str:
        """The lake's URL or whole path. A relative path in the component's file is below ``root``, the project's
        folder."""
        return self.lake if "://" in self.lake else root / self.lake

    def state_of(self, root: Path) -> Path:
        """The whole path of the folder for state that is saved on this machine. ``root``: see :meth:`lake_of`."""
        return root / (self.state or f".pgcdc/{self.name}")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        root = context.project_root
        return build_pgcdc_defs(
            self.name,
            self.source,
            self.lake_of(root),
            self.state_of(root),
            tables=self.tables,
            settings=self.settings,
            translator=_ByComponent(self),
            freshness=self.freshness.policy() if self.freshness else None,
        )


class _ByComponent(PgcdcTranslator):
    def __init__(self, component: PgcdcComponent) -> None:
        self._component = component

    def get_asset_spec(self, data: PgcdcTable) -> dg.AssetSpec:
        return self._component.get_asset_spec(data)
